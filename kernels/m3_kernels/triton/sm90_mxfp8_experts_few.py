"""The routed experts of a step with few pairs per expert on sm90: the time is that of reading the weights.

Warps share the columns and weights go straight to the matrix unit, as in `sm90_mxfp8_linear_few`. A warp's
16 rows of the first product are eight gate rows and the same eight up rows, so the activation needs no
second launch. Programs of experts without pairs end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch
from m3_kernels.triton.sm90_mxfp8_common import EARLY, LIFT, OPERAND, swiglu_oai
from m3_kernels.triton.sm90_mxfp8_linear_few import (
    CHUNK,
    FewTile,
    load_chunks,
    multiply_chunks,
    scale_places,
    scale_pointers,
    token_places,
    token_pointers,
    weight_places,
    weight_pointers,
)


@dataclass(frozen=True)
class FewExpertsTile:
    """How both products are divided; `tokens` of the tiles are pairs of one expert.

    `walks`: programs that share one expert's pairs, each taking every walks-th tile.
    """

    up: FewTile
    down: FewTile
    walks: int


def gate_up_few(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    order: Tensor,
    offset: Tensor,
    hidden: Tensor,
    topk: int,
    alpha: float,
    limit: float,
    tile: FewExpertsTile,
) -> None:
    """`hidden` `[pairs, I]`, in the order of experts: the activation of gate and up.

    Args:
        x: `[M, K]` contiguous.
        weight, scale: `[E, 2 * I, K]` and its scales, gate rows first.
        order, offset: as `sm90_mxfp8_experts.route` gives them.
    """
    experts, rows, columns = weight.shape
    inner = rows // 2
    grid = (triton.cdiv(inner, tile.up.rows * tile.up.row_warps // 2), experts, tile.walks)
    _gate_up_few_kernel[grid](
        x,
        weight,
        scale,
        order,
        offset,
        hidden,
        columns,
        inner,
        topk,
        alpha,
        limit,
        **_constants(tile.up, columns),
    )


def down_few(
    hidden: Tensor,
    weight: Tensor,
    scale: Tensor,
    order: Tensor,
    offset: Tensor,
    topk_weights: Tensor,
    routed: Tensor,
    tile: FewExpertsTile,
) -> None:
    """`routed` `[pairs, K]`, by pair number: each expert's output times its weight.

    `weight` is `[E, K, I]`; the rest is as for `gate_up_few`.
    """
    experts, columns, inner = weight.shape
    grid = (triton.cdiv(columns, tile.down.rows * tile.down.row_warps), experts, tile.walks)
    _down_few_kernel[grid](
        hidden,
        weight,
        scale,
        order,
        offset,
        topk_weights,
        routed,
        columns,
        inner,
        **_constants(tile.down, inner),
    )


def _constants(tile: FewTile, columns: int) -> dict[str, object]:
    turns = triton.cdiv(columns, CHUNK * tile.column_warps)
    steps = min(turns, tile.steps)
    return {
        "ROWS": tile.rows,
        "PAIRS": tile.tokens,
        "ROW_WARPS": tile.row_warps,
        "COLUMN_WARPS": tile.column_warps,
        "STEPS": steps,
        "EVEN": columns % (CHUNK * tile.column_warps * steps) == 0,
        "OPERAND": OPERAND,
        "num_warps": tile.row_warps * tile.column_warps,
        "num_stages": 1,
        **early_launch(True),
    }


@triton.jit
def _sum_of_columns(
    weight_at,
    weight_group,
    scale_at,
    scale_group,
    x_at,
    x_group,
    x_inside,
    columns,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`[ROW_WARPS, ROWS, PAIRS]` float32: the product over all columns."""
    WARPS: tl.constexpr = ROW_WARPS * COLUMN_WARPS
    acc = tl.zeros((WARPS, ROWS, PAIRS), tl.float32)
    for chunk in range(0, tl.cdiv(columns, 128), STEPS * COLUMN_WARPS):
        values, scales = load_chunks(
            weight_at, weight_group, scale_at, scale_group, columns // 32, chunk, STEPS, COLUMN_WARPS, EVEN
        )
        acc = multiply_chunks(
            values, scales, x_at, x_group, x_inside, columns // 32, chunk, acc,
            ROWS, PAIRS, WARPS, STEPS, COLUMN_WARPS, EVEN, OPERAND,
        )  # fmt: skip
    return tl.sum(tl.reshape(acc, (ROW_WARPS, COLUMN_WARPS, ROWS, PAIRS)), 1) * (2.0**LIFT)


