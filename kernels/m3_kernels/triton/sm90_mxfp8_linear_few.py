"""Multiply few tokens by an MXFP8 weight on sm90: the time is that of reading the weight once.

Warps share the columns of K, so that one launch has enough programs without a second one that adds parts. A
thread loads 16 bytes of a weight row at a time, exactly those that it needs as an operand of the matrix unit
(`mma.m16n8k16`): weights take no way through shared memory, and all loads of a program are in flight at once.
They are issued before the launch waits for its predecessor, which writes activations, never weights.

The order of columns within 128 is the same for weights and tokens, and one in which a thread's operands of
eight products lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch
from m3_kernels.triton.sm90_mxfp8_common import EARLY, LIFT, OPERAND, numbers_and_factor

CHUNK = 128
"""Columns that a warp multiplies at a time: one scale for each of a thread's four loads."""


@dataclass(frozen=True)
class FewTile:
    """How a product of few tokens is divided.

    Attributes:
        rows: weight rows of a warp, a multiple of 16.
        row_warps: warps of a program along the rows.
        column_warps: warps that share the columns, a power of two like `row_warps`.
        tokens: of a program, a multiple of 8.
        steps: chunks of columns that a warp has in flight.
    """

    rows: int
    row_warps: int
    column_warps: int
    tokens: int
    steps: int


FEW_TOKENS = 8
"""Up to so many tokens these products are the fastest ones; with more, loading tokens takes too long."""

STEPS = 6
"""Chunks whose weights fit a warp's registers: with M3's weights all that it multiplies."""


