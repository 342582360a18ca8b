"""Attention of a decode step: a row and kv head at a time, its chosen blocks split over programs.

A program walks its share of the blocks, a step of `TOKENS` tokens at a time, loaded by the copy engine. Every
warp takes tokens of its own and keeps its own running softmax, so that no warp waits for another until the
walk is done: a row's few heads make the products small beside an exchange between warps.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.rows import BLOCK_TOKENS
from m3_kernels.triton.sm90_common import INTERPRETING

ROW = tl.constexpr(0)
BLOCK = tl.constexpr(BLOCK_TOKENS)
OVERLAP = tl.constexpr(not INTERPRETING)
"""A launch may begin before its predecessor ends and then waits for it (not in the interpreter)."""
LOWEST = tl.constexpr(-1.0e30)
"""Start of a running maximum of base-2 logits: below them all, and finite so that differences are numbers."""


@triton.jit
def _halves_added(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEFT: tl.constexpr):
    a, b = tl.split(tl.reshape(x, (ROWS, COLUMNS, LEFT, 2)))
    return a + b


@triton.jit
def _sum_over_warps(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Sum of `[ROWS, COLUMNS, WARPS]` over its last axis, which lies across warps, in a fixed order.

    By halves: a split moves everything through shared memory once, where `tl.sum` takes a barrier for every
    few values."""
    if WARPS == 8:
        x = _halves_added(x, ROWS, COLUMNS, 4)
    if WARPS >= 4:
        x = _halves_added(x, ROWS, COLUMNS, 2)
    a, b = tl.split(x)
    return a + b


