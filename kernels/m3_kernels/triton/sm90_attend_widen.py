"""E4M3 pages as bfloat16, once per step: the union tiles of an extend chunk then read them as they are.

`mark_pages` marks the pages that some row chose, `place_pages` gives them slots in a bfloat16 pool of limited
size, and `widen_pages` fills it. A page may get another slot on another run; its values are the same numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.rows import BLOCK_TOKENS
from m3_kernels.triton.sm90_attend_pages import entry_page
from m3_kernels.triton.sm90_common import INTERPRETING

BLOCK = tl.constexpr(BLOCK_TOKENS)
OVERLAP = tl.constexpr(not INTERPRETING)
"""A launch may begin before its predecessor ends and then waits for it (not in the interpreter)."""


@triton.jit(do_not_specialize=["rows"])
def mark_pages(
    chosen,
    chosen_head_stride,
    chosen_row_stride,
    page_table,
    table_stride,
    row_request,
    row_position,
    page_used,
    rows,
    KV_HEADS: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Set `page_used`, zero before, of every page that a row chose for some kv head."""
    entry = tl.arange(0, TILE_ROWS * TOPK_PAD)
    slot = entry % TOPK_PAD
    for item in range(tl.program_id(0), tl.cdiv(rows, TILE_ROWS) * KV_HEADS, tl.num_programs(0)):
        row = item // KV_HEADS * TILE_ROWS + entry // TOPK_PAD
        head = item % KV_HEADS
        page, _, used = entry_page(
            chosen, chosen_head_stride, chosen_row_stride, page_table, table_stride, row_request,
            row_position, row, head, slot, (row < rows) & (slot < TOPK),
        )  # fmt: skip
        tl.store(page_used + page, 1, mask=used)
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["pages", "slots"])
def place_pages(page_used, page_slots, slot_pages, total, pages, slots, CHUNK: tl.constexpr):
    """Slot of every used page; `total`, zero before, counts them. Pages past the `slots` are not listed."""
    if OVERLAP:
        gdc_wait()
    page = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    used = tl.load(page_used + page, mask=page < pages, other=0)
    count = tl.sum(used)
    if count > 0:
        slot = tl.atomic_add(total, count, sem="relaxed") + tl.cumsum(used) - 1
        tl.store(page_slots + page, slot, mask=used != 0)
        tl.store(slot_pages + slot, page, mask=(used != 0) & (slot < slots))
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["slots"])
def widen_pages(
    k,
    v,
    token_stride,
    slot_pages,
    total,
    wide_k,
    wide_v,
    slots,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Copy the used pages, `WIDTH` values a token, into `[slots, BLOCK, WIDTH]`, if all fit."""
    if OVERLAP:
        gdc_wait()
    TOKENS: tl.constexpr = BLOCK // PARTS
    column = tl.arange(0, WIDTH_PAD)
    pages = tl.load(total)
    parts = tl.where(pages > slots, 0, pages) * PARTS
    for part in range(tl.program_id(0), parts, tl.num_programs(0)):
        token = part % PARTS * TOKENS + tl.arange(0, TOKENS)
        slot = part // PARTS
        page = tl.load(slot_pages + slot).to(tl.int64)
        read_at = (page * BLOCK + token)[:, None] * token_stride + column[None, :]
        write_at = (slot.to(tl.int64) * BLOCK + token)[:, None] * WIDTH + column[None, :]
        inside = (column < WIDTH)[None, :]
        keys = tl.load(k + read_at, mask=inside, other=0.0)
        values = tl.load(v + read_at, mask=inside, other=0.0)
        tl.store(wide_k + write_at, keys.to(wide_k.dtype.element_ty), mask=inside)
        tl.store(wide_v + write_at, values.to(wide_v.dtype.element_ty), mask=inside)
    if OVERLAP:
        gdc_launch_dependents()
