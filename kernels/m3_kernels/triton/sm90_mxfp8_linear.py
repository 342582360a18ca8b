"""Multiply by an MXFP8 weight on sm90, by three ways.

Few tokens: `sm90_mxfp8_linear_few`. Many: the weight is written as bfloat16 once per call, which are the same
numbers, and cuBLAS multiplies. Between them a tile of the product is `[weight rows, tokens]`, dequantised in
registers: the time is that of reading the weight, and K is split over programs until every multiprocessor has
two; a second launch adds the parts in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch, multiprocessors
from m3_kernels.triton.sm90_mxfp8_common import EARLY, OPERAND, check_weight, product
from m3_kernels.triton.sm90_mxfp8_dequantize import dequantize_mxfp8
from m3_kernels.triton.sm90_mxfp8_linear_few import FEW_TOKENS, FewTile, few_tile, multiply_few


@dataclass(frozen=True)
class LinearTile:
    """How a product is divided; sizes in weight rows, tokens and columns of K."""

    rows: int
    tokens: int
    columns: int
    splits: int
    warps: int
    stages: int


LARGE = 1 << 24
"""Values of a weight from which on writing them as bfloat16 pays off for more than 64 tokens only, not 32."""


def through_bfloat16(tokens: int, rows: int, columns: int) -> bool:
    """Whether so many tokens are faster multiplied by the weight as bfloat16."""
    return tokens > (64 if rows * columns > LARGE else 32)


def linear_tile(tokens: int, rows: int, columns: int, processors: int) -> LinearTile:
    """The division for `[tokens, columns] x [rows, columns]` on a GPU of so many multiprocessors."""
    if tokens > 32:
        splits = max(1, min(processors // triton.cdiv(rows, 128), columns // 128))
        return LinearTile(128, tokens=64, columns=128, splits=splits, warps=8, stages=4)
    tile_tokens = max(16, triton.next_power_of_2(tokens))
    programs = triton.cdiv(rows, 64) * triton.cdiv(tokens, tile_tokens)
    splits = max(1, min(12, triton.cdiv(2 * processors, programs), columns // 256))
    return LinearTile(64, tile_tokens, columns=128, splits=splits, warps=4, stages=3)


def mxfp8_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, tile: LinearTile | FewTile | None = None
) -> Tensor:
    """`x` times the transpose of the weight's numbers; contract: `m3_kernels.reference.mxfp8_linear`.

    bfloat16 only. Sums run in float32, in an order that depends on the shapes alone. Many tokens
    (`through_bfloat16`) take scratch memory of two bytes per value of the weight and sums as PyTorch's
    bfloat16 product has them. `tile` is for tuning.

    The launch may begin before its predecessor on the stream has ended and reads weight and scale then:
    these must be older than the predecessor. `x` may be what the predecessor writes.
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
    if tile is None:
        if tokens <= FEW_TOKENS:
            tile = few_tile(tokens, columns)
        elif through_bfloat16(tokens, rows, columns):
            return torch.mm(x, dequantize_mxfp8(weight, scale).T)
        else:
            tile = linear_tile(tokens, rows, columns, multiprocessors(x.device))
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if isinstance(tile, FewTile):
        multiply_few(x, weight, scale, out, tile)
    elif tile.splits == 1:
        _multiply(x, weight, scale, out, tile)
    else:
        parts = torch.empty(tile.splits, tokens, rows, dtype=torch.float32, device=x.device)
        _multiply(x, weight, scale, parts, tile)
        _add_parts(parts, out)
    return out


def _multiply(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, tile: LinearTile) -> None:
    """`out` `[M, N]`, or with splits `[splits, M, N]` float32: the product over each split's columns."""
    tokens, columns = x.shape
    rows = weight.shape[0]
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens), tile.splits)
    _linear_kernel[grid](
        x,
        weight,
        scale,
        out,
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
        **early_launch(True),
    )


def _add_parts(parts: Tensor, out: Tensor) -> None:
    """`out` is the sum of `parts` `[splits, *out.shape]` float32, first to last."""
    count = out.numel()
    _add_kernel[(triton.cdiv(count, 1024),)](
        parts,
        out,
        count,
        parts.shape[0],
        ELEMENTS=1024,
        num_warps=4,
        **early_launch(True),
    )


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
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
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
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    total = tl.load(parts + at, mask=inside, other=0.0)
    for split in range(1, splits):
        total += tl.load(parts + split * count.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
