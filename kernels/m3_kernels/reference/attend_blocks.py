"""Attend to the chosen blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.rows import BLOCK_TOKENS, Rows

LOGITS_AT_A_TIME = 1 << 24
"""Dot products held at a time, which bounds the temporary memory."""


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    rows: Rows,
    chosen: Tensor | None,
    *,
    scale: float,
    workspace: Tensor | None = None,
    out: Tensor,
) -> Tensor:
    """Exact softmax attention of every row over the visible tokens of its chosen blocks.

    Args:
        q: `[T, Hq, D]`; query head h reads kv head `h // (Hq // Hkv)`.
        k, v: `[P, 128, Hkv, D]` pages, bfloat16, float8_e4m3fn or float32.
        page_table: `[R, B]` int32.
        rows: the query tokens; padded rows give zeros.
        chosen: `[Hkv, T, topk]` int32 logical block ids, -1 for none, in any order without repetition, each
            visible to its row; or None for every visible block (the dense layers).
        scale: factor on the dot products.
        workspace: scratch memory of the caller for the kernels; not used here.
        out: `[T, Hq, D]`, overwritten; float32 accumulation (float64 where `q` is float64), one rounding.

    Returns:
        `out`. Tokens that no row sees, and pages that no row chose, may hold anything, NaN included. Rows of
        one request read its chosen blocks together, under a mask. Reads the rows on the host.
    """
    out.zero_()
    kv_heads = k.shape[2]
    for request in rows.request.unique().tolist():
        if request < 0:
            continue
        of_request = torch.where(rows.request == request)[0]
        blocks = int(rows.position[of_request].max()) // BLOCK_TOKENS + 1
        rows_per_tile = max(1, LOGITS_AT_A_TIME // (q.shape[1] * blocks * BLOCK_TOKENS))
        for tile in of_request.split(rows_per_tile):
            mask = _chosen_mask(rows.position[tile], None if chosen is None else chosen[:, tile], blocks)
            used = mask.any(0).any(0).nonzero()[:, 0]
            pages = page_table[request, used].long()
            attended = _attend(
                q[tile],
                k[pages],
                v[pages],
                rows.position[tile],
                used,
                mask[..., used].expand(kv_heads, -1, -1),
                scale,
            )
            out[tile] = attended.to(out.dtype)
    return out


def _chosen_mask(position: Tensor, chosen: Tensor | None, blocks: int) -> Tensor:
    """`[Hkv or 1, t, blocks]`: whether a row attends to a block."""
    if chosen is None:
        return (torch.arange(blocks, device=position.device) <= (position // BLOCK_TOKENS)[:, None])[None]
    # A column past the last block takes the -1 entries.
    mask = torch.zeros((*chosen.shape[:2], blocks + 1), dtype=torch.bool, device=chosen.device)
    mask.scatter_(2, torch.where(chosen < 0, blocks, chosen).long(), True)
    return mask[..., :blocks]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, block: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Attention of q `[t, Hq, D]` to pages k, v `[u, 128, Hkv, D]` of blocks `[u]`; mask `[Hkv, t, u]`."""
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads = k.shape[2]
    token = (block[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=q.device)).flatten()
    visible = mask.repeat_interleave(BLOCK_TOKENS, dim=2) & (token <= position[:, None])
    keys = k.to(compute).flatten(0, 1).transpose(0, 1)
    values = v.to(compute).flatten(0, 1).transpose(0, 1)
    values = values.masked_fill(~visible.any(1)[..., None], 0)
    queries = q.to(compute).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    logits = torch.matmul(queries, keys[:, None].transpose(-1, -2)) * scale
    weights = logits.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
    return torch.matmul(weights, values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
