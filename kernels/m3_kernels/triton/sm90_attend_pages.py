"""Page-major attention: the selection inverted to page -> rows, a K/V page loaded once for a run of its rows.

For union tiles whose rows have little in common (`union_sizes` -1). In this order, per pass over the rows:
`count_entries` counts the entries, (row, slot) pairs, of every page; `lay_out_pages` gives every page its
place in the entry list and cuts it into items; `list_entries` fills the list; `attend_pages` runs each item's
rows against its page and writes one partial output per entry; `merge_pages` weighs them by log-sum-exp.
Where an entry lies in the list depends on the order of atomic additions; what is computed for it does not.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.rows import BLOCK_TOKENS
from m3_kernels.triton.sm90_common import INTERPRETING

BLOCK = tl.constexpr(BLOCK_TOKENS)
OVERLAP = tl.constexpr(not INTERPRETING)
"""A launch may begin before its predecessor ends and then waits for it (not in the interpreter)."""
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _entry_page(
    chosen,
    chosen_head_stride,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    row,
    head,
    slot,
    inside,
):
    """Page of each (row, slot) entry, its last visible token, and whether there is such an entry."""
    request = tl.load(row_request + row, mask=inside, other=-1)
    real = inside & (request >= 0)
    position = tl.load(row_position + row, mask=real, other=-1)
    block = tl.load(
        chosen + head.to(tl.int64) * chosen_head_stride + row.to(tl.int64) * chosen_row_stride + slot,
        mask=real,
        other=-1,
    )
    used = (block >= 0) & (block <= position // BLOCK)
    page = tl.load(page_table + request.to(tl.int64) * table_stride + block, mask=used, other=0)
    return page, tl.minimum(position - block * BLOCK, BLOCK - 1), used


@triton.jit(do_not_specialize=["tile_begin", "tile_end", "row_end", "pages"])
def count_entries(
    chosen,
    chosen_head_stride,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    union_sizes,
    page_counts,
    ranks,
    tile_begin,
    tile_end,
    row_end,
    pages,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Count the entries of each (kv head, page) in `page_counts`, zero before; `ranks` keeps their order."""
    if OVERLAP:
        gdc_wait()
    entry = tl.arange(0, TILE_ROWS * TOPK_PAD)
    slot = entry % TOPK_PAD
    for item in range(tl.program_id(0), (tile_end - tile_begin) * KV_HEADS, tl.num_programs(0)):
        tile = tile_begin + item // KV_HEADS
        head = item % KV_HEADS
        if tl.load(union_sizes + (tile * KV_HEADS + head) * 2 + 1) < 0:
            row = tile * TILE_ROWS + entry // TOPK_PAD
            page, _, used = _entry_page(
                chosen, chosen_head_stride, chosen_row_stride, page_table, table_stride, row_request,
                row_position, row, head, slot, (row < row_end) & (slot < TOPK),
            )  # fmt: skip
            rank = tl.atomic_add(page_counts + head.to(tl.int64) * pages + page, 1, mask=used, sem="relaxed")
            tl.store(ranks + item * (TILE_ROWS * TOPK_PAD) + entry, rank, mask=used)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def lay_out_pages(
    page_counts,
    page_begins,
    item_pages,
    item_begins,
    item_sizes,
    totals,
    page_total,
    ITEM_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Place of every page's entries in the list, and the items of at most `ITEM_ROWS` entries of one page.

    `totals` (entries, items) is zero before; `page_counts` is zero again afterwards.
    """
    if OVERLAP:
        gdc_wait()
    page = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    count = tl.load(page_counts + page, mask=page < page_total, other=0)
    entries = tl.sum(count)
    if entries > 0:
        tl.store(page_counts + page, 0, mask=page < page_total)
        items = (count + ITEM_ROWS - 1) // ITEM_ROWS
        entry_begin = tl.atomic_add(totals, entries, sem="relaxed") + tl.cumsum(count) - count
        item_begin = tl.atomic_add(totals + 1, tl.sum(items), sem="relaxed") + tl.cumsum(items) - items
        tl.store(page_begins + page, entry_begin, mask=count > 0)
        for i in range(tl.max(items)):
            mine = i < items
            tl.store(item_pages + item_begin + i, page, mask=mine)
            tl.store(item_begins + item_begin + i, entry_begin + i * ITEM_ROWS, mask=mine)
            tl.store(item_sizes + item_begin + i, tl.minimum(count - i * ITEM_ROWS, ITEM_ROWS), mask=mine)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["tile_begin", "tile_end", "row_end", "pages"])
def list_entries(
    chosen,
    chosen_head_stride,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    union_sizes,
    ranks,
    page_begins,
    entries,
    last_tokens,
    partial_lse,
    tile_begin,
    tile_end,
    row_end,
    pages,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write every entry, row (counted from the pass's first) * TOPK + slot, and its last visible token.

    Slots without an entry get a log-sum-exp of -inf, so that the merge passes over them.
    """
    if OVERLAP:
        gdc_wait()
    entry = tl.arange(0, TILE_ROWS * TOPK_PAD)
    slot = entry % TOPK_PAD
    for item in range(tl.program_id(0), (tile_end - tile_begin) * KV_HEADS, tl.num_programs(0)):
        tile = tile_begin + item // KV_HEADS
        head = item % KV_HEADS
        if tl.load(union_sizes + (tile * KV_HEADS + head) * 2 + 1) < 0:
            row = tile * TILE_ROWS + entry // TOPK_PAD
            inside = (row < row_end) & (slot < TOPK)
            page, last_token, used = _entry_page(
                chosen, chosen_head_stride, chosen_row_stride, page_table, table_stride, row_request,
                row_position, row, head, slot, inside,
            )  # fmt: skip
            place = tl.load(ranks + item * (TILE_ROWS * TOPK_PAD) + entry, mask=used, other=0)
            place += tl.load(page_begins + head.to(tl.int64) * pages + page, mask=used, other=0)
            relative = row - tile_begin * TILE_ROWS
            tl.store(entries + place, relative * TOPK + slot, mask=used)
            tl.store(last_tokens + place, last_token, mask=used)
            slot_at = ((relative.to(tl.int64) * KV_HEADS + head) * TOPK + slot) * GROUP
            for g in range(GROUP):
                tl.store(partial_lse + slot_at + g, float("-inf"), mask=inside & (used == 0))
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["pages"])
def attend_pages(
    q,
    q_row_stride,
    k,
    v,
    token_stride,
    entries,
    last_tokens,
    item_pages,
    item_begins,
    item_sizes,
    totals,
    partial,
    partial_lse,
    row_begin,
    pages,
    scale_log2,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_M: tl.constexpr,
    ITEM_ROWS: tl.constexpr,
    DOT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs take items in turn. An item's page stays on the chip while tiles of its rows pass by.

    Partial outputs `[rows, Hkv, TOPK, GROUP, HEAD_DIM]` are normalised by the block's own sum, and
    `partial_lse` holds its base-2 logarithm.
    """
    if OVERLAP:
        gdc_wait()
    M_ROWS: tl.constexpr = TILE_M // GROUP_PAD
    m = tl.arange(0, TILE_M)
    m_row = m // GROUP_PAD
    m_head = m % GROUP_PAD
    dim = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, BLOCK)
    item_entry = tl.arange(0, ITEM_ROWS)
    for item in range(tl.program_id(0), tl.load(totals + 1), tl.num_programs(0)):
        head_page = tl.load(item_pages + item)
        begin = tl.load(item_begins + item)
        size = tl.load(item_sizes + item)
        head = head_page // pages
        page = head_page % pages
        in_item = item_entry < size
        item_last = tl.load(last_tokens + begin + item_entry, mask=in_item, other=-1)
        seen_by_any = tl.max(item_last)
        seen_by_all = tl.min(tl.where(in_item, item_last, BLOCK - 1))
        kv_at = (page.to(tl.int64) * BLOCK + token)[:, None] * token_stride + head * HEAD_DIM + dim[None, :]
        # Values that no row of the item sees may be NaN.
        keys = tl.load(k + kv_at).to(DOT)
        values = tl.load(v + kv_at, mask=(token <= seen_by_any)[:, None], other=0.0).to(DOT)

        for tile in tl.range(0, tl.cdiv(size, M_ROWS), num_stages=STAGES):
            place = tile * M_ROWS + m_row
            inside = (place < size) & (m_head < GROUP)
            code = tl.load(entries + begin + place, mask=inside, other=0)
            relative = (code // TOPK).to(tl.int64)
            q_at = ((row_begin + relative) * q_row_stride + (head * GROUP + m_head) * HEAD_DIM)[:, None]
            queries = tl.load(q + q_at + dim[None, :], mask=inside[:, None], other=0.0).to(DOT)
            logits = tl.dot(queries, keys.T)
            if seen_by_all < BLOCK - 1:
                last_token = tl.load(last_tokens + begin + place, mask=inside, other=0)
                logits = tl.where(token[None, :] <= last_token[:, None], logits, float("-inf"))
            peak = tl.max(logits, 1) * scale_log2
            weights = tl.exp2(logits * scale_log2 - peak[:, None])
            weight = tl.sum(weights, 1)
            result = tl.dot(weights.to(DOT), values) * (1.0 / weight)[:, None]
            slot_at = ((relative * KV_HEADS + head) * TOPK + code % TOPK) * GROUP + m_head
            tl.store(partial_lse + slot_at, peak + tl.log2(weight), mask=inside)
            tl.store(
                partial + slot_at[:, None] * HEAD_DIM + dim[None, :],
                result.to(partial.dtype.element_ty),
                mask=inside[:, None],
                cache_modifier=".cs",
            )
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["tile_begin", "tile_end", "row_end"])
def merge_pages(
    partial,
    partial_lse,
    union_sizes,
    totals,
    out,
    out_row_stride,
    tile_begin,
    tile_end,
    row_end,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
):
    """Weigh the partial outputs of the page-major rows, slots in order; `totals` is zero again afterwards."""
    if OVERLAP:
        gdc_wait()
    if tl.program_id(0) == 0:
        tl.store(totals + tl.arange(0, 2), 0)
    dim = tl.arange(0, HEAD_DIM)
    g = tl.arange(0, MERGE_HEADS)
    PARTS: tl.constexpr = GROUP // MERGE_HEADS
    for item in range(tl.program_id(0), (tile_end - tile_begin) * KV_HEADS, tl.num_programs(0)):
        tile = tile_begin + item // KV_HEADS
        head = item % KV_HEADS
        if tl.load(union_sizes + (tile * KV_HEADS + head) * 2 + 1) < 0:
            for unit in range(TILE_ROWS * PARTS):
                row = tile * TILE_ROWS + unit // PARTS
                relative = (row - tile_begin * TILE_ROWS).to(tl.int64)
                first_head = (unit - unit // PARTS * PARTS) * MERGE_HEADS
                if row < row_end:
                    slot_at = (relative * KV_HEADS + head) * (TOPK * GROUP) + first_head + g
                    peak = tl.full([MERGE_HEADS], LOWEST, tl.float32)
                    for slot in tl.static_range(TOPK):
                        peak = tl.maximum(peak, tl.load(partial_lse + slot_at + slot * GROUP))
                    weight = tl.zeros([MERGE_HEADS], tl.float32)
                    merged = tl.zeros([MERGE_HEADS, HEAD_DIM], tl.float32)
                    for slot in tl.static_range(TOPK):
                        factor = tl.exp2(tl.load(partial_lse + slot_at + slot * GROUP) - peak)
                        # A slot without an entry was not written: not read either.
                        part = tl.load(
                            partial + (slot_at + slot * GROUP)[:, None] * HEAD_DIM + dim[None, :],
                            mask=(factor > 0)[:, None],
                            other=0.0,
                        ).to(tl.float32)
                        weight += factor
                        merged += part * factor[:, None]
                    merged = merged * (1.0 / tl.where(weight > 0, weight, 1.0))[:, None]
                    out_at = out + row.to(tl.int64) * out_row_stride + dim[None, :]
                    out_at += ((head * GROUP + first_head + g) * HEAD_DIM)[:, None]
                    tl.store(out_at, merged.to(out.dtype.element_ty))
