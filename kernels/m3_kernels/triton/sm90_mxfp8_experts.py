"""The routed experts of a layer with MXFP8 weights on sm90, dequantising in registers.

Four launches: the pairs of a token and one of its experts are put in the order of experts; gate, up and the
activation; down; and each token's sum. A tile is `[weight rows, pairs of one expert]`, as in
`sm90_mxfp8_linear`. Programs of experts without pairs end at once, so their weights are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3_kernels.triton.sm90_mxfp8_common import LIFT, OPERAND, check_weight, dequantized, operand_columns


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


def experts_tile(pairs: int, experts: int) -> ExpertsTile:
    """The division where so many pairs are expected for these experts."""
    each = triton.cdiv(pairs, experts)
    if each > 8:
        return ExpertsTile(128, pairs=64, columns=64, walks=triton.cdiv(each, 64) + 1, warps=4, stages=3)
    walks = 1 if pairs <= experts else 2
    if experts > 32:
        return ExpertsTile(128, pairs=16, columns=64, walks=walks, warps=4, stages=3)
    columns = 256 if 4 * pairs < experts else 128
    return ExpertsTile(64, pairs=16, columns=columns, walks=walks, warps=4, stages=3)


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
    tile: ExpertsTile | None = None,
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
    x, topk_weights = x.contiguous(), topk_weights.contiguous()
    tile = tile or experts_tile(pairs * experts // (model_experts or experts), experts)
    order, offset = route(topk_ids, experts, first_expert)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    routed = torch.empty(pairs, columns, dtype=x.dtype, device=x.device)
    shape = {
        "PAIRS": tile.pairs,
        "COLUMNS": tile.columns,
        "OPERAND": OPERAND,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _gate_up_kernel[(triton.cdiv(2 * inner, tile.rows), experts, tile.walks)](
        x,
        w13,
        w13_scale,
        order,
        offset,
        hidden,
        columns,
        inner,
        topk,
        alpha,
        limit,
        ROWS=tile.rows,
        EVEN=columns % tile.columns == 0,
        **shape,
    )
    _down_kernel[(triton.cdiv(columns, tile.rows), experts, tile.walks)](
        hidden,
        w2,
        w2_scale,
        order,
        offset,
        topk_weights,
        routed,
        columns,
        inner,
        ROWS=tile.rows,
        EVEN=inner % tile.columns == 0,
        **shape,
    )
    sum_experts(routed, topk_ids, out, experts, first_expert)
    return out


def route(topk_ids: Tensor, experts: int, first_expert: int) -> tuple[Tensor, Tensor]:
    """The pairs in the order of this rank's experts.

    Args:
        topk_ids: `[M, topk]`; pair number m * topk + j is token m's j-th choice.

    Returns:
        `[M * topk]` int32, pairs by expert and then by number; and `[experts + 1]` int32, where each expert's
        begin, and where the last one's end. Entries past that end are not written.
    """
    pairs = topk_ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)
    offset = torch.empty(experts + 1, dtype=torch.int32, device=topk_ids.device)
    chunk = min(4096, max(16, triton.next_power_of_2(pairs)))
    _route_kernel[(experts,)](
        topk_ids.contiguous(), order, offset, pairs, first_expert, experts, CHUNK=chunk, num_warps=4
    )
    return order, offset


def sum_experts(routed: Tensor, topk_ids: Tensor, out: Tensor, experts: int, first_expert: int) -> None:
    """`out` `[M, K]`: each token's sum over its choices on this rank of `routed` `[M * topk, K]`."""
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
    )


