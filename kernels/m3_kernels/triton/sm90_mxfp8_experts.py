"""The routed experts of a layer with MXFP8 weights on sm90, dequantising in registers.

Four launches: the pairs of a token and one of its experts are put in the order of experts; gate, up and the
activation; down; and each token's sum. A tile is `[weight rows, pairs of one expert]`, as in
`sm90_mxfp8_linear`. Programs of experts without pairs end at once, so their weights are not read. With few
pairs the columns of a product are split over programs; a fifth launch adds gate and up then.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3_kernels.triton.sm90_mxfp8_common import (
    OPERAND,
    check_weight,
    operand_columns,
    operand_place,
    product,
    swiglu_oai,
)


@dataclass(frozen=True)
class ExpertsTile:
    """How the products are divided; sizes in weight rows, pairs and columns.

    Half of a tile's rows in the first product are gate rows, the others the same columns' up rows.
    `walks`: programs that share one expert's pairs, each taking every walks-th tile.
    `up_splits`, `down_splits`: programs that share the columns of the first and the second product.
    """

    rows: int
    pairs: int
    columns: int
    walks: int
    warps: int
    stages: int
    up_splits: int = 1
    down_splits: int = 1


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
    tile = tile or experts_tile(pairs * experts // (model_experts or experts), experts)
    order, offset, placed = route(topk_ids, experts, first_expert, x)
    hidden = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = hidden
    if tile.up_splits > 1:
        parts = torch.empty(tile.up_splits, pairs, 2 * inner, dtype=torch.float32, device=x.device)
    shape = {
        "PAIRS": tile.pairs,
        "COLUMNS": tile.columns,
        "OPERAND": OPERAND,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _gate_up_kernel[(triton.cdiv(2 * inner, tile.rows) * tile.up_splits, experts, tile.walks)](
        placed,
        w13,
        w13_scale,
        order,
        offset,
        parts,
        pairs,
        columns,
        inner,
        topk,
        alpha,
        limit,
        _split_columns(columns, tile.columns, tile.up_splits),
        ROWS=tile.rows,
        SPLITS=tile.up_splits,
        EVEN=columns % tile.columns == 0,
        **shape,
    )
    if tile.up_splits > 1:
        block = 512
        _active_kernel[(pairs, triton.cdiv(inner, block))](
            parts,
            offset,
            hidden,
            pairs,
            inner,
            experts,
            alpha,
            limit,
            SPLITS=tile.up_splits,
            COLUMNS=block,
            num_warps=4,
        )
    dtype = x.dtype if tile.down_splits == 1 else torch.float32
    routed = torch.empty(tile.down_splits, pairs, columns, dtype=dtype, device=x.device)
    _down_kernel[(triton.cdiv(columns, tile.rows) * tile.down_splits, experts, tile.walks)](
        hidden,
        w2,
        w2_scale,
        order,
        offset,
        topk_weights.contiguous(),
        routed,
        pairs,
        columns,
        inner,
        _split_columns(inner, tile.columns, tile.down_splits),
        ROWS=tile.rows,
        SPLITS=tile.down_splits,
        EVEN=inner % tile.columns == 0,
        **shape,
    )
    block = 1024
    _sum_kernel[(tokens, triton.cdiv(columns, block))](
        routed,
        topk_ids.contiguous(),
        out,
        tokens,
        columns,
        first_expert,
        experts,
        TOPK=topk,
        SPLITS=tile.down_splits,
        COLUMNS=block,
        num_warps=4,
    )
    return out


def _split_columns(columns: int, tile_columns: int, splits: int) -> int:
    """Columns of a split: whole tiles, as equally as they can be divided."""
    return triton.cdiv(triton.cdiv(columns, tile_columns), splits) * tile_columns


def route(topk_ids: Tensor, experts: int, first_expert: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs in the order of this rank's experts, and the tokens' columns in that of the products.

    Args:
        topk_ids: `[M, topk]`; pair number m * topk + j is token m's j-th choice.
        x: `[M, K]`.

    Returns:
        `[M * topk]` int32, pairs by expert and then by number; `[experts + 1]` int32, where each expert's
        begin, and where the last one's end; and `[M, K]`, `x` in the order of `operand_columns`. Entries of
        the first past the end are not written.
    """
    pairs = topk_ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)
    offset = torch.empty(experts + 1, dtype=torch.int32, device=topk_ids.device)
    placed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    chunk = min(4096, max(16, triton.next_power_of_2(pairs)))
    block = 2048
    _route_kernel[(experts + triton.cdiv(x.numel(), block),)](
        topk_ids.contiguous(),
        x.contiguous(),
        order,
        offset,
        placed,
        pairs,
        x.numel(),
        first_expert,
        experts,
        CHUNK=chunk,
        VALUES=block,
        num_warps=4,
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


@triton.jit(do_not_specialize=["pairs"])
def _gate_up_kernel(
    x,
    weight,
    scale,
    order,
    offset,
    out,
    pairs,
    columns,
    inner,
    topk,
    alpha,
    limit,
    split_columns,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """In the order of experts, `out` is `[pairs, inner]`, the activation of gate and up, ready for the next
    product; or with splits `[splits, pairs, 2 * inner]`, gate and up over each split's columns."""
    expert = tl.program_id(1)
    begin = tl.load(offset + expert)
    end = tl.load(offset + expert + 1)
    half: tl.constexpr = ROWS // 2
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    row = tile * half + tl.arange(0, ROWS) % half
    part = tl.arange(0, ROWS) // half
    weight_row = (expert.to(tl.int64) * 2 * inner + part * inner + tl.minimum(row, inner - 1))[:, None]
    first_column = tl.multiple_of(split * split_columns, COLUMNS)
    last_column = tl.minimum(first_column + split_columns, columns)
    for first in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        token = tl.load(order + at, mask=at < end, other=0) // topk
        acc = product(
            weight + weight_row * columns,
            scale + weight_row * (columns // 32),
            x + token.to(tl.int64)[:, None] * columns,
            first_column,
            last_column,
            columns,
            ROWS,
            COLUMNS,
            PAIRS,
            EVEN,
            True,
            OPERAND,
        )
        if SPLITS == 1:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, PAIRS)), (1, 2, 0)))
            active = swiglu_oai(gate, up, alpha, limit)
            to = tile * half + tl.arange(0, half)
            inside = (to < inner)[:, None] & (at < end)[None, :]
            place = at.to(tl.int64)[None, :] * inner + operand_place(to)[:, None]
            tl.store(out + place, active.to(out.dtype.element_ty), mask=inside)
        else:
            inside = (row < inner)[:, None] & (at < end)[None, :]
            place = (split.to(tl.int64) * pairs + at)[None, :] * 2 * inner + (part * inner + row)[:, None]
            tl.store(out + place, acc, mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _active_kernel(
    parts, offset, hidden, pairs, inner, experts, alpha, limit, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`hidden` `[pairs, inner]`, ready for the next product: the activation of the sum of all splits."""
    pair = tl.program_id(0)
    if pair >= tl.load(offset + experts):
        return
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.program_id(1) * COLUMNS + operand_columns(COLUMNS)
    gate = tl.zeros((COLUMNS,), tl.float32)
    up = tl.zeros((COLUMNS,), tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (tl.cast(split, tl.int64) * pairs + pair) * 2 * inner + column
        gate += tl.load(at, mask=column < inner, other=0.0)
        up += tl.load(at + inner, mask=column < inner, other=0.0)
    active = swiglu_oai(gate, up, alpha, limit)
    tl.store(
        hidden + pair.to(tl.int64) * inner + place, active.to(hidden.dtype.element_ty), mask=place < inner
    )


@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    hidden,
    weight,
    scale,
    order,
    offset,
    topk_weights,
    routed,
    pairs,
    columns,
    inner,
    split_columns,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """`routed` `[splits, pairs, columns]`, by pair number: the expert's output times its weight, over each
    split's columns."""
    expert = tl.program_id(1)
    begin = tl.load(offset + expert)
    end = tl.load(offset + expert + 1)
    split = tl.program_id(0) % SPLITS
    row = tl.program_id(0) // SPLITS * ROWS + tl.arange(0, ROWS)
    weight_row = (expert.to(tl.int64) * columns + tl.minimum(row, columns - 1))[:, None]
    first_column = tl.multiple_of(split * split_columns, COLUMNS)
    last_column = tl.minimum(first_column + split_columns, inner)
    for first in range(begin + tl.program_id(2) * PAIRS, end, tl.num_programs(2) * PAIRS):
        at = first + tl.arange(0, PAIRS)
        safe = tl.minimum(at, end - 1)
        pair = tl.load(order + safe)
        acc = product(
            weight + weight_row * inner,
            scale + weight_row * (inner // 32),
            hidden + safe.to(tl.int64)[:, None] * inner,
            first_column,
            last_column,
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
        place = (split.to(tl.int64) * pairs + pair)[None, :] * columns + row[:, None]
        tl.store(routed + place, acc.to(routed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _sum_kernel(
    routed,
    ids,
    out,
    tokens,
    columns,
    first_expert,
    experts,
    TOPK: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out` `[tokens, columns]`: each token's sum over its choices on this rank, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOPK):
        pair = token * TOPK + choice
        local = tl.load(ids + pair).to(tl.int32) - first_expert
        here = (local >= 0) & (local < experts)
        for split in tl.static_range(SPLITS):
            row = (split * tokens.to(tl.int64) * TOPK + pair) * columns
            total += tl.load(routed + row + column, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)
