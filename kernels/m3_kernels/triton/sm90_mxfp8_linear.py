"""Multiply by an MXFP8 weight on sm90, dequantising in registers.

A tile of the product is `[weight rows, tokens]`, so that few tokens waste little of the matrix unit, whose
first operand comes in 64 rows. With few tokens the time is that of reading the weight; K is then split over
programs until every multiprocessor has two, and a second launch adds the parts in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3_kernels.triton.sm90_common import multiprocessors
from m3_kernels.triton.sm90_mxfp8_common import OPERAND, check_weight, product


@dataclass(frozen=True)
class LinearTile:
    """How a product is divided; sizes in weight rows, tokens and columns of K."""

    rows: int
    tokens: int
    columns: int
    splits: int
    warps: int
    stages: int


def linear_tile(tokens: int, rows: int, columns: int, processors: int) -> LinearTile:
    """The division for `[tokens, columns] x [rows, columns]` on a GPU of so many multiprocessors."""
    if tokens > 64:
        tile_rows, tile_tokens, tile_columns, warps = 128, 64, 64, 4
    else:
        tile_rows, tile_columns, warps = 64, 128, 4
        tile_tokens = max(16, triton.next_power_of_2(tokens))
    programs = triton.cdiv(rows, tile_rows) * triton.cdiv(tokens, tile_tokens)
    splits = max(1, min(12, triton.cdiv(2 * processors, programs), columns // 256))
    return LinearTile(tile_rows, tile_tokens, tile_columns, splits, warps, stages=3)


def mxfp8_linear(x: Tensor, weight: Tensor, scale: Tensor, *, tile: LinearTile | None = None) -> Tensor:
    """`x` times the transpose of the weight's numbers; contract: `m3_kernels.reference.mxfp8_linear`.

    bfloat16 only. Sums run in float32, in an order that depends on the shapes alone. `tile` is for tuning.
    """
    check_weight(weight, scale)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the sm90 kernel multiplies bfloat16, not {x.dtype}")
    tokens, columns = x.shape
    rows = weight.shape[0]
    if tokens == 0:
        return x.new_empty(0, rows)
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = tile or linear_tile(tokens, rows, columns, multiprocessors(x.device))
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    target = out
    if tile.splits > 1:
        target = torch.empty(tile.splits, tokens, rows, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), tile.splits)
    _linear_kernel[grid](
        x,
        weight,
        scale,
        target,
        tokens,
        rows,
        columns,
        x.stride(0),
        triton.cdiv(triton.cdiv(columns, tile.columns), tile.splits) * tile.columns,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
        EVEN=columns % tile.columns == 0,
        OPERAND=OPERAND,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if tile.splits > 1:
        _add_kernel[(triton.cdiv(tokens * rows, 1024),)](
            target, out, tokens * rows, tile.splits, ELEMENTS=1024, num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x,
    weight,
    scale,
    out,
    tokens,
    rows,
    columns,
    x_stride,
    split_columns,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`out` `[splits, tokens, rows]`: the product over each split's columns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    split = tl.program_id(2)
    safe_row = tl.minimum(row, rows - 1)
    safe_token = tl.minimum(token, tokens - 1)
    begin = tl.multiple_of(split * split_columns, COLUMNS)
    acc = product(
        weight + safe_row.to(tl.int64)[:, None] * columns,
        scale + safe_row.to(tl.int64)[:, None] * (columns // 32),
        x + safe_token.to(tl.int64)[:, None] * x_stride,
        begin,
        tl.minimum(begin + split_columns, columns),
        columns,
        ROWS,
        COLUMNS,
        TOKENS,
        EVEN,
        False,
        OPERAND,
    )
    place = (split.to(tl.int64) * tokens + token)[None, :] * rows + row[:, None]
    inside = (row < rows)[:, None] & (token < tokens)[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(parts, out, count, splits, ELEMENTS: tl.constexpr):
    """`out` `[count]`: the sum of `parts` `[splits, count]`, first to last."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    total = tl.load(parts + at, mask=inside, other=0.0)
    for split in range(1, splits):
        total += tl.load(parts + split * count.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
