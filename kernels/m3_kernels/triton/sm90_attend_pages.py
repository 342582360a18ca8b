"""Page-major attention: the selection inverted to page -> rows, a K/V page loaded once for a run of its rows.

For union tiles whose rows have little in common (`union_sizes` -1). In this order, per pass over the rows:
`count_entries` counts the entries, (row, slot) pairs, of every page; `lay_out_pages` gives every page its
tiles, of `TILE_ENTRIES` entries each, and its places among the partial outputs; `list_entries` fills the
tiles; `attend_pages` runs them against their pages and writes one partial output per entry; `merge_pages`
weighs them by log-sum-exp. Where an entry lies depends on the order of atomic additions; what is computed
for it does not.

A thread holds pieces of two rows of the matrix unit's operands and results, in columns 8 j + 2 q and the one
after it (q: its lane modulo 4). `attend_pages` takes a head's dimensions in another order, in which these
pieces are neighbours in memory: queries and partial outputs then travel between registers and global memory
16 bytes at a time, without shared memory or barriers.
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
def entry_page(
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
    totals,
    tile_begin,
    tile_end,
    row_end,
    pages,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Count the entries of each (kv head, page) in `page_counts`, zero before; `ranks` keeps their order.

    `totals` is set to zero for `lay_out_pages`.
    """
    if OVERLAP:
        gdc_wait()
    if tl.program_id(0) == 0:
        for i in range(KV_HEADS + 1):
            tl.store(totals + i, 0)
    entry = tl.arange(0, TILE_ROWS * TOPK_PAD)
    slot = entry % TOPK_PAD
    for item in range(tl.program_id(0), (tile_end - tile_begin) * KV_HEADS, tl.num_programs(0)):
        tile = tile_begin + item // KV_HEADS
        head = item % KV_HEADS
        if tl.load(union_sizes + (tile * KV_HEADS + head) * 2 + 1) < 0:
            row = tile * TILE_ROWS + entry // TOPK_PAD
            page, _, used = entry_page(
                chosen, chosen_head_stride, chosen_row_stride, page_table, table_stride, row_request,
                row_position, row, head, slot, (row < row_end) & (slot < TOPK),
            )  # fmt: skip
            rank = tl.atomic_add(page_counts + head.to(tl.int64) * pages + page, 1, mask=used, sem="relaxed")
            tl.store(ranks + item * (TILE_ROWS * TOPK_PAD) + entry, rank, mask=used)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["pages"])
