"""Multiply some tokens by an MXFP8 weight on sm90: tiles of weight rows by tokens, K split over programs.

A program has so few columns of its rows that they stay in its registers, as the matrix unit's first operand
(`wgmma`). It loads and dequantises them before it waits for its predecessor, which writes activations, never
weights. What is left after the wait is to load tokens, once for all warps of the program, and to multiply.
Splitting K gives every multiprocessor a program; a second launch adds the parts in one order.

The order of columns within 128 is the same for weights and tokens, and one in which a thread loads 16 bytes
of a weight row that are its own operands of four products, and 64 of a token that lie together in shared
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch
from m3_kernels.triton.sm90_mxfp8_common import EARLY, LIFT, OPERAND, numbers_and_factor

CHUNK = 128
"""Columns of the smallest product: one scale for each of a thread's two loads of a row."""


@dataclass(frozen=True)
class LinearTile:
    """How a product is divided.

    Attributes:
        rows: weight rows of a program, 64 or 128; a warp has 16 of them.
        tokens: of a tile, a multiple of 8.
        chunks: of 128 columns, multiplied at a time; a power of two.
        steps: products of a program, so that it has 128 * chunks * steps columns.
        walks: programs that share the tiles of tokens, each taking every walks-th one.
    """

    rows: int
    tokens: int
    chunks: int
    steps: int
    walks: int

    @property
    def columns(self) -> int:
        """Columns of a program."""
        return CHUNK * self.chunks * self.steps


