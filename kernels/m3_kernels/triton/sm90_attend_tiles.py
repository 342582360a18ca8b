"""Attention of tiles of rows over the union of their blocks: the kernel, and the plan that finds the unions.

A tile is a run of consecutive rows with one kv head's group of query heads: rows x grouped heads fill the
matrix unit's M side. It walks the blocks that any of its rows attends to, each K/V page loaded once by the
copy engine; a row that did not choose a block subtracts infinity in the exponent, which costs nothing per
element. No partial output is written unless the walk is split over programs.

Where the walk comes from (`WALK`):
- `UNION`: the union that `plan_unions` wrote, blocks that every chooser sees whole first.
- `DENSE`: every visible block. Blocks up to `shared_blocks` hold one page for all rows of the tile (found by
  `plan_dense`) and are walked once; after them comes each row's own tail.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.rows import BLOCK_TOKENS
from m3_kernels.triton.sm90_common import INTERPRETING

UNION = tl.constexpr(1)
DENSE = tl.constexpr(2)
BLOCK = tl.constexpr(BLOCK_TOKENS)
OVERLAP = tl.constexpr(not INTERPRETING)
"""A launch may begin before its predecessor ends and then waits for it (not in the interpreter)."""
MAX_INT = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-1.0e30)
"""Start of a running maximum of base-2 logits: below them all, and finite so that differences are numbers."""


@triton.jit
def _entry_blocks(
    chosen_at,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    row_end,
    row,
    slot,
    TOPK: tl.constexpr,
    UNUSED: tl.constexpr,
):
    """Page and block of each (row, slot), and whether its row sees it in part; page `UNUSED` without one."""
    real = row < row_end
    request = tl.load(row_request + row, mask=real, other=-1)
    real = real & (request >= 0)
    position = tl.load(row_position + row, mask=real, other=-1)
    block = tl.load(
        chosen_at + row.to(tl.int64) * chosen_row_stride + slot, mask=real & (slot < TOPK), other=-1
    )
    used = (block >= 0) & (block <= position // BLOCK)
    page = tl.load(page_table + request.to(tl.int64) * table_stride + block, mask=used, other=UNUSED)
    return page, block, block * BLOCK + BLOCK - 1 > position


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=["counter_total", "slots", "row_end"])
def plan_unions(
    chosen,
    chosen_head_stride,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    union_pages,
    union_blocks,
    union_members,
    union_sizes,
    counters,
    counter_total,
    page_slots,
    used_pages,
    slots,
    row_end,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COMPARED_ROWS: tl.constexpr,
    LONGEST_UNION: tl.constexpr,
):
    """Union of the blocks of each (tile, kv head): pages, logical blocks and member rows (a bit per row).

    `union_sizes[tile, head]` holds how many blocks every chooser sees whole, and how many there are; -1 if
    there are more than `LONGEST_UNION`: such a tile is left to the page-major kernels, whose `counter_total`
    counters are set to zero here. With `page_slots` the slots of the pages are written instead of the
    pages, and when there are more `used_pages` than `slots`, every tile is left; never one without blocks,
    which nobody would write for then. Every entry is compared with those of `COMPARED_ROWS` rows at a time.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    if counters is not None:
        for begin in range((tile * heads + head) * BLOCK, counter_total, tl.num_programs(0) * heads * BLOCK):
            counter = begin + tl.arange(0, BLOCK)
            tl.store(counters + counter, 0, mask=counter < counter_total)
    entry = tl.arange(0, TILE_ROWS * TOPK_PAD)
    entry_row = entry // TOPK_PAD
    first_row = tile * TILE_ROWS
    chosen_at = chosen + head.to(tl.int64) * chosen_head_stride
    page, block, _ = _entry_blocks(
        chosen_at, chosen_row_stride, page_table, table_stride, row_request, row_position, row_end,
        first_row + entry_row, entry % TOPK_PAD, TOPK, -1,
    )  # fmt: skip
    used = page >= 0
    members = tl.zeros([TILE_ROWS * TOPK_PAD], tl.int32)
    in_part = tl.zeros([TILE_ROWS * TOPK_PAD], tl.int32)
    for compared in tl.static_range(0, TILE_ROWS, COMPARED_ROWS):
        other = tl.arange(0, COMPARED_ROWS * TOPK_PAD)
        other_row = compared + other // TOPK_PAD
        other_page, other_block, other_part = _entry_blocks(
            chosen_at, chosen_row_stride, page_table, table_stride, row_request, row_position, row_end,
            first_row + other_row, other % TOPK_PAD, TOPK, -2,
        )  # fmt: skip
        same = (page[:, None] == other_page[None, :]) & (block[:, None] == other_block[None, :])
        members |= tl.reduce(tl.where(same, (1 << other_row)[None, :], 0), 1, _either)
        in_part |= tl.reduce(tl.where(same, other_part.to(tl.int32)[None, :], 0), 1, _either)

    first = used & ((members & ((1 << entry_row) - 1)) == 0)
    first_whole = (first & (in_part == 0)).to(tl.int32)
    first_part = (first & (in_part != 0)).to(tl.int32)
    whole_count = tl.sum(first_whole)
    total = whole_count + tl.sum(first_part)
    place = tl.where(first_whole != 0, tl.cumsum(first_whole) - 1, whole_count + tl.cumsum(first_part) - 1)
    item = tile.to(tl.int64) * heads + head
    left = total > LONGEST_UNION
    if page_slots is not None:
        page = tl.load(page_slots + page, mask=first, other=0)
        left = left | ((tl.load(used_pages) > slots) & (total > 0))
    if left:
        whole_count = -1
        total = -1
    tl.store(union_sizes + item * 2, whole_count)
    tl.store(union_sizes + item * 2 + 1, total)
    list_at = item * (TILE_ROWS * TOPK) + place
    tl.store(union_pages + list_at, page, mask=first)
    tl.store(union_blocks + list_at, block, mask=first)
    tl.store(union_members + list_at, members, mask=first)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows"])