def few_tile(columns: int) -> FewTile:
    """The division for up to FEW_TOKENS tokens: so many warps along the columns that each has all its weights
    in flight at once."""
    chunks = triton.cdiv(columns, CHUNK)
    column_warps = min(16, max(2, triton.next_power_of_2(triton.cdiv(chunks, STEPS))))
    return FewTile(16, max(1, 4 // column_warps), column_warps, FEW_TOKENS, STEPS)


def multiply_few(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, tile: FewTile) -> None:
    """`out` `[M, N]` is `x` `[M, K]`, whose rows are contiguous, times the transpose of the weight `[N, K]`.

    The order of each sum depends on the tile and K alone.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    turns = triton.cdiv(columns, CHUNK * tile.column_warps)
    steps = min(turns, tile.steps)
    grid = (triton.cdiv(rows, tile.rows * tile.row_warps), triton.cdiv(tokens, tile.tokens))
    _few_kernel[grid](
        x,
        weight,
        scale,
        out,
        tokens,
        rows,
        columns,
        x.stride(0),
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        ROW_WARPS=tile.row_warps,
        COLUMN_WARPS=tile.column_warps,
        STEPS=steps,
        ONCE=steps == turns,
        EVEN=columns % (CHUNK * tile.column_warps * steps) == 0,
        OPERAND=OPERAND,
        num_warps=tile.row_warps * tile.column_warps,
        num_stages=1,
        **early_launch(True),
    )


@triton.jit(do_not_specialize=["tokens"])
def _few_kernel(
    x,
    weight,
    scale,
    out,
    tokens,
    rows,
    columns,
    x_stride,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """A program has ROWS * ROW_WARPS rows, TOKENS tokens and all columns; its warps are a batch.

    Tensors of pointers have two dimensions, of which the second one is spread over four neighbouring threads
    and the first one over eight and then over warps: how the matrix unit wants its operands, so that no
    value changes its thread afterwards.
    """
    WARPS: tl.constexpr = ROW_WARPS * COLUMN_WARPS
    groups = columns // 32
    warp, at, half = weight_places(ROWS, WARPS)
    row = _row(warp, at, rows, ROWS, ROW_WARPS, COLUMN_WARPS)
    weight_at, weight_group = weight_pointers(weight + row * columns, warp % COLUMN_WARPS, half)
    warp, at = scale_places(ROWS, WARPS)
    row = _row(warp, at, rows, ROWS, ROW_WARPS, COLUMN_WARPS)
    scale_at, scale_group = scale_pointers(scale + row * groups, warp % COLUMN_WARPS)
    warp, at, quarter = token_places(TOKENS, WARPS)
    token = tl.program_id(1) * TOKENS + at
    x_at, x_group = token_pointers(x + token.to(tl.int64) * x_stride, warp % COLUMN_WARPS, quarter)
    token_inside = (token < tokens)[:, None]

    acc = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    values, scales = load_chunks(
        weight_at, weight_group, scale_at, scale_group, groups, 0, STEPS, COLUMN_WARPS, EVEN
    )
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    acc = multiply_chunks(
        values, scales, x_at, x_group, token_inside, groups, 0, acc,
        ROWS, TOKENS, WARPS, STEPS, COLUMN_WARPS, EVEN, OPERAND,
    )  # fmt: skip
    if not ONCE:
        together: tl.constexpr = STEPS * COLUMN_WARPS
        for chunk in range(together, tl.cdiv(columns, 128), together):
            values, scales = load_chunks(
                weight_at, weight_group, scale_at, scale_group, groups, chunk, STEPS, COLUMN_WARPS, EVEN
            )
            acc = multiply_chunks(
                values, scales, x_at, x_group, token_inside, groups, chunk, acc,
                ROWS, TOKENS, WARPS, STEPS, COLUMN_WARPS, EVEN, OPERAND,
            )  # fmt: skip
    total = tl.sum(tl.reshape(acc, (ROW_WARPS, COLUMN_WARPS, ROWS, TOKENS)), 1) * (2.0**LIFT)
    total = tl.reshape(total, (ROW_WARPS * ROWS, TOKENS))
    row = tl.program_id(0) * (ROW_WARPS * ROWS) + tl.arange(0, ROW_WARPS * ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    place = token.to(tl.int64)[None, :] * rows + row[:, None]
    inside = (row < rows)[:, None] & (token < tokens)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row(warp, row, rows, ROWS: tl.constexpr, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr):
    """The weight's row that is a warp's `row`-th, or its last one."""
    row += (tl.program_id(0) * ROW_WARPS + warp // COLUMN_WARPS) * ROWS
    return tl.minimum(row, rows - 1).to(tl.int64)


@triton.jit
def weight_places(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """`[ROWS * 2 * WARPS]`, as `[ROWS / 8, 2, WARPS, 8]`: warp, row of the warp, which half of 32 columns."""
    i = tl.arange(0, ROWS * 2 * WARPS)
    return i // 8 % WARPS, i // (16 * WARPS) * 8 + i % 8, i // (8 * WARPS) % 2


@triton.jit
def scale_places(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """`[ROWS * WARPS]`, as `[ROWS / 8, WARPS, 8]`: warp, row of the warp."""
    i = tl.arange(0, ROWS * WARPS)
    return i // 8 % WARPS, i // (8 * WARPS) * 8 + i % 8


@triton.jit
def token_places(TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """`[TOKENS * 4 * WARPS]`, as `[TOKENS / 8, 4, WARPS, 8]`: warp, token, which 8 of 32 columns."""
    i = tl.arange(0, TOKENS * 4 * WARPS)
    return i // 8 % WARPS, i // (32 * WARPS) * 8 + i % 8, i // (8 * WARPS) % 4


@triton.jit
def weight_pointers(rows, chunk, half):
    """`[n, 64]` pointers into `rows` `[n]`, and their groups of 32 columns: 16 columns of each group."""
    j = tl.arange(0, 64)
    at = (rows + chunk * 128 + half * 16)[:, None] + (j // 16 * 32 + j % 16)[None, :]
    return at, (chunk * 4)[:, None] + (j // 16)[None, :]


@triton.jit
def scale_pointers(rows, chunk):
    """`[n, 4]` pointers into the scales' `rows` `[n]`, and their groups."""
    j = tl.arange(0, 4)
    return (rows + chunk * 4)[:, None] + j[None, :], (chunk * 4)[:, None] + j[None, :]


@triton.jit
def token_pointers(rows, chunk, quarter):
    """`[n, 32]` pointers into the tokens' `rows` `[n]`, and their groups: 8 columns of each."""
    j = tl.arange(0, 32)
    at = (rows + chunk * 128 + quarter * 8)[:, None] + (j // 8 * 32 + j % 8)[None, :]
    return at, (chunk * 4)[:, None] + (j // 8)[None, :]


@triton.jit
def load_chunks(
    weight_at,
    weight_group,
    scale_at,
    scale_group,
    groups,
    chunk,
    STEPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The weights and scales of STEPS chunks for every warp, the first warp's first one being `chunk`."""
    values = ()
    scales = ()
    for step in tl.static_range(STEPS):
        at = chunk + step * COLUMN_WARPS
        if EVEN:
            values = values + (tl.load(weight_at + at * 128),)  # noqa: RUF005 (Triton unpacks no tuples)
            scales = scales + (tl.load(scale_at + at * 4),)  # noqa: RUF005
        else:
            inside = at * 4 + weight_group < groups
            values = values + (tl.load(weight_at + at * 128, mask=inside, other=0.0),)  # noqa: RUF005
            inside = at * 4 + scale_group < groups
            scales = scales + (tl.load(scale_at + at * 4, mask=inside, other=0),)  # noqa: RUF005
    return values, scales


@triton.jit
def multiply_chunks(
    values,
    scales,
    x_at,
    x_group,
    token_inside,
    groups,
    chunk,
    acc,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`acc` `[WARPS, ROWS, TOKENS]` plus the products of what `load_chunks` gave with the tokens."""
    for step in tl.static_range(STEPS):
        at = chunk + step * COLUMN_WARPS
        if EVEN:
            x = tl.load(x_at + at * 128, mask=token_inside, other=0.0)
        else:
            x = tl.load(x_at + at * 128, mask=token_inside & (at * 4 + x_group < groups), other=0.0)
        numbers, factor = numbers_and_factor(values[step], scales[step], OPERAND)
        numbers = tl.reshape(numbers, (ROWS // 8, 2, WARPS, 8, 4, 16))
        numbers = numbers * tl.reshape(factor, (ROWS // 8, 1, WARPS, 8, 4, 1))
        # Within 32 columns an operand has a thread's four at 4 * quad and at 16 + 4 * quad.
        numbers = tl.reshape(numbers, (ROWS // 8, 2, WARPS, 8, 4, 2, 2, 4))
        numbers = tl.reshape(tl.permute(numbers, (2, 0, 3, 1, 5, 6, 4, 7)), (WARPS, ROWS, 128))
        x = tl.reshape(x, (TOKENS // 8, 2, 2, WARPS, 8, 4, 2, 4))
        x = tl.reshape(tl.permute(x, (3, 1, 2, 6, 5, 7, 0, 4)), (WARPS, 128, TOKENS))
        acc = tl.dot(numbers, x.to(OPERAND), acc)
    return acc
