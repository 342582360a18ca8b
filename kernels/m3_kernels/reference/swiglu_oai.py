"""M3's activation."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_oai(gate_up: Tensor, *, alpha: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(alpha * gate)` with gate clamped above and up on both sides by `limit`.

    Args:
        gate_up: `[..., 2 I]`, the gate half first (not interleaved).

    Returns:
        `[..., I]` in `gate_up`'s dtype. Source: transformers `minimax_m3_vl`, SGLang `swigluoai`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))