@triton.jit
def _route_kernel(ids, order, offset, pairs, first_expert, experts, CHUNK: tl.constexpr):
    """One program per expert counts the pairs of the experts before its own, and then places its own."""
    expert = tl.program_id(0)
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
    """`hidden` `[pairs, inner]`, in the order of experts: the activation of gate and up."""
    expert = tl.program_id(1)
    begin = tl.load(offset + expert)
    end = tl.load(offset + expert + 1)
    half: tl.constexpr = ROWS // 2
    row = tl.program_id(0) * half + tl.arange(0, ROWS) % half
    part = tl.arange(0, ROWS) // half
    weight_row = (expert.to(tl.int64) * 2 * inner + part * inner + tl.minimum(row, inner - 1))[:, None]
    column = tl.arange(0, COLUMNS)
    operand_column = operand_columns(COLUMNS)
    group = tl.arange(0, COLUMNS // 32)
    groups = columns // 32
    for first in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        token = tl.load(order + at, mask=at < end, other=0) // topk
        x_rows = x + token.to(tl.int64)[:, None] * columns
        acc = tl.zeros((ROWS, PAIRS), tl.float32)
        for k in range(0, columns, COLUMNS):
            c = (k + column)[None, :]
            p = (k + operand_column)[None, :]
            g = (k // 32 + group)[None, :]
            if EVEN:
                operand = tl.load(x_rows + p)
                values = tl.load(weight + weight_row * columns + c)
                scales = tl.load(scale + weight_row * groups + g)
            else:
                operand = tl.load(x_rows + p, mask=p < columns, other=0.0)
                values = tl.load(weight + weight_row * columns + c, mask=c < columns, other=0.0)
                scales = tl.load(scale + weight_row * groups + g, mask=g < groups, other=0)
            numbers = dequantized(values, scales, ROWS, COLUMNS, OPERAND)
            acc = tl.dot(numbers, tl.trans(operand.to(OPERAND)), acc)
        acc = tl.reshape(acc * (2.0**LIFT), (2, half, PAIRS))
        gate, up = tl.split(tl.permute(acc, (1, 2, 0)))
        active = swiglu_oai(gate, up, alpha, limit)
        to = tl.program_id(0) * half + tl.arange(0, half)
        inside = (to < inner)[:, None] & (at < end)[None, :]
        place = at.to(tl.int64)[None, :] * inner + to[:, None]
        tl.store(hidden + place, active.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_oai(gate, up, alpha, limit):
    """`(up + 1) * gate * sigmoid(alpha * gate)`, gate clamped above and up on both sides before.

    NaN stays NaN, as in the reference.
    """
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1) * gate / (1 + tl.exp(-alpha * gate))


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
    """`routed` `[pairs, columns]`, by pair number: the expert's output times its weight."""
    expert = tl.program_id(1)
    begin = tl.load(offset + expert)
    end = tl.load(offset + expert + 1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = (expert.to(tl.int64) * columns + tl.minimum(row, columns - 1))[:, None]
    column = tl.arange(0, COLUMNS)
    operand_column = operand_columns(COLUMNS)
    group = tl.arange(0, COLUMNS // 32)
    groups = inner // 32
    for first in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        safe = tl.minimum(at, end - 1)
        pair = tl.load(order + safe)
        hidden_rows = hidden + safe.to(tl.int64)[:, None] * inner
        acc = tl.zeros((ROWS, PAIRS), tl.float32)
        for k in range(0, inner, COLUMNS):
            c = (k + column)[None, :]
            p = (k + operand_column)[None, :]
            g = (k // 32 + group)[None, :]
            if EVEN:
                operand = tl.load(hidden_rows + p)
                values = tl.load(weight + weight_row * inner + c)
                scales = tl.load(scale + weight_row * groups + g)
            else:
                operand = tl.load(hidden_rows + p, mask=p < inner, other=0.0)
                values = tl.load(weight + weight_row * inner + c, mask=c < inner, other=0.0)
                scales = tl.load(scale + weight_row * groups + g, mask=g < groups, other=0)
            numbers = dequantized(values, scales, ROWS, COLUMNS, OPERAND)
            acc = tl.dot(numbers, tl.trans(operand.to(OPERAND)), acc)
        acc = acc * (2.0**LIFT) * tl.load(topk_weights + pair)[None, :]
        inside = (row < columns)[:, None] & (at < end)[None, :]
        place = pair.to(tl.int64)[None, :] * columns + row[:, None]
        tl.store(routed + place, acc.to(routed.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(routed, ids, out, columns, first_expert, experts, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """`out` `[tokens, columns]`: each token's sum over its choices on this rank, in their order."""
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
