"""The routed experts of many tokens on sm90, through a grouped FP8 product.

Every pair of a token and one of its experts gets a row among its expert's. In the masked layout each expert
has room for all tokens and the product stops at the expert's count, which stays on the device: nothing is
computed for rows that no pair fills, and any routing fits a captured graph. In the contiguous layout the
experts' rows follow each other, padded to multiples of 128; it takes less room, but the product loads rows
that nothing fills. Activations become E4M3 with one scale per row and 128 columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.triton.sm90_common import early_launch
from m3_kernels.triton.sm90_mxfp8_common import EARLY, swiglu_oai

SEGMENT = 128
"""An expert's rows are a multiple of this: the largest tile of rows that the product works on."""

GROUP = 128
"""Columns that share one scale of an activation."""

Quantized = tuple[Tensor, Tensor]
"""`[..., R, K]` float8_e4m3fn and `[..., R, K // 128]` float32, the latter of activations column by column
(stride 1 between rows)."""


@dataclass(frozen=True)
class GroupedProducts:
    """Products of rows and their experts' weights `[E, N, K]` with scales `[E, N // 128, K // 128]`, float32.

    Attributes:
        masked: `masked(activations, weights, out, counts, expected)`: for every expert, the first `counts`
            `[E]` int32 rows of activations `[E, C, K]` times its weight transposed, into `out` `[E, C, N]`
            bfloat16. Rows behind them may be written as well. `expected`: mean count, for tuning alone.
            (DeepGEMM: `fp8_m_grouped_gemm_nt_masked`.)
        contiguous: `contiguous(activations, weights, out, experts)`: row r of `out` `[R, N]` bfloat16 is row
            r of activations `[R, K]` times weight `experts[r]` transposed; `experts` `[R]` int32 is one
            number in each 128 rows, -1 where rows are left alone.
            (DeepGEMM: `m_grouped_fp8_gemm_nt_contiguous`.)
    """

    masked: Callable[[Quantized, Quantized, Tensor, Tensor, int], object]
    contiguous: Callable[[Quantized, Quantized, Tensor, Tensor], object]


def grouped_experts(
    x: Tensor,
    w13: Quantized,
    w2: Quantized,
    topk_ids: Tensor,
    topk_weights: Tensor,
    products: GroupedProducts,
    *,
    alpha: float,
    limit: float,
    first_expert: int,
    model_experts: int | None = None,
) -> Tensor:
    """Like `mxfp8_experts` of coarsened weights, but with activations rounded to E4M3.

    Args:
        x: `[M, K]` bfloat16, K and I multiples of 128.
        w13: `[E, 2 * I, K]` float8_e4m3fn and `[E, 2 * I // 128, K // 128]` float32.
        w2: `[E, K, I]` and `[E, K // 128, I // 128]`.
        topk_ids, topk_weights, alpha, limit, first_expert, model_experts: as for `mxfp8_experts`.

    Returns:
        `[M, K]` bfloat16. No host synchronisation; capturable, if the products are.
    """
    tokens, experts = x.shape[0], w13[0].shape[0]
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    masked = masked_tokens(tokens, experts, model_experts or experts, masked_rows(x.device))
    step = masked or tokens
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        ids = topk_ids[part].contiguous()
        places = (place_masked if masked else place_contiguous)(ids, experts, first_expert)

        def product(rows: Quantized, weights: Quantized, target: Tensor, places: Places = places) -> None:
            if places.experts is None:
                expected = triton.cdiv(places.row.numel(), model_experts or experts)
                products.masked(rows, weights, target, places.counts, expected)
            else:
                products.contiguous(rows, weights, target, places.experts)

        gate_up = x.new_empty(*places.shape, w13[0].shape[1])
        product(quantize_rows(x[part].contiguous(), places), w13, gate_up)
        hidden = quantize_active(gate_up, places, alpha, limit)
        del gate_up  # its memory is the next product's
        routed = x.new_empty(*places.shape, x.shape[1])
        product(hidden, w2, routed)
        _collect(routed, places.row, topk_weights[part].contiguous(), out[part])
    return out


