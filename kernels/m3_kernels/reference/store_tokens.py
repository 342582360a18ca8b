"""Write new tokens' keys, values and index keys into their pages."""

from __future__ import annotations

import torch
from torch import Tensor


def store_tokens(
    k: Tensor,
    v: Tensor,
    index_k: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    index_pages: Tensor,
) -> None:
    """Store each token's key, value and index key at its slot.

    Args:
        k, v: `[T, Hkv, D]`.
        index_k: `[T, 1, D]`.
        slots: `[T]` int64, page * 128 + offset; -1 marks a padded token, which is not stored. No slot twice,
            but for slots that nobody reads, such as SGLang's padding slot 0.
        k_pages, v_pages: `[P, 128, Hkv, D]`, written in place.
        index_pages: `[P, 128, 1, D]`, written in place.

    Each value is rounded once, to nearest even, from its own dtype to the pages' dtype; float8_e4m3fn
    saturates at 448, and NaN stays NaN.
    """
    stored = slots >= 0
    for source, pages in ((k, k_pages), (v, v_pages), (index_k, index_pages)):
        values = source[stored]
        if pages.dtype == torch.float8_e4m3fn:
            values = values.float().clamp(-448.0, 448.0)
        pages.view(-1, *pages.shape[2:])[slots[stored]] = values.to(pages.dtype)
