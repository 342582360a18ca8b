"""Score every visible block for every row, loading each shared index page once."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows

COLUMNS_PER_TILE = 64
"""(row, head) pairs per matrix product. The shape of a product is always [128, D] x [D, 64], whatever the
batch: CPU libraries choose kernels, and so rounding, by shape."""


def score_blocks(
    index_q: Tensor, index_k: Tensor, page_table: Tensor, rows: Rows, plan: PrefixPlan, *, out: Tensor
) -> Tensor:
    """Score of a block for a row: the largest dot product of the row's index query with a visible index key.

    Args:
        index_q: `[T, H, D]` bfloat16 (or float32), index queries after normalisation and rotation.
        index_k: `[P, 128, 1, D]` pages of index keys, bfloat16, float8_e4m3fn or float32.
        page_table: `[R, B]` int32.
        rows: the query tokens; padded rows get -inf everywhere.
        plan: `plan_prefix` of the same table and rows; each span's pages are loaded once.
        out: `[H, T, B]` float32, overwritten: the maximum over the block's tokens at positions up to the
            row's own of the dot product, accumulated in float32; no scale, no softmax. A product that is NaN
            counts as -inf. -inf for blocks past the row's own.

    Returns:
        `out`. The bits of an entry depend on its own query, keys and position alone, not on the span, tile,
        batch or phase it was computed in. Reads the plan on the host.
    """
    out.fill_(float("-inf"))
    heads, _, _ = out.shape
    token = torch.arange(BLOCK_TOKENS, device=out.device)
    spans = zip(
        *(
            field.tolist()
            for field in (
                plan.first_block,
                plan.block_count,
                plan.row_start,
                plan.row_count,
                plan.page_request,
            )
        )
    )
    for first, count, row_start, row_count, request in spans:
        if count == 0:
            continue
        keys = index_k[page_table[request, first : first + count].long(), :, 0].float()
        token_position = (torch.arange(first, first + count, device=out.device) * BLOCK_TOKENS)[
            :, None
        ] + token
        rows_per_tile = max(1, COLUMNS_PER_TILE // heads)
        for begin in range(row_start, row_start + row_count, rows_per_tile):
            end = min(begin + rows_per_tile, row_start + row_count)
            row = plan.row_order[begin:end].long()
            tile = index_q.new_zeros(
                (max(rows_per_tile * heads, COLUMNS_PER_TILE), index_q.shape[-1]), dtype=torch.float32
            )
            tile[: len(row) * heads] = index_q[row].reshape(-1, index_q.shape[-1]).float()
            product = torch.bmm(keys, tile.T.expand(count, -1, -1))[:, :, : len(row) * heads]
            product = product.reshape(count, BLOCK_TOKENS, len(row), heads)
            visible = (token_position[:, :, None] <= rows.position[row])[..., None] & ~product.isnan()
            best = product.masked_fill(~visible, float("-inf")).amax(1)
            out[:, row, first : first + count] = best.permute(2, 1, 0)
    return out
