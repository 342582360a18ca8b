"""The routed experts of a layer with MXFP8 weights on sm90, dequantising in registers.

Four launches: the pairs of a token and one of its experts are put in the order of experts; gate, up and the
activation; down; and each token's sum. Programs of experts without pairs end at once, so their weights are
not read. With few pairs per expert both products are those of `sm90_mxfp8_experts_few`; with more a tile is
`[weight rows, pairs of one expert]`, as in `sm90_mxfp8_linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch
from m3_kernels.triton.sm90_mxfp8_common import (
    EARLY,
    OPERAND,
    check_weight,
    operand_columns,
    operand_place,
    product,
    swiglu_oai,
)
from m3_kernels.triton.sm90_mxfp8_experts_few import FewExpertsTile, down_few, gate_up_few
from m3_kernels.triton.sm90_mxfp8_linear_few import CHUNK, FewTile


@dataclass(frozen=True)
class ExpertsTile:
    """How the products are divided; sizes in weight rows, pairs and columns.

    Half of a tile's rows in the first product are gate rows, the others the same columns' up rows.
    `walks`: programs that share one expert's pairs, each taking every walks-th tile.
    """

    rows: int
    pairs: int
    columns: int
    walks: int
    warps: int
    stages: int


def experts_tile(pairs: int, experts: int, inner: int) -> ExpertsTile | FewExpertsTile:
    """The division where so many pairs are expected for these experts, which are `inner` wide."""
    each = triton.cdiv(pairs, experts)
    if each > 64:
        return ExpertsTile(256, pairs=128, columns=64, walks=triton.cdiv(each, 64) + 1, warps=8, stages=3)
    if each > 16:
        return ExpertsTile(128, pairs=64, columns=64, walks=triton.cdiv(each, 64) + 1, warps=4, stages=3)
    in_tile = 8 if each <= 2 else 16
    down = FewTile(16, 1, 4, in_tile, 3) if inner >= 8 * CHUNK else FewTile(16, 4, 1, in_tile, 3)
    if each > 2:
        return FewExpertsTile(FewTile(32, 1, 4, in_tile, 2), down, walks=2)
    # So few experts have pairs that a program more along the columns is better than one behind the other.
    up = FewTile(16, 1, 8, in_tile, 2) if 8 * pairs <= experts else FewTile(16, 1, 4, in_tile, 3)
    return FewExpertsTile(up, down, walks=1)


def mxfp8_experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    alpha: float,
    limit: float,
    first_expert: int,
    model_experts: int | None = None,
    tile: ExpertsTile | FewExpertsTile | None = None,
) -> Tensor:
    """The sum over each token's experts here; contract: `m3_kernels.reference.mxfp8_experts`.

    bfloat16 only; what goes into the second product and each expert's output are rounded to bfloat16. No host
    synchronisation; capturable. Sums run in float32 in an order that depends on the shapes alone. `tile` is
    for tuning.
    """
    check_weight(w13, w13_scale)
    check_weight(w2, w2_scale)
    if x.dtype != torch.bfloat16:
        raise ValueError(f"the sm90 kernel multiplies bfloat16, not {x.dtype}")
    tokens, columns = x.shape
    experts, inner = w13.shape[0], w2.shape[2]
    topk = topk_ids.shape[1]
    pairs = tokens * topk
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    tile = tile or experts_tile(pairs * experts // (model_experts or experts), experts, inner)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    routed = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
    topk_weights = topk_weights.contiguous()
    if isinstance(tile, FewExpertsTile):
        order, offset, _ = route(topk_ids, experts, first_expert, None)
        gate_up_few(x.contiguous(), w13, w13_scale, order, offset, hidden, topk, alpha, limit, tile)
        down_few(hidden, w2, w2_scale, order, offset, topk_weights, routed, tile)
    else:
        order, offset, placed = route(topk_ids, experts, first_expert, x)
        _gate_up(placed, w13, w13_scale, order, offset, hidden, topk, alpha, limit, tile)
        _down(hidden, w2, w2_scale, order, offset, topk_weights, routed, tile)
    _sum(routed, topk_ids, first_expert, experts, out)
    return out


def _gate_up(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    order: Tensor,
    offset: Tensor,
    hidden: Tensor,
    topk: int,
    alpha: float,
    limit: float,
    tile: ExpertsTile,
) -> None:
    """`hidden` `[pairs, I]`, in the order of experts and that of the next product's columns; `x` as `route`
    gives it."""
    experts, rows, columns = weight.shape
    inner = rows // 2
    _gate_up_kernel[(triton.cdiv(rows, tile.rows), experts, tile.walks)](
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
        **_constants(tile, columns),
    )


def _down(
    hidden: Tensor,
    weight: Tensor,
    scale: Tensor,
    order: Tensor,
    offset: Tensor,
    topk_weights: Tensor,
    routed: Tensor,
    tile: ExpertsTile,
) -> None:
    """`routed` `[pairs, K]`, by pair number: the expert's output times its weight."""
    experts, columns, inner = weight.shape
    _down_kernel[(triton.cdiv(columns, tile.rows), experts, tile.walks)](
        hidden,
        weight,
        scale,
        order,
        offset,
        topk_weights,
        routed,
        columns,
        inner,
        **_constants(tile, inner),
    )