def plan_dense(
    page_table,
    table_stride,
    row_request,
    row_position,
    shared_blocks,
    rows,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`shared_blocks[tile]`: leading blocks that are one page for all rows of the tile that see them."""
    tile = tl.program_id(0)
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    request = tl.load(row_request + row, mask=row < rows, other=-1)
    real = request >= 0
    position = tl.load(row_position + row, mask=real, other=-1)
    blocks = tl.where(real, position // BLOCK + 1, 0)
    longest = tl.max(blocks)
    lead = tl.max(tl.where(real & (blocks == longest), request, -1))
    shared = longest
    begin = 0
    while begin < shared:
        block = begin + tl.arange(0, CHUNK)
        seen = block[None, :] < blocks[:, None]
        table_at = page_table + request.to(tl.int64)[:, None] * table_stride + block[None, :]
        lead_page = tl.load(
            page_table + lead.to(tl.int64) * table_stride + block, mask=block < longest, other=-1
        )
        differs = seen & (tl.load(table_at, mask=seen, other=-1) != lead_page[None, :])
        first = tl.min(tl.min(tl.where(differs, block[None, :], MAX_INT), 1))
        shared = tl.minimum(shared, first)
        begin += CHUNK
    tl.store(shared_blocks + tile, shared)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def _whole_step(
    queries,
    k,
    v,
    token_at,
    column,
    member,
    peak,
    weight,
    attended,
    scale_log2,
    SOME: tl.constexpr,
    DOT: tl.constexpr,
):
    """One step of the running softmax over tokens that every member sees; with `SOME` there are others."""
    keys = k.load([token_at, column]).to(DOT)
    logits = tl.dot(queries, keys.T)
    best = tl.maximum(peak, tl.max(logits, 1) * scale_log2)
    shift = best
    if SOME:
        best = tl.where(member, best, peak)
        shift = tl.where(member, best, float("inf"))
    weights = tl.exp2(logits * scale_log2 - shift[:, None])
    fade = tl.exp2(peak - best)
    weight = weight * fade + tl.sum(weights, 1)
    values = v.load([token_at, column]).to(DOT)
    attended = tl.dot(weights.to(DOT), values, attended * fade[:, None])
    return best, weight, attended


@triton.jit(do_not_specialize=["row_end", "tiles"])
def attend_tiles(
    q,
    q_row_stride,
    k,
    v,
    page_table,
    table_stride,
    row_request,
    row_position,
    union_pages,
    union_blocks,
    union_members,
    union_sizes,
    shared_blocks,
    out,
    out_row_stride,
    partial,
    partial_lse,
    row_end,
    tiles,
    scale_log2,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_M: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    WALK: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per (kv head, tile, split): `TOKENS` of a page at a time, running softmax in base 2."""
    if OVERLAP:
        gdc_wait()
    program = tl.program_id(0)
    split = program % SPLITS
    tile = (program // SPLITS) % tiles
    head = program // (SPLITS * tiles)
    STEPS: tl.constexpr = BLOCK // TOKENS
    if WALK == UNION:
        item = tile.to(tl.int64) * KV_HEADS + head
        whole_count = tl.load(union_sizes + item * 2)
        total = tl.load(union_sizes + item * 2 + 1)
        if total < 0:
            return

    m = tl.arange(0, TILE_M)
    m_row = m // GROUP_PAD
    m_head = m % GROUP_PAD
    row = tile * TILE_ROWS + m_row
    in_tile = (m_row < TILE_ROWS) & (row < row_end)
    m_request = tl.load(row_request + row, mask=in_tile, other=-1)
    real = m_request >= 0
    m_position = tl.load(row_position + row, mask=real, other=-1)
    dim = tl.arange(0, HEAD_DIM)
    q_head = head * GROUP + m_head
    q_at = q + row.to(tl.int64)[:, None] * q_row_stride + (q_head * HEAD_DIM)[:, None] + dim[None, :]
    queries = tl.load(q_at, mask=(real & (m_head < GROUP))[:, None], other=0.0).to(DOT)
    if WALK == UNION:
        list_at = item * (TILE_ROWS * TOPK)
    else:
        SPAN: tl.constexpr = TILE_M // GROUP_PAD
        r = tl.arange(0, SPAN)
        r_row = tile * TILE_ROWS + r
        r_request = tl.load(row_request + r_row, mask=(r < TILE_ROWS) & (r_row < row_end), other=-1)
        r_position = tl.load(row_position + r_row, mask=r_request >= 0, other=-1)
        r_blocks = tl.where(r_request >= 0, r_position // BLOCK + 1, 0)
        longest = tl.max(r_blocks)
        lead = tl.max(tl.where((r_request >= 0) & (r_blocks == longest), r_request, -1)).to(tl.int64)
        shared = tl.load(shared_blocks + tile)
        r_whole = tl.where(r_request >= 0, (r_position + 1) // BLOCK, 0)
        whole_shared = tl.minimum(shared, tl.min(tl.where(r_request >= 0, r_whole, MAX_INT)))
        tail = tl.maximum(r_whole - shared, 0)
        tail_end = tl.cumsum(tail)
        whole_count = whole_shared + tl.sum(tail)
        # Blocks that somebody sees in part: shared ones, then at most one at the end of each row's tail.
        has_part = (r_blocks > tl.maximum(r_whole, shared)).to(tl.int32)
        part_end = tl.cumsum(has_part)
        part_shared = shared - whole_shared
        total = whole_count + part_shared + tl.sum(has_part)

    begin = total * split // SPLITS
    end = total * (split + 1) // SPLITS
    peak = tl.full([TILE_M], LOWEST, tl.float32)
    weight = tl.zeros([TILE_M], tl.float32)
    attended = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
    token = tl.arange(0, TOKENS)

    # Blocks that every member sees whole: no mask per token.
    unmasked_end = tl.minimum(end, whole_shared if WALK == DENSE else whole_count)
    # Pages and members are loaded one step before they are needed: the loop's pipeline would wait for them.
    next_page = 0
    next_members = 0
    if begin < unmasked_end:
        if WALK == UNION:
            next_page = tl.load(union_pages + list_at + begin)
            next_members = tl.load(union_members + list_at + begin)
        else:
            next_page = tl.load(page_table + lead * table_stride + begin)
    for step in tl.range(begin * STEPS, unmasked_end * STEPS, num_stages=STAGES):
        entry = step // STEPS
        next_entry = tl.minimum((step + 1) // STEPS, unmasked_end - 1)
        member = real
        page = next_page
        if WALK == UNION:
            member = ((next_members >> m_row) & 1) != 0
            next_page = tl.load(union_pages + list_at + next_entry)
            next_members = tl.load(union_members + list_at + next_entry)
        else:
            next_page = tl.load(page_table + lead * table_stride + next_entry)
        token_at = page * BLOCK + (step - entry * STEPS) * TOKENS
        peak, weight, attended = _whole_step(
            queries, k, v, token_at, head * HEAD_DIM, member, peak, weight, attended, scale_log2,
            WALK == UNION, DOT,
        )  # fmt: skip
    if WALK == DENSE:
        # The rows' own tails.
        for step in tl.range(
            tl.maximum(begin, whole_shared) * STEPS, tl.minimum(end, whole_count) * STEPS, num_stages=STAGES
        ):
            entry = step // STEPS
            owner = tl.sum((tail_end <= entry - whole_shared).to(tl.int32))
            owner_begin = tl.sum(tl.where(r == owner, tail_end - tail, 0))
            owner_request = tl.sum(tl.where(r == owner, r_request, 0)).to(tl.int64)
            block = shared + entry - whole_shared - owner_begin
            page = tl.load(page_table + owner_request * table_stride + block)
            token_at = page * BLOCK + (step - entry * STEPS) * TOKENS
            peak, weight, attended = _whole_step(
                queries, k, v, token_at, head * HEAD_DIM, m_row == owner, peak, weight, attended, scale_log2,
                True, DOT,
            )  # fmt: skip

    # The others: a mask per token, and values that no member sees are set to zero (they may be NaN).
    for step in tl.range(tl.maximum(begin, whole_count) * STEPS, end * STEPS, num_stages=1):
        entry = step // STEPS
        if WALK == UNION:
            page = tl.load(union_pages + list_at + entry)
            block = tl.load(union_blocks + list_at + entry)
            member = ((tl.load(union_members + list_at + entry) >> m_row) & 1) != 0
        else:
            part = entry - whole_count
            own = part >= part_shared
            owner = tl.sum((part_end <= part - part_shared).to(tl.int32))
            owner_block = tl.sum(tl.where(r == owner, r_blocks, 0)) - 1
            owner_request = tl.sum(tl.where(r == owner, r_request, 0)).to(tl.int64)
            block = tl.where(own, owner_block, whole_shared + part)
            member = real & ((m_row == owner) | (part < part_shared))
            page = tl.load(page_table + tl.where(own, owner_request, lead) * table_stride + block)
        seen_tokens = tl.where(member, m_position - block * BLOCK + 1, 0)
        token_at = page * BLOCK + (step - entry * STEPS) * TOKENS
        offset = token + (step - entry * STEPS) * TOKENS
        keys = k.load([token_at, head * HEAD_DIM]).to(DOT)
        logits = tl.dot(queries, keys.T) * scale_log2
        logits = tl.where(offset[None, :] < seen_tokens[:, None], logits, float("-inf"))
        best = tl.maximum(peak, tl.max(logits, 1))
        weights = tl.exp2(logits - best[:, None])
        fade = tl.exp2(peak - best)
        weight = weight * fade + tl.sum(weights, 1)
        values = v.load([token_at, head * HEAD_DIM]).to(DOT)
        values = tl.where((offset < tl.max(seen_tokens))[:, None], values, 0.0)
        attended = tl.dot(weights.to(DOT), values, attended * fade[:, None])
        peak = best

    result = attended * (1.0 / tl.where(weight > 0, weight, 1.0))[:, None]
    result = tl.where(real[:, None], result, 0.0)
    store = in_tile & (m_head < GROUP)
    if SPLITS == 1:
        out_at = (
            out + row.to(tl.int64)[:, None] * out_row_stride + (q_head * HEAD_DIM)[:, None] + dim[None, :]
        )
        tl.store(out_at, result.to(out.dtype.element_ty), mask=store[:, None])
    else:
        lse = tl.where((weight > 0) & real, peak + tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        slot_at = ((row.to(tl.int64) * KV_HEADS + head) * SPLITS + split) * GROUP + m_head
        tl.store(partial_lse + slot_at, lse, mask=store)
        tl.store(partial + slot_at[:, None] * HEAD_DIM + dim[None, :], result, mask=store[:, None])
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def merge_splits(
    partial,
    partial_lse,
    out,
    out_row_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weigh the partial outputs `[rows, KV_HEADS, SPLITS, GROUP, HEAD_DIM]` by log-sum-exp, in order.

    More than `CHUNK` of them are loaded `CHUNK` at a time.
    """
    if OVERLAP:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    q_head = tl.program_id(1) * MERGE_HEADS
    kv_head = q_head // GROUP
    g = q_head - kv_head * GROUP + tl.arange(0, MERGE_HEADS)
    dim = tl.arange(0, HEAD_DIM)
    slot_at = (row * KV_HEADS + kv_head) * (SPLITS * GROUP) + g
    if SPLITS <= CHUNK:
        peak = tl.full([MERGE_HEADS], LOWEST, tl.float32)
        for split in tl.static_range(SPLITS):
            peak = tl.maximum(peak, tl.load(partial_lse + slot_at + split * GROUP))
        weight = tl.zeros([MERGE_HEADS], tl.float32)
        merged = tl.zeros([MERGE_HEADS, HEAD_DIM], tl.float32)
        for split in tl.static_range(SPLITS):
            factor = tl.exp2(tl.load(partial_lse + slot_at + split * GROUP) - peak)
            part = tl.load(partial + (slot_at + split * GROUP)[:, None] * HEAD_DIM + dim[None, :])
            weight += factor
            merged += part * factor[:, None]
    else:
        lse = tl.load(partial_lse + slot_at[:, None] + tl.arange(0, SPLITS)[None, :] * GROUP)
        peak = tl.maximum(tl.max(lse, 1), LOWEST)
        weight = tl.sum(tl.exp2(lse - peak[:, None]), 1)
        parts = tl.zeros([MERGE_HEADS, CHUNK, HEAD_DIM], tl.float32)
        for begin in tl.static_range(0, SPLITS, CHUNK):
            at = slot_at[:, None] + (begin + tl.arange(0, CHUNK))[None, :] * GROUP
            factor = tl.exp2(tl.load(partial_lse + at) - peak[:, None])
            part = tl.load(partial + at[:, :, None] * HEAD_DIM + dim[None, None, :])
            parts += part * factor[:, :, None]
        merged = tl.sum(parts, 1)
    merged = merged * (1.0 / tl.where(weight > 0, weight, 1.0))[:, None]
    out_at = out + row * out_row_stride + ((kv_head * GROUP + g) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(out_at, merged.to(out.dtype.element_ty))