@triton.jit
def _gate_up_row(at, warp, inner, ROWS: tl.constexpr, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr):
    """The weight's row of one expert that is a warp's `at`-th: eight of gate, the same eight of up, ..."""
    row = (tl.program_id(0) * ROW_WARPS + warp // COLUMN_WARPS) * (ROWS // 2) + at // 16 * 8 + at % 8
    return tl.minimum(row, inner - 1) + at // 8 % 2 * inner


@triton.jit
def _gate_up_few_kernel(
    x,
    weight,
    scale,
    order,
    offset,
    hidden,
    columns,
    inner,
    topk,
    alpha,
    limit,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    WARPS: tl.constexpr = ROW_WARPS * COLUMN_WARPS
    HALF: tl.constexpr = ROWS // 2
    expert = tl.program_id(1)
    first_row = expert.to(tl.int64) * 2 * inner
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.load(offset + expert) + tl.program_id(2) * PAIRS
    end = tl.load(offset + expert + 1)
    if begin < end:
        warp, at, half = weight_places(ROWS, WARPS)
        row = first_row + _gate_up_row(at, warp, inner, ROWS, ROW_WARPS, COLUMN_WARPS)
        weight_at, weight_group = weight_pointers(weight + row * columns, warp % COLUMN_WARPS, half)
        warp, at = scale_places(ROWS, WARPS)
        row = first_row + _gate_up_row(at, warp, inner, ROWS, ROW_WARPS, COLUMN_WARPS)
        scale_at, scale_group = scale_pointers(scale + row * (columns // 32), warp % COLUMN_WARPS)
        warp, in_tile, quarter = token_places(PAIRS, WARPS)
        for first in range(begin, end, tl.num_programs(2) * PAIRS):
            pair = first + in_tile
            token = tl.load(order + pair, mask=pair < end, other=0) // topk
            x_at, x_group = token_pointers(x + token.to(tl.int64) * columns, warp % COLUMN_WARPS, quarter)
            total = _sum_of_columns(
                weight_at, weight_group, scale_at, scale_group, x_at, x_group, (pair < end)[:, None], columns,
                ROWS, PAIRS, ROW_WARPS, COLUMN_WARPS, STEPS, EVEN, OPERAND,
            )  # fmt: skip
            total = tl.reshape(total, (ROW_WARPS * ROWS // 16, 2, 8, PAIRS))
            gate, up = tl.split(tl.permute(total, (0, 2, 3, 1)))
            active = tl.reshape(swiglu_oai(gate, up, alpha, limit), (ROW_WARPS * HALF, PAIRS))
            to = tl.program_id(0) * (ROW_WARPS * HALF) + tl.arange(0, ROW_WARPS * HALF)
            stored = first + tl.arange(0, PAIRS)
            inside = (to < inner)[:, None] & (stored < end)[None, :]
            place = stored.to(tl.int64)[None, :] * inner + to[:, None]
            tl.store(hidden + place, active.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _down_row(at, warp, columns, ROWS: tl.constexpr, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr):
    """The weight's row of one expert that is a warp's `at`-th, or the last one."""
    row = (tl.program_id(0) * ROW_WARPS + warp // COLUMN_WARPS) * ROWS + at
    return tl.minimum(row, columns - 1)


@triton.jit
def _down_few_kernel(
    hidden,
    weight,
    scale,
    order,
    offset,
    topk_weights,
    routed,
    columns,
    inner,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROW_WARPS: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    WARPS: tl.constexpr = ROW_WARPS * COLUMN_WARPS
    expert = tl.program_id(1)
    first_row = expert.to(tl.int64) * columns
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    begin = tl.load(offset + expert) + tl.program_id(2) * PAIRS
    end = tl.load(offset + expert + 1)
    if begin < end:
        warp, at, half = weight_places(ROWS, WARPS)
        row = first_row + _down_row(at, warp, columns, ROWS, ROW_WARPS, COLUMN_WARPS)
        weight_at, weight_group = weight_pointers(weight + row * inner, warp % COLUMN_WARPS, half)
        warp, at = scale_places(ROWS, WARPS)
        row = first_row + _down_row(at, warp, columns, ROWS, ROW_WARPS, COLUMN_WARPS)
        scale_at, scale_group = scale_pointers(scale + row * (inner // 32), warp % COLUMN_WARPS)
        warp, in_tile, quarter = token_places(PAIRS, WARPS)
        for first in range(begin, end, tl.num_programs(2) * PAIRS):
            x_row = first + in_tile
            x_at, x_group = token_pointers(hidden + x_row.to(tl.int64) * inner, warp % COLUMN_WARPS, quarter)
            total = _sum_of_columns(
                weight_at, weight_group, scale_at, scale_group, x_at, x_group, (x_row < end)[:, None], inner,
                ROWS, PAIRS, ROW_WARPS, COLUMN_WARPS, STEPS, EVEN, OPERAND,
            )  # fmt: skip
            total = tl.reshape(total, (ROW_WARPS * ROWS, PAIRS))
            stored = first + tl.arange(0, PAIRS)
            pair = tl.load(order + stored, mask=stored < end, other=0)
            total = total * tl.load(topk_weights + pair, mask=stored < end, other=0.0)[None, :]
            to = tl.program_id(0) * (ROW_WARPS * ROWS) + tl.arange(0, ROW_WARPS * ROWS)
            inside = (to < columns)[:, None] & (stored < end)[None, :]
            place = pair.to(tl.int64)[None, :] * columns + to[:, None]
            tl.store(routed + place, total.to(routed.dtype.element_ty), mask=inside)