def _constants(tile: ExpertsTile, columns: int) -> dict[str, object]:
    return {
        "ROWS": tile.rows,
        "PAIRS": tile.pairs,
        "COLUMNS": tile.columns,
        "EVEN": columns % tile.columns == 0,
        "OPERAND": OPERAND,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _sum(routed: Tensor, topk_ids: Tensor, first_expert: int, experts: int, out: Tensor) -> None:
    """`out` `[M, K]`: each token's sum over its choices here of `routed` `[M * topk, K]`."""
    tokens, columns = out.shape
    block = 1024
    _sum_kernel[(tokens, triton.cdiv(columns, block))](
        routed,
        topk_ids.contiguous(),
        out,
        columns,
        first_expert,
        experts,
        TOPK=topk_ids.shape[1],
        COLUMNS=block,
        num_warps=4,
        **early_launch(True),
    )


def route(
    topk_ids: Tensor, experts: int, first_expert: int, x: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The pairs in the order of this rank's experts, and the tokens' columns in that of the products.

    Args:
        topk_ids: `[M, topk]`; pair number m * topk + j is token m's j-th choice.
        x: `[M, K]` or None.

    Returns:
        `[M * topk]` int32, pairs by expert and then by number; `[experts + 1]` int32, where each expert's
        begin, and where the last one's end; and `[M, K]`, `x` in the order of `operand_columns`, if it is
        given. Entries of the first past the end are not written.
    """
    pairs = topk_ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)
    offset = torch.empty(experts + 1, dtype=torch.int32, device=topk_ids.device)
    placed = None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    values = 0 if x is None else x.numel()
    chunk = min(4096, max(16, triton.next_power_of_2(pairs)))
    block = 2048
    _route_kernel[(experts + triton.cdiv(values, block),)](
        topk_ids.contiguous(),
        order if x is None else x.contiguous(),
        order,
        offset,
        order if placed is None else placed,
        pairs,
        values,
        first_expert,
        experts,
        CHUNK=chunk,
        VALUES=block,
        num_warps=4,
        **early_launch(True),
    )
    return order, offset, placed


@triton.jit(do_not_specialize=["pairs", "values"])
def _route_kernel(
    ids,
    x,
    order,
    offset,
    placed,
    pairs,
    values,
    first_expert,
    experts,
    CHUNK: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program per expert counts the pairs of the experts before its own, and then places its own; the
    programs after them reorder the tokens' columns."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    if expert >= experts:
        begin = (expert - experts).to(tl.int64) * VALUES
        at = begin + tl.arange(0, VALUES)
        numbers = tl.load(x + begin + operand_columns(VALUES), mask=at < values)
        tl.store(placed + at, numbers, mask=at < values)
        return
    lane = tl.arange(0, CHUNK)
    place = 0
    for begin in range(0, pairs, CHUNK):
        at = begin + lane
        local = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32) - first_expert
        place += tl.sum(((at < pairs) & (local >= 0) & (local < expert)).to(tl.int32))
    tl.store(offset + expert, place)
    for begin in range(0, pairs, CHUNK):
        at = begin + lane
        local = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32) - first_expert
        mine = (at < pairs) & (local == expert)
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place + rank, at, mask=mine)
        place += tl.sum(mine.to(tl.int32))
    if expert == experts - 1:
        tl.store(offset + experts, place)


@triton.jit
def _gate_up_kernel(
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
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    expert = tl.program_id(1)
    begin = tl.load(offset + expert)
    end = tl.load(offset + expert + 1)
    half: tl.constexpr = ROWS // 2
    tile = tl.program_id(0)
    row = tile * half + tl.arange(0, ROWS) % half
    part = tl.arange(0, ROWS) // half
    weight_row = (expert.to(tl.int64) * 2 * inner + part * inner + tl.minimum(row, inner - 1))[:, None]
    for first in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        token = tl.load(order + at, mask=at < end, other=0) // topk
        acc = product(
            weight + weight_row * columns,
            scale + weight_row * (columns // 32),
            x + token.to(tl.int64)[:, None] * columns,
            0,
            columns,
            columns,
            ROWS,
            COLUMNS,
            PAIRS,
            EVEN,
            True,
            OPERAND,
        )
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, PAIRS)), (1, 2, 0)))
        active = swiglu_oai(gate, up, alpha, limit)
        to = tile * half + tl.arange(0, half)
        inside = (to < inner)[:, None] & (at < end)[None, :]
        place = at.to(tl.int64)[None, :] * inner + operand_place(to)[:, None]
        tl.store(hidden + place, active.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _down_kernel(
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
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    expert = tl.program_id(1)
    begin = tl.load(offset + expert)
    end = tl.load(offset + expert + 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = (expert.to(tl.int64) * columns + tl.minimum(row, columns - 1))[:, None]
    for first in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        safe = tl.minimum(at, end - 1)
        pair = tl.load(order + safe)
        acc = product(
            weight + weight_row * inner,
            scale + weight_row * (inner // 32),
            hidden + safe.to(tl.int64)[:, None] * inner,
            0,
            inner,
            inner,
            ROWS,
            COLUMNS,
            PAIRS,
            EVEN,
            True,
            OPERAND,
        )
        acc = acc * tl.load(topk_weights + pair)[None, :]
        inside = (row < columns)[:, None] & (at < end)[None, :]
        place = pair.to(tl.int64)[None, :] * columns + row[:, None]
        tl.store(routed + place, acc.to(routed.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(
    routed,
    ids,
    out,
    columns,
    first_expert,
    experts,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out` `[tokens, columns]`: each token's sum over its choices on this rank, in their order."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOPK):
        pair = token * TOPK + choice
        local = tl.load(ids + pair).to(tl.int32) - first_expert
        here = (local >= 0) & (local < experts)
        total += tl.load(routed + pair * columns + column, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)