@functools.cache
def masked_rows(device: torch.device) -> int:
    """Rows of the masked layout over all experts, at most. With M3's widths 131,072 of them, enough for 8,192
    tokens on a rank of eight, take up to 2.4 GB; GPUs of less than 100 GB have half of them."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory > 100e9
    return 1 << 17 if large else 1 << 16


def masked_tokens(tokens: int, experts: int, model_experts: int, rows: int) -> int:
    """Tokens that go through the masked layout together; 0 for the contiguous one.

    On a rank with a quarter of the experts or less most rows of the contiguous layout would stay empty, as
    there must be enough for any routing; tokens rather go through the masked layout part by part then.

    Args:
        rows: of the masked layout over all experts, at most.
    """
    most = rows // experts // SEGMENT * SEGMENT
    if tokens <= most or (most and 4 * experts <= model_experts):
        return min(tokens, most)
    return 0


@dataclass(frozen=True)
class Places:
    """Where the pairs of a token and one of its experts are.

    Attributes:
        shape: of the rows: (E, C) in the masked layout, (R,) in the contiguous one.
        row: `[M * topk]` int32, each pair's row among all (m * topk + j for token m's j-th choice), in the
            order of pairs within an expert; -1 for the pairs of other ranks.
        counts: `[E]` int32, each expert's pairs.
        experts: `[R]` int32, the expert of each row of the contiguous layout, of its padding too; -1 past the
            last expert's. None in the masked layout.
    """

    shape: tuple[int, ...]
    row: Tensor
    counts: Tensor
    experts: Tensor | None


def place_masked(topk_ids: Tensor, experts: int, first_expert: int) -> Places:
    """Places for `[M, topk]` choices in which each expert has room for all tokens, in multiples of 128."""
    capacity = triton.cdiv(topk_ids.shape[0], SEGMENT) * SEGMENT
    row, counts = _rank(topk_ids, experts, first_expert, capacity)
    return Places((experts, capacity), row, counts, None)


def place_contiguous(topk_ids: Tensor, experts: int, first_expert: int) -> Places:
    """Places for `[M, topk]` choices by expert, with as many rows as the worst routing needs."""
    pairs = topk_ids.numel()
    rows = triton.cdiv(pairs + experts * (SEGMENT - 1), SEGMENT) * SEGMENT
    row, counts = _rank(topk_ids, experts, first_expert, 0)
    owner = torch.empty(rows, dtype=torch.int32, device=topk_ids.device)
    _follow_kernel[(experts,)](
        topk_ids,
        counts,
        row,
        owner,
        pairs,
        rows,
        first_expert,
        experts,
        CHUNK=_chunk(pairs),
        EXPERTS=triton.next_power_of_2(experts),
        SEGMENT=SEGMENT,
        num_warps=_scan_warps(pairs),
        **early_launch(True),
    )
    return Places((rows,), row, counts, owner)


def _chunk(pairs: int) -> int:
    """Pairs that a program looks at together."""
    return min(4096, max(SEGMENT, triton.next_power_of_2(pairs)))


def _scan_warps(pairs: int) -> int:
    """Warps of a program that looks at all pairs."""
    return 16 if pairs > 2048 else 4


def _rank(topk_ids: Tensor, experts: int, first_expert: int, capacity: int) -> tuple[Tensor, Tensor]:
    """`[M * topk]` int32, expert * capacity + the pair's number among its expert's; and `[E]`, the counts."""
    pairs = topk_ids.numel()
    row = torch.empty(pairs, dtype=torch.int32, device=topk_ids.device)
    counts = torch.empty(experts, dtype=torch.int32, device=topk_ids.device)
    _rank_kernel[(experts + 1,)](
        topk_ids,
        row,
        counts,
        pairs,
        first_expert,
        experts,
        capacity,
        CHUNK=_chunk(pairs),
        num_warps=_scan_warps(pairs),
        **early_launch(True),
    )
    return row, counts


def quantize_rows(x: Tensor, places: Places | None) -> Quantized:
    """E4M3 activations of `x` `[M, K]`: each pair's row holds its token, or row m token m without `places`.

    Rows without a pair are not written. K is a multiple of 128. A scale is the largest magnitude over 448,
    the magnitude being at least 1e-10.
    """
    tokens, columns = x.shape
    assert tokens > 0
    values, scale, capacity = _quantized((tokens,) if places is None else places.shape, columns, x.device)
    _quantize_kernel[(tokens,)](
        x,
        x if places is None else places.row,
        values,
        scale,
        columns,
        capacity,
        TOPK=0 if places is None else places.row.numel() // tokens,
        GROUP=GROUP,
        **_groups(columns),
        **early_launch(True),
    )
    return values, scale


def quantize_active(gate_up: Tensor, places: Places, alpha: float, limit: float) -> Quantized:
    """E4M3 activations of SwiGLU-OAI of `[..., 2 * I]`, the gate half first, in the rows that pairs have."""
    columns = gate_up.shape[-1] // 2
    values, scale, capacity = _quantized(places.shape, columns, gate_up.device)
    _active_kernel[(places.row.numel(),)](
        gate_up,
        places.row,
        values,
        scale,
        columns,
        capacity,
        alpha,
        limit,
        GROUP=GROUP,
        **_groups(columns),
        **early_launch(True),
    )
    return values, scale


def _quantized(shape: tuple[int, ...], columns: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Room for the values and, column by column, their scales; columns start at multiples of 16 bytes.

    Returns:
        `[*shape, columns]`, `[*shape, columns // 128]`, and the rows between two columns of scales.
    """
    values = torch.empty(*shape, columns, dtype=torch.float8_e4m3fn, device=device)
    capacity = triton.cdiv(shape[-1], 4) * 4
    assert len(shape) == 1 or shape[1] == capacity, "a row's number says its expert"
    scale = torch.empty(*shape[:-1], columns // GROUP, capacity, dtype=torch.float32, device=device)
    return values, scale.transpose(-1, -2)[..., : shape[-1], :], capacity


def _groups(columns: int) -> dict[str, int]:
    """Groups that a program rounds together: a whole row of M3, so that no load waits for another."""
    together = min(64, triton.next_power_of_2(triton.cdiv(columns, GROUP)))
    return {"GROUPS": together, "num_warps": 8 if together > 16 else 4}


def _collect(routed: Tensor, row: Tensor, weights: Tensor, out: Tensor) -> None:
    """`out` `[M, K]`: each token's sum over its choices here of weight times row."""
    tokens, columns = out.shape
    _collect_kernel[(tokens, triton.cdiv(columns, 2048))](
        routed,
        row,
        weights,
        out,
        columns,
        TOPK=weights.shape[1],
        COLUMNS=2048,
        num_warps=4,
        **early_launch(True),
    )


@triton.jit(do_not_specialize=["pairs"])
def _rank_kernel(ids, row, counts, pairs, first_expert, experts, capacity, CHUNK: tl.constexpr):
    """A program numbers the pairs of its expert; the last one marks those of other ranks."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    count = 0
    for begin in range(0, pairs, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        local = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32) - first_expert
        local = tl.where((local >= 0) & (local < experts), local, experts)
        mine = (at < pairs) & (local == expert)
        number = expert * capacity + count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(row + at, tl.where(local == experts, -1, number), mask=mine)
        count += tl.sum(mine.to(tl.int32))
    if expert < experts:
        tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["pairs"])
def _follow_kernel(
    ids,
    counts,
    row,
    owner,
    pairs,
    rows,
    first_expert,
    experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """A program moves its expert's pairs behind those of the experts before; the last one marks the end."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    sizes = tl.load(counts + other, mask=other < experts, other=0)
    sizes = (sizes + SEGMENT - 1) // SEGMENT * SEGMENT
    begin = tl.sum(tl.where(other < expert, sizes, 0))
    end = begin + tl.sum(tl.where(other == expert, sizes, 0))
    lane = tl.arange(0, CHUNK)
    for first in range(0, pairs, CHUNK):
        at = first + lane
        local = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32) - first_expert
        mine = (at < pairs) & (local == expert)
        tl.store(row + at, begin + tl.load(row + at, mask=mine, other=0), mask=mine)
    for first in range(begin, end, CHUNK):
        at = first + lane
        tl.store(owner + at, tl.full((CHUNK,), 0, tl.int32) + expert, mask=at < end)
    if expert == experts - 1:
        for first in range(end, rows, CHUNK):
            at = first + lane
            tl.store(owner + at, tl.full((CHUNK,), -1, tl.int32), mask=at < rows)