@triton.jit(do_not_specialize=["rows"])
def attend_rows(
    q,
    q_row_stride,
    k,
    v,
    chosen,
    chosen_head_stride,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    out,
    out_row_stride,
    partial,
    partial_lse,
    rows,
    scale_log2,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    WARPS: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (kv head, row, split); running softmax in base 2. `k` and `v` are descriptors of
    `[tokens / SPAN, SPAN, width]` with boxes `[WARPS, SPAN, HEAD_DIM]`, `SPAN` = `TOKENS` / `WARPS`."""
    if OVERLAP:
        gdc_wait()
    program = tl.program_id(0)
    split = program % SPLITS
    row = (program // SPLITS % rows).to(tl.int64)
    head = program // (SPLITS * rows)
    STEPS: tl.constexpr = BLOCK // TOKENS
    SPAN: tl.constexpr = TOKENS // WARPS

    # Loads that do not wait for each other; what a padded row holds is dropped afterwards.
    request = tl.load(row_request + row)
    position = tl.load(row_position + row)
    slot = tl.arange(0, TOPK_PAD)
    chosen_at = chosen + head.to(tl.int64) * chosen_head_stride + row * chosen_row_stride
    block = tl.load(chosen_at + slot, mask=slot < TOPK, other=-1)
    used = (request >= 0) & (block >= 0) & (block <= position // BLOCK)
    page = tl.load(page_table + request.to(tl.int64) * table_stride + block, mask=used, other=0)
    is_whole = (used & (block * BLOCK + BLOCK - 1 <= position)).to(tl.int32)
    is_part = used.to(tl.int32) - is_whole
    whole_count = tl.sum(is_whole)
    total = whole_count + tl.sum(is_part)
    # Place in the walk: blocks that the row sees whole come first.
    place = tl.where(is_whole != 0, tl.cumsum(is_whole) - 1, whole_count + tl.cumsum(is_part) - 1)
    place = tl.where(used, place, -1)

    m = tl.arange(0, TILE_M)
    dim = tl.arange(0, HEAD_DIM)
    q_head = head * GROUP + m
    q_at = q + row * q_row_stride + (q_head * HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(q_at, mask=(m < GROUP)[:, None], other=0.0).to(DOT)
    queries = tl.broadcast_to(queries[None, :, :], [WARPS, TILE_M, HEAD_DIM])

    begin = total * STEPS * split // SPLITS
    end = total * STEPS * (split + 1) // SPLITS
    peak = tl.full([WARPS, TILE_M], LOWEST, tl.float32)
    weight = tl.zeros([WARPS, TILE_M], tl.float32)
    attended = tl.zeros([WARPS, TILE_M, HEAD_DIM], tl.float32)
    # Blocks that the row sees whole: no mask.
    for step in tl.range(begin, tl.minimum(end, whole_count * STEPS), num_stages=STAGES):
        entry = step // STEPS
        found = tl.sum(tl.where(place == entry, page, 0))
        span_at = found * (BLOCK // SPAN) + (step - entry * STEPS) * WARPS
        keys = k.load([span_at, 0, head * HEAD_DIM]).to(DOT)
        logits = tl.dot(queries, tl.permute(keys, (0, 2, 1)))
        best = tl.maximum(peak, tl.max(logits, 2) * scale_log2)
        weights = tl.exp2(logits * scale_log2 - best[:, :, None])
        fade = tl.exp2(peak - best)
        weight = weight * fade + tl.sum(weights, 2)
        values = v.load([span_at, 0, head * HEAD_DIM]).to(DOT)
        attended = tl.dot(weights.to(DOT), values, attended * fade[:, :, None])
        peak = best

    # The others: a mask per token, and values that the row does not see are set to zero (they may be NaN).
    token = tl.arange(0, WARPS)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    for step in tl.range(tl.maximum(begin, whole_count * STEPS), end, num_stages=1):
        entry = step // STEPS
        found = tl.sum(tl.where(place == entry, page, 0))
        found_block = tl.sum(tl.where(place == entry, block, 0))
        seen = found_block * BLOCK + (step - entry * STEPS) * TOKENS + token <= position
        span_at = found * (BLOCK // SPAN) + (step - entry * STEPS) * WARPS
        keys = k.load([span_at, 0, head * HEAD_DIM]).to(DOT)
        logits = tl.dot(queries, tl.permute(keys, (0, 2, 1))) * scale_log2
        logits = tl.where(seen[:, None, :], logits, float("-inf"))
        best = tl.maximum(peak, tl.max(logits, 2))
        weights = tl.exp2(logits - best[:, :, None])
        fade = tl.exp2(peak - best)
        weight = weight * fade + tl.sum(weights, 2)
        values = v.load([span_at, 0, head * HEAD_DIM]).to(DOT)
        values = tl.where(seen[:, :, None], values, 0.0)
        attended = tl.dot(weights.to(DOT), values, attended * fade[:, :, None])
        peak = best

    # The merge or the next operator may be set up now: it waits for this launch to end.
    if OVERLAP:
        gdc_launch_dependents()
    row_peak = tl.max(peak, 0)
    share = tl.exp2(peak - row_peak[None, :])
    row_weight = tl.sum(weight * share, 0)
    share = share * (1.0 / tl.where(row_weight > 0, row_weight, 1.0))[None, :]
    by_warp = tl.permute(attended * share[:, :, None], (1, 2, 0))
    result = _sum_over_warps(by_warp, TILE_M, HEAD_DIM, WARPS)
    # A padded row has no blocks, but its queries may be NaN.
    result = tl.where(request >= 0, result, 0.0)
    if SPLITS == 1:
        out_at = out + row * out_row_stride + (q_head * HEAD_DIM)[:, None] + dim[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=(m < GROUP)[:, None])
    else:
        lse = row_peak + tl.log2(tl.where(row_weight > 0, row_weight, 1.0))
        lse = tl.where(row_weight > 0, lse, float("-inf"))
        slot_at = ((row * KV_HEADS + head) * SPLITS + split) * GROUP + m
        tl.store(partial_lse + slot_at, lse, mask=m < GROUP)
        tl.store(partial + slot_at[:, None] * HEAD_DIM + dim[None, :], result, mask=(m < GROUP)[:, None])