def multiply_tiles(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor, tile: LinearTile) -> None:
    """`out` `[M, N]` is `x` `[M, K]`, whose rows are contiguous, times the transpose of the weight `[N, K]`.

    The order of each sum depends on the tile and K alone.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    splits = triton.cdiv(columns, tile.columns)
    parts = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device) if splits > 1 else out
    grid = (triton.cdiv(rows, tile.rows), min(tile.walks, triton.cdiv(tokens, tile.tokens)), splits)
    _tiles_kernel[grid](
        x,
        weight,
        scale,
        parts,
        tokens,
        rows,
        columns,
        x.stride(0),
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        CHUNKS=tile.chunks,
        STEPS=tile.steps,
        EVEN=columns % tile.columns == 0,
        OPERAND=OPERAND,
        num_warps=tile.rows // 16,
        num_stages=1,  # with more, tokens are loaded ahead of the loop, and so before the wait
        **early_launch(True),
    )
    if splits > 1:
        elements = 256 if rows * tile.tokens <= 1 << 16 else 512
        _add_kernel[(triton.cdiv(out.numel(), elements),)](
            parts,
            out,
            out.numel(),
            SPLITS=splits,
            ELEMENTS=elements,
            num_warps=4,
            **early_launch(True),
        )


@triton.jit(do_not_specialize=["tokens"])
def _tiles_kernel(
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
    CHUNKS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`out` `[splits, tokens, rows]`: the product over each split's columns.

    Tensors of pointers have two dimensions, of which the second one is spread over four neighbouring threads
    and the first one over eight and then over warps: how the matrix unit wants a warp's 16 rows.
    """
    WARPS: tl.constexpr = ROWS // 16
    if EARLY:
        # The earlier the next launch begins to load its weights, the better. It waits for this one's end.
        gdc_launch_dependents()
    groups = columns // 32
    split = tl.program_id(2)
    first = split * (STEPS * CHUNKS * 128)

    # As [2 times eight rows, chunks, 2 halves of 32 columns, warps, 8 rows].
    i = tl.arange(0, ROWS * CHUNKS * 2)
    row = _row(i % 8 + i // (16 * WARPS * CHUNKS) * 8 + i // 8 % WARPS * 16, rows, ROWS)
    half = i // (8 * WARPS) % (2 * CHUNKS)
    begin = first + half // 2 * 128
    j = tl.arange(0, 64)
    weight_at = weight + (row * columns + begin + half % 2 * 16)[:, None] + (j // 16 * 32 + j % 16)[None, :]
    weight_group = (begin // 32)[:, None] + (j // 16)[None, :]
    # As [2 times eight rows, chunks, warps, 8 rows].
    i = tl.arange(0, ROWS * CHUNKS)
    row = _row(i % 8 + i // (8 * WARPS * CHUNKS) * 8 + i // 8 % WARPS * 16, rows, ROWS)
    scale_group = (first // 32 + i // (8 * WARPS) % CHUNKS * 4)[:, None] + tl.arange(0, 4)[None, :]
    scale_at = scale + (row * groups)[:, None] + scale_group
    values = ()
    scales = ()
    for step in tl.static_range(STEPS):
        ahead = step * CHUNKS * 4
        if EVEN:
            value = tl.load(weight_at + ahead * 32)
            factor = tl.load(scale_at + ahead)
        else:
            value = tl.load(weight_at + ahead * 32, mask=weight_group + ahead < groups, other=0.0)
            factor = tl.load(scale_at + ahead, mask=scale_group + ahead < groups, other=0)
        values = values + (value,)  # noqa: RUF005 (Triton unpacks no tuples)
        scales = scales + (factor,)  # noqa: RUF005
    numbers = ()
    for step in tl.static_range(STEPS):
        numbers = numbers + (_operand(values[step], scales[step], ROWS, CHUNKS, OPERAND),)  # noqa: RUF005

    # As [4 times 32 columns, chunks, tokens].
    i = tl.arange(0, 4 * CHUNKS * TOKENS)
    begin = first + i // TOKENS % CHUNKS * 128 + i // (TOKENS * CHUNKS) * 32
    x_at = x + begin[:, None] + tl.arange(0, 32)[None, :]
    x_group = (begin // 32)[:, None]
    for tile in range(tl.program_id(1), tl.cdiv(tokens, TOKENS), tl.num_programs(1)):
        if EARLY:
            # In the loop, or the compiler would put the wait before what has to be done before it.
            gdc_wait()
        token = tile * TOKENS + i % TOKENS
        inside = (token < tokens)[:, None]
        token_at = x_at + (token.to(tl.int64) * x_stride)[:, None]
        loaded = (_load_tokens(token_at, x_group, inside, groups, 0, CHUNKS, EVEN),)
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        for step in tl.static_range(STEPS):
            if step + 1 < STEPS:
                following = _load_tokens(token_at, x_group, inside, groups, step + 1, CHUNKS, EVEN)
                loaded = loaded + (following,)  # noqa: RUF005
            operand = tl.reshape(loaded[step], (4, CHUNKS, TOKENS, 2, 4, 2, 2))
            operand = tl.reshape(tl.permute(operand, (1, 3, 4, 5, 0, 6, 2)), (CHUNKS * 128, TOKENS))
            acc = tl.dot(numbers[step], operand.to(OPERAND), acc)
        out_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        out_token = tile * TOKENS + tl.arange(0, TOKENS)
        place = (split.to(tl.int64) * tokens + out_token)[None, :] * rows + out_row[:, None]
        stored = (out_row < rows)[:, None] & (out_token < tokens)[None, :]
        tl.store(out + place, (acc * (2.0**LIFT)).to(out.dtype.element_ty), mask=stored)


@triton.jit
def _row(row, rows, ROWS: tl.constexpr):
    """The weight's row that is a program's `row`-th, or its last one."""
    return tl.minimum(tl.program_id(0) * ROWS + row, rows - 1).to(tl.int64)


@triton.jit
def _operand(values, scales, ROWS: tl.constexpr, CHUNKS: tl.constexpr, OPERAND: tl.constexpr):
    """`[ROWS, CHUNKS * 128]`: the weights of a product, each thread's where the matrix unit wants them.

    Of 16 columns side by side a thread has two neighbours and, eight further, two more: four that lie
    together in memory.
    """
    WARPS: tl.constexpr = ROWS // 16
    numbers, factor = numbers_and_factor(values, scales, OPERAND)
    numbers = tl.reshape(numbers, (2, CHUNKS, 2, WARPS, 8, 4, 16))
    numbers = numbers * tl.reshape(factor, (2, CHUNKS, 1, WARPS, 8, 4, 1))
    numbers = tl.reshape(numbers, (2, CHUNKS, 2, WARPS, 8, 4, 4, 2, 2))
    return tl.reshape(tl.permute(numbers, (3, 0, 4, 1, 2, 6, 7, 5, 8)), (ROWS, CHUNKS * 128))


@triton.jit
def _load_tokens(
    token_at, x_group, inside, groups, step: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr
):
    """`[4 * CHUNKS * TOKENS, 32]`: the tokens' columns of a product."""
    ahead: tl.constexpr = step * CHUNKS * 4
    if EVEN:
        return tl.load(token_at + ahead * 32, mask=inside, other=0.0)
    else:
        return tl.load(token_at + ahead * 32, mask=inside & (x_group + ahead < groups), other=0.0)


@triton.jit
def _add_kernel(parts, out, count, SPLITS: tl.constexpr, ELEMENTS: tl.constexpr):
    """`out` `[count]`: the sum of `parts` `[SPLITS, count]`, first to last."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    loaded = ()
    for split in tl.static_range(SPLITS):
        part = tl.load(parts + split * count.to(tl.int64) + at, mask=inside, other=0.0)
        loaded = loaded + (part,)  # noqa: RUF005 (Triton unpacks no tuples)
    total = loaded[0]
    for split in tl.static_range(1, SPLITS):
        total += loaded[split]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