@triton.jit
def _quantized_groups(numbers):
    """`numbers` `[GROUPS, GROUP]` rounded to E4M3, which goes up to 448, and `[GROUPS]`, their scales."""
    largest = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-10)
    return (numbers * (448.0 / largest)[:, None]).to(tl.float8e4nv), largest / 448.0


@triton.jit
def _store_quantized(
    rounded, unit, values, scale, row, group, groups, columns, capacity, GROUP: tl.constexpr
):
    """Store what `_quantized_groups` gave as a row's groups."""
    inside = group < groups
    place = ((row // capacity).to(tl.int64) * groups + group) * capacity + row % capacity
    tl.store(scale + place, unit, mask=inside)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(values + row.to(tl.int64) * columns + column, rounded, mask=inside[:, None])


@triton.jit
def _quantize_kernel(
    x,
    row_of,
    values,
    scale,
    columns,
    capacity,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Round a token once and store it in the rows of its choices here; without TOPK in its own row."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    if TOPK > 0:
        most = -1
        for choice in tl.static_range(TOPK):
            most = tl.maximum(most, tl.load(row_of + token * TOPK + choice))
        if most < 0:
            return
    groups = columns // GROUP
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        numbers = tl.load(x + token.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
        rounded, unit = _quantized_groups(numbers.to(tl.float32))
        if TOPK == 0:
            _store_quantized(rounded, unit, values, scale, token, group, groups, columns, capacity, GROUP)
        for choice in tl.static_range(TOPK):
            row = tl.load(row_of + token * TOPK + choice)
            if row >= 0:
                _store_quantized(rounded, unit, values, scale, row, group, groups, columns, capacity, GROUP)


@triton.jit
def _active_kernel(
    gate_up,
    row_of,
    values,
    scale,
    columns,
    capacity,
    alpha,
    limit,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(row_of + tl.program_id(0))
    if row < 0:
        return
    groups = columns // GROUP
    gate_row = gate_up + row.to(tl.int64) * 2 * columns
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        gate = tl.load(gate_row + column, mask=column < columns, other=0.0).to(tl.float32)
        up = tl.load(gate_row + columns + column, mask=column < columns, other=0.0).to(tl.float32)
        rounded, unit = _quantized_groups(swiglu_oai(gate, up, alpha, limit))
        _store_quantized(rounded, unit, values, scale, row, group, groups, columns, capacity, GROUP)


@triton.jit
def _collect_kernel(routed, row_of, weights, out, columns, TOPK: tl.constexpr, COLUMNS: tl.constexpr):
    """`out` `[tokens, columns]`: each token's weighted sum over its choices on this rank."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOPK):
        pair = token * TOPK + choice
        row = tl.load(row_of + pair).to(tl.int64)
        values = tl.load(routed + row * columns + column, mask=inside & (row >= 0), other=0.0)
        total += values.to(tl.float32) * tl.load(weights + pair, mask=row >= 0, other=0.0)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)
