"""The routed experts of many tokens on sm90, through a grouped FP8 product over contiguous segments.

Each expert's pairs fill rows of their own, padded to a multiple of 128 rows, because the product works on
tiles of rows of one expert. Activations become E4M3 with one scale per row and 128 columns. The product
takes time for rows that nothing fills, so there can be as many rows as the routing needs, which the host asks
the device for. For a CUDA graph it cannot ask: there is room for every pair and every expert's padding then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3_kernels.triton.sm90_mxfp8_experts import swiglu_oai

SEGMENT = 128
"""An expert's rows are a multiple of this."""

GROUP = 128
"""Columns that share one scale of an activation."""

Quantized = tuple[Tensor, Tensor]
"""`[R, K]` float8_e4m3fn and `[R, K // 128]` float32, the latter column by column (strides 1 and R)."""

GroupedProduct = Callable[[Quantized, Quantized, Tensor, Tensor], object]
"""`product(activations, weights, out, experts)`: row r of `out` `[R, N]` bfloat16 is row r of the activations
times weight `experts[r]` transposed; rows with -1 are left alone. Weights are `[E, N, K]` with
`[E, N // 128, K // 128]` float32 scales. (DeepGEMM: `m_grouped_fp8_gemm_nt_contiguous`.)"""


@dataclass(frozen=True)
class Segments:
    """Where the pairs of a token and one of its experts are.

    Attributes:
        pair: `[R]` int32, the pair in each row (m * topk + j for token m's j-th choice); -1 in padding.
        expert: `[R]` int32, the expert of each row, of its padding too; -1 past the last segment.
        row: `[M * topk]` int32, each pair's row; not written for the pairs of other ranks.
    """

    pair: Tensor
    expert: Tensor
    row: Tensor


def grouped_experts(
    x: Tensor,
    w13: Quantized,
    w2: Quantized,
    topk_ids: Tensor,
    topk_weights: Tensor,
    product: GroupedProduct,
    *,
    alpha: float,
    limit: float,
    first_expert: int,
    room_for_all: bool,
) -> Tensor:
    """Like `mxfp8_experts` of coarsened weights, but with activations rounded to E4M3.

    Args:
        x: `[M, K]` bfloat16, K and I multiples of 128.
        w13: `[E, 2 * I, K]` float8_e4m3fn and `[E, 2 * I // 128, K // 128]` float32.
        w2: `[E, K, I]` and `[E, K // 128, I // 128]`.
        topk_ids, topk_weights, alpha, limit, first_expert: as for `mxfp8_experts`.
        room_for_all: whether buffers have room for any routing; otherwise the host waits for the device.

    Returns:
        `[M, K]` bfloat16. With `room_for_all` capturable, if `product` is.
    """
    tokens, columns = x.shape
    experts, inner = w13[0].shape[0], w2[0].shape[2]
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    segments = place(topk_ids, experts, first_expert, room_for_all=room_for_all)
    rows = segments.pair.numel()
    if rows == 0:
        return out.zero_()
    topk = topk_ids.shape[1]
    gate_up = torch.empty(rows, 2 * inner, dtype=x.dtype, device=x.device)
    product(quantize_rows(x, segments.pair, topk), w13, gate_up, segments.expert)
    hidden = quantize_active(gate_up, segments.pair, alpha, limit)
    routed = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    product(hidden, w2, routed, segments.expert)
    _collect_kernel[(tokens, triton.cdiv(columns, 2048))](
        routed,
        segments.row,
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        out,
        columns,
        first_expert,
        experts,
        TOPK=topk,
        COLUMNS=2048,
        num_warps=4,
    )
    return out


def place(topk_ids: Tensor, experts: int, first_expert: int, *, room_for_all: bool) -> Segments:
    """Segments for `[M, topk]` choices: by expert, and by pair number within one.

    Args:
        room_for_all: whether R is the largest that any routing needs, without asking the device.
    """
    pairs = topk_ids.numel()
    device = topk_ids.device
    ids = topk_ids.contiguous()
    chunk = min(4096, max(SEGMENT, triton.next_power_of_2(pairs)))
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    _count_kernel[(experts,)](ids, counts, pairs, first_expert, CHUNK=chunk, num_warps=4)
    if room_for_all:
        rows = triton.cdiv(pairs + experts * (SEGMENT - 1), SEGMENT) * SEGMENT
    else:
        rows = sum(triton.cdiv(count, SEGMENT) for count in counts.tolist()) * SEGMENT
    segments = Segments(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(pairs, dtype=torch.int32, device=device),
    )
    _place_kernel[(experts,)](
        ids,
        counts,
        segments.pair,
        segments.expert,
        segments.row,
        pairs,
        rows,
        first_expert,
        experts,
        CHUNK=chunk,
        EXPERTS=triton.next_power_of_2(experts),
        SEGMENT=SEGMENT,
        num_warps=4,
    )
    return segments


def quantize_rows(x: Tensor, pair: Tensor | None, topk: int) -> Quantized:
    """E4M3 activations: row r holds token `pair[r] // topk` of `x` `[M, K]`, or token r without `pair`.

    Padding is not written. K is a multiple of 128. A scale is the largest magnitude over 448, the magnitude
    being at least 1e-10.
    """
    columns = x.shape[1]
    rows = x.shape[0] if pair is None else pair.numel()
    values, scale = _quantized(rows, columns, x.device)
    _quantize_kernel[(rows,)](
        x,
        x if pair is None else pair,
        values,
        scale,
        columns,
        scale.stride(1),
        topk,
        PLACED=pair is not None,
        GROUPS=8,
        GROUP=GROUP,
        num_warps=4,
    )
    return values, scale