def lay_out_pages(
    page_counts,
    page_tiles,
    page_places,
    page_sizes,
    page_masked,
    totals,
    pages,
    TILE_ENTRIES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """First tile (within its kv head), first place and number of entries of every page that has any.

    `totals`, zero before, counts the tiles of each kv head and then the entries of all. `page_counts` is zero
    again afterwards, and so is `page_masked` of the pages with entries.
    """
    if OVERLAP:
        gdc_wait()
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    page = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    at = head.to(tl.int64) * pages + page
    count = tl.load(page_counts + at, mask=page < pages, other=0)
    entries = tl.sum(count)
    if entries > 0:
        some = count > 0
        tiles = (count + TILE_ENTRIES - 1) // TILE_ENTRIES
        tile_begin = tl.atomic_add(totals + head, tl.sum(tiles), sem="relaxed") + tl.cumsum(tiles) - tiles
        place_begin = tl.atomic_add(totals + heads, entries, sem="relaxed") + tl.cumsum(count) - count
        tl.store(page_counts + at, 0, mask=some)
        tl.store(page_tiles + at, tile_begin, mask=some)
        tl.store(page_places + at, place_begin, mask=some)
        tl.store(page_sizes + at, count, mask=some)
        tl.store(page_masked + at, 0, mask=some)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["tile_begin", "tile_end", "row_end", "pages", "head_tiles"])
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
    page_tiles,
    page_places,
    page_sizes,
    page_masked,
    entries,
    last_tokens,
    tile_pages,
    tile_ends,
    tile_places,
    places,
    tile_begin,
    tile_end,
    row_end,
    pages,
    head_tiles,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_ENTRIES: tl.constexpr,
):
    """Write every entry, its row counted from the pass's first, and its last visible token, into its tile.

    A tile has a page, the end of the page's tiles and the place of its first entry. A page's last tile is
    filled up with entries -1. `places` (row, kv head, slot) says where the partial output of an entry will
    be, -1 for slots without one. `page_masked` is set for pages that some row sees in part.
    """
    if OVERLAP:
        gdc_wait()
    entry = tl.arange(0, TILE_ROWS * TOPK_PAD)
    slot = entry % TOPK_PAD
    for item in range(tl.program_id(0), (tile_end - tile_begin) * KV_HEADS, tl.num_programs(0)):
        row_tile = tile_begin + item // KV_HEADS
        head = item % KV_HEADS
        if tl.load(union_sizes + (row_tile * KV_HEADS + head) * 2 + 1) < 0:
            row = row_tile * TILE_ROWS + entry // TOPK_PAD
            inside = (row < row_end) & (slot < TOPK)
            page, last_token, used = entry_page(
                chosen, chosen_head_stride, chosen_row_stride, page_table, table_stride, row_request,
                row_position, row, head, slot, inside,
            )  # fmt: skip
            relative = row - tile_begin * TILE_ROWS
            page_at = head.to(tl.int64) * pages + page
            rank = tl.load(ranks + item * (TILE_ROWS * TOPK_PAD) + entry, mask=used, other=0)
            size = tl.load(page_sizes + page_at, mask=used, other=0)
            page_tile = tl.load(page_tiles + page_at, mask=used, other=0)
            place = tl.load(page_places + page_at, mask=used, other=0) + rank
            tile = head * head_tiles + page_tile + rank // TILE_ENTRIES
            entry_at = tile.to(tl.int64) * TILE_ENTRIES + rank % TILE_ENTRIES
            tl.store(entries + entry_at, relative, mask=used)
            tl.store(last_tokens + entry_at, last_token, mask=used)
            tl.store(page_masked + page_at, 1, mask=used & (last_token < BLOCK - 1))
            opens = used & (rank % TILE_ENTRIES == 0)
            tl.store(tile_pages + tile, page, mask=opens)
            tl.store(tile_ends + tile, page_tile + (size + TILE_ENTRIES - 1) // TILE_ENTRIES, mask=opens)
            tl.store(tile_places + tile, place, mask=opens)
            for empty in range(1, TILE_ENTRIES):
                fill = used & (rank == size - 1) & (rank % TILE_ENTRIES + empty < TILE_ENTRIES)
                tl.store(entries + entry_at + empty, -1, mask=fill)
                tl.store(last_tokens + entry_at + empty, 0, mask=fill)
            place_at = (relative.to(tl.int64) * KV_HEADS + head) * TOPK + slot
            tl.store(places + place_at, tl.where(used, place, -1), mask=inside)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def _load_fragments(at):
    """Pairs of bfloat16 in the places of every first one of a pair: 16 bytes from each of a thread's rows."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $4, $8, $12}, [$16]; ld.global.v4.b32 {$2, $6, $10, $14}, [$18];",
        "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=16,
    )


@triton.jit
def _pairs(words):
    """The bfloat16 values of what `_load_fragments` gave."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _store_fragments(at, values, wanted):
    """16 bytes to each of a thread's two rows per 16 values; nobody reads them before the merge."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p, r; setp.ne.b32 p, $28, 0; setp.ne.b32 r, $30, 0;"
        " @p st.global.cs.v4.b32 [$4], {$20, $22, $24, $26};"
        " @r st.global.cs.v4.b32 [$6], {$21, $23, $25, $27}; }",
        "=r,=r,=r,=r,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,l,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [at.to(tl.int64), values, wanted],
        dtype=tl.int8,
        is_pure=False,
        pack=16,
    )


@triton.jit
def _load_rows(at):
    """One int32 per row, in the layout in which the matrix unit's results have their rows."""
    return tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store_rows(at, values, wanted):
    """One float32 per row."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,f,r",
        [at.to(tl.int64), values, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _in_fragment_order(x, HEAD_DIM: tl.constexpr):
    """Columns 32 t + 8 q + 2 i + e at 32 t + 8 i + 2 q + e: what a thread holds is 16 bytes in a row."""
    return x.reshape([BLOCK, HEAD_DIM // 32, 4, 4, 2]).permute(0, 1, 3, 2, 4).reshape([BLOCK, HEAD_DIM])


@triton.jit(do_not_specialize=["row_begin", "pages", "head_tiles"])
def attend_pages(
    q,
    q_row_stride,
    k,
    v,
    token_stride,
    entries,
    last_tokens,
    tile_pages,
    tile_ends,
    tile_places,
    page_masked,
    totals,
    partial,
    partial_lse,
    row_begin,
    pages,
    head_tiles,
    scale_log2,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    DOT: tl.constexpr,
    FRAGMENTS: tl.constexpr,
):
    """Every program has an equal share of each kv head's tiles, in order: few pages, each loaded once.

    Partial outputs `[places, GROUP, HEAD_DIM]` are normalised by the block's own sum, and `partial_lse`
    holds its base-2 logarithm. `FRAGMENTS`: the way without shared memory, for 4 warps, 64 pairs, an even
    number of grouped heads and head dimensions from 64 on.
    """
    if OVERLAP:
        gdc_wait()
    TILE_ENTRIES: tl.constexpr = TILE_M // GROUP_PAD
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    m = tl.arange(0, TILE_M)
    dim = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, BLOCK)
    dim_at = dim
    if FRAGMENTS:
        # The layout of a product's result, of which the loads and stores below must be; it is zero.
        result_like = tl.dot(tl.zeros([TILE_M, 16], DOT), tl.zeros([16, HEAD_DIM], DOT))
        m += tl.max(result_like, 1).to(tl.int32)
        dim_at = dim // 32 * 32 + dim % 8 // 2 * 8
    m_entry = m // GROUP_PAD
    m_head = m % GROUP_PAD
    for head in range(KV_HEADS):
        tiles = tl.load(totals + head)
        tile = tiles * program // programs
        end = tiles * (program + 1) // programs
        if tile < end:
            # Queries are loaded one tile ahead, their rows two.
            base = head * head_tiles
            list_at = base.to(tl.int64) * TILE_ENTRIES + m_entry
            q_head = head * GROUP + tl.minimum(m_head, GROUP - 1)
            q_at = q + row_begin.to(tl.int64) * q_row_stride + q_head * HEAD_DIM
            row_at = entries + list_at + tile * TILE_ENTRIES
            next_row_at = entries + list_at + tl.minimum(tile + 1, end - 1) * TILE_ENTRIES
            if FRAGMENTS:
                row = _load_rows(row_at)
                first_at = (q_at + tl.maximum(row, 0).to(tl.int64) * q_row_stride)[:, None] + dim_at[None, :]
                queries = _load_fragments(first_at)
                next_row = _load_rows(next_row_at)
            else:
                row = tl.load(row_at)
                first_at = (q_at + tl.maximum(row, 0).to(tl.int64) * q_row_stride)[:, None] + dim_at[None, :]
                queries = tl.load(first_at)
                next_row = tl.load(next_row_at)
            while tile < end:
                page = tl.load(tile_pages + base + tile)
                stop = tl.minimum(tl.load(tile_ends + base + tile), end)
                place = tl.load(tile_places + base + tile)
                masked = tl.load(page_masked + pages.to(tl.int64) * head + page)
                # Values that no row sees may be NaN.
                seen = BLOCK - 1
                if masked != 0:
                    seen = 0
                    for i in range(tile, stop):
                        seen = tl.maximum(seen, tl.max(tl.load(last_tokens + list_at + i * TILE_ENTRIES)))
                kv_at = (page.to(tl.int64) * BLOCK + token)[:, None] * token_stride
                kv_at += head * HEAD_DIM + dim[None, :]
                keys = tl.load(k + kv_at).to(DOT)
                values = tl.load(v + kv_at, mask=(token <= seen)[:, None], other=0.0).to(DOT)
                if FRAGMENTS:
                    keys = _in_fragment_order(keys, HEAD_DIM)
                    values = _in_fragment_order(values, HEAD_DIM)

                for i in tl.range(tile, stop, num_stages=1):
                    real = row >= 0
                    tile_queries = queries
                    row = next_row
                    row_q_at = (q_at + tl.maximum(row, 0).to(tl.int64) * q_row_stride)[:, None]
                    ahead_at = entries + list_at + tl.minimum(i + 2, end - 1) * TILE_ENTRIES
                    last_at = last_tokens + list_at + i * TILE_ENTRIES
                    if FRAGMENTS:
                        queries = _load_fragments(row_q_at + dim_at[None, :])
                        next_row = _load_rows(ahead_at)
                        logits = tl.dot(_pairs(tile_queries), keys.T)
                    else:
                        queries = tl.load(row_q_at + dim_at[None, :])
                        next_row = tl.load(ahead_at)
                        logits = tl.dot(tile_queries.to(DOT), keys.T)
                    if masked != 0:
                        last_token = _load_rows(last_at) if FRAGMENTS else tl.load(last_at)
                        logits = tl.where(token[None, :] <= last_token[:, None], logits, float("-inf"))
                    peak = tl.max(logits, 1) * scale_log2
                    weights = tl.exp2(logits * scale_log2 - peak[:, None])
                    weight = tl.sum(weights, 1)
                    result = tl.dot(weights.to(DOT), values) * (1.0 / weight)[:, None]
                    slot_at = (place + (i - tile) * TILE_ENTRIES + m_entry).to(tl.int64) * GROUP + m_head
                    wanted = real & (m_head < GROUP)
                    lse = peak + tl.log2(weight)
                    if FRAGMENTS:
                        _store_rows(partial_lse + slot_at, lse, wanted.to(tl.int32))
                        _store_fragments(
                            (partial + slot_at * HEAD_DIM)[:, None] + dim_at[None, :],
                            result.to(tl.bfloat16),
                            tl.broadcast_to(wanted.to(tl.int32)[:, None], [TILE_M, HEAD_DIM]),
                        )
                    else:
                        tl.store(partial_lse + slot_at, lse, mask=wanted)
                        partial_at = (partial + slot_at * HEAD_DIM)[:, None] + dim_at[None, :]
                        tl.store(partial_at, result.to(partial.dtype.element_ty), mask=wanted[:, None])
                tile = stop
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["row_begin", "row_end"])
def merge_pages(
    partial,
    partial_lse,
    places,
    union_sizes,
    totals,
    out,
    out_row_stride,
    row_begin,
    row_end,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TOPK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
):
    """Weigh the partial outputs of the page-major rows from `row_begin` to `row_end`, slots in order."""
    if OVERLAP:
        gdc_wait()
    dim = tl.arange(0, HEAD_DIM)
    g = tl.arange(0, MERGE_HEADS)
    PARTS: tl.constexpr = GROUP // MERGE_HEADS
    units = (row_end - row_begin) * (KV_HEADS * PARTS)
    if tl.load(totals + KV_HEADS) == 0:
        units = 0
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        relative = unit // (KV_HEADS * PARTS)
        head = unit // PARTS % KV_HEADS
        first_head = unit % PARTS * MERGE_HEADS
        row = row_begin + relative
        if tl.load(union_sizes + (row // TILE_ROWS * KV_HEADS + head) * 2 + 1) < 0:
            place_at = places + (relative * KV_HEADS + head) * TOPK
            peak = tl.full([MERGE_HEADS], LOWEST, tl.float32)
            for slot in tl.static_range(TOPK):
                place = tl.load(place_at + slot).to(tl.int64)
                lse_at = partial_lse + place * GROUP + first_head + g
                lse = tl.load(lse_at, mask=(place >= 0) & (g < MERGE_HEADS), other=float("-inf"))
                peak = tl.maximum(peak, lse)
            weight = tl.zeros([MERGE_HEADS], tl.float32)
            merged = tl.zeros([MERGE_HEADS, HEAD_DIM], tl.float32)
            for slot in tl.static_range(TOPK):
                # A slot without an entry has no partial output.
                place = tl.load(place_at + slot).to(tl.int64)
                slot_at = place * GROUP + first_head + g
                used = (place >= 0) & (g < MERGE_HEADS)
                lse = tl.load(partial_lse + slot_at, mask=used, other=float("-inf"))
                part_at = partial + slot_at[:, None] * HEAD_DIM + dim[None, :]
                part = tl.load(part_at, mask=used[:, None], other=0.0)
                factor = tl.exp2(lse - peak)
                weight += factor
                merged += part.to(tl.float32) * factor[:, None]
            merged = merged * (1.0 / tl.where(weight > 0, weight, 1.0))[:, None]
            out_at = out + row.to(tl.int64) * out_row_stride + dim[None, :]
            out_at += ((head * GROUP + first_head + g) * HEAD_DIM)[:, None]
            tl.store(out_at, merged.to(out.dtype.element_ty))