def quantize_active(gate_up: Tensor, pair: Tensor, alpha: float, limit: float) -> Quantized:
    """E4M3 activations of SwiGLU-OAI of `[R, 2 * I]`, the gate half first; padding is not written."""
    rows, columns = gate_up.shape
    values, scale = _quantized(rows, columns // 2, gate_up.device)
    _active_kernel[(rows,)](
        gate_up,
        pair,
        values,
        scale,
        columns // 2,
        scale.stride(1),
        alpha,
        limit,
        GROUPS=8,
        GROUP=GROUP,
        num_warps=4,
    )
    return values, scale


def _quantized(rows: int, columns: int, device: torch.device) -> Quantized:
    """Room for the values and, column by column, their scales; columns start at multiples of 16 bytes."""
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    stride = triton.cdiv(rows, 4) * 4
    scale = torch.empty(columns // GROUP, stride, dtype=torch.float32, device=device)
    return values, scale.T[:rows]


@triton.jit
def _count_kernel(ids, counts, pairs, first_expert, CHUNK: tl.constexpr):
    """`counts` `[experts]`: each expert's pairs."""
    expert = tl.program_id(0)
    count = 0
    for begin in range(0, pairs, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        local = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32) - first_expert
        count += tl.sum(((at < pairs) & (local == expert)).to(tl.int32))
    tl.store(counts + expert, count)


@triton.jit
def _place_kernel(
    ids,
    counts,
    pair_out,
    expert_out,
    row_out,
    pairs,
    rows,
    first_expert,
    experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Each program writes its expert's segment; the last one also marks the rows after all segments."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    sizes = tl.load(counts + other, mask=other < experts, other=0)
    sizes = (sizes + SEGMENT - 1) // SEGMENT * SEGMENT
    begin = tl.sum(tl.where(other < expert, sizes, 0))
    end = begin + tl.sum(tl.where(other == expert, sizes, 0))
    lane = tl.arange(0, CHUNK)
    row = begin
    for first in range(0, pairs, CHUNK):
        at = first + lane
        local = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32) - first_expert
        mine = (at < pairs) & (local == expert)
        to = row + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pair_out + to, at, mask=mine)
        tl.store(row_out + at, to, mask=mine)
        row += tl.sum(mine.to(tl.int32))
    for first in range(begin, end, CHUNK):
        at = first + lane
        tl.store(expert_out + at, tl.full((CHUNK,), 0, tl.int32) + expert, mask=at < end)
        tl.store(pair_out + at, tl.full((CHUNK,), -1, tl.int32), mask=(at >= row) & (at < end))
    if expert == experts - 1:
        for first in range(end, rows, CHUNK):
            at = first + lane
            tl.store(expert_out + at, tl.full((CHUNK,), -1, tl.int32), mask=at < rows)
            tl.store(pair_out + at, tl.full((CHUNK,), -1, tl.int32), mask=at < rows)


@triton.jit
def _store_quantized(numbers, values, scale, row, group, groups, columns, scale_stride, GROUP: tl.constexpr):
    """Round `numbers` `[GROUPS, GROUP]` of a row and store them with their scales; E4M3 goes up to 448."""
    largest = tl.maximum(tl.max(tl.abs(numbers), 1), 1e-10)
    inside = group < groups
    tl.store(scale + group.to(tl.int64) * scale_stride + row, largest / 448.0, mask=inside)
    rounded = (numbers * (448.0 / largest)[:, None]).to(tl.float8e4nv)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(values + row.to(tl.int64) * columns + column, rounded, mask=inside[:, None])


@triton.jit
def _quantize_kernel(
    x,
    pair,
    values,
    scale,
    columns,
    scale_stride,
    topk,
    PLACED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0)
    token = row
    if PLACED:
        token = tl.load(pair + row)
        if token < 0:
            return
        token = token // topk
    groups = columns // GROUP
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        numbers = tl.load(x + token.to(tl.int64) * columns + column, mask=column < columns, other=0.0)
        _store_quantized(
            numbers.to(tl.float32), values, scale, row, group, groups, columns, scale_stride, GROUP
        )


@triton.jit
def _active_kernel(
    gate_up,
    pair,
    values,
    scale,
    columns,
    scale_stride,
    alpha,
    limit,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(pair + row) < 0:
        return
    groups = columns // GROUP
    gate_row = gate_up + row.to(tl.int64) * 2 * columns
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        gate = tl.load(gate_row + column, mask=column < columns, other=0.0).to(tl.float32)
        up = tl.load(gate_row + columns + column, mask=column < columns, other=0.0).to(tl.float32)
        numbers = swiglu_oai(gate, up, alpha, limit)
        _store_quantized(numbers, values, scale, row, group, groups, columns, scale_stride, GROUP)


@triton.jit
def _collect_kernel(
    routed,
    row_of,
    ids,
    weights,
    out,
    columns,
    first_expert,
    experts,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out` `[tokens, columns]`: each token's weighted sum over its choices on this rank."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOPK):
        pair = token * TOPK + choice
        local = tl.load(ids + pair).to(tl.int32) - first_expert
        if (local >= 0) & (local < experts):
            row = tl.load(row_of + pair).to(tl.int64)
            values = tl.load(routed + row * columns + column, mask=inside, other=0.0)
            total += values.to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)
