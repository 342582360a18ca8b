"""Attend to the chosen blocks on sm90: plans, attention and merge behind one function.

Three ways, picked by shape on the host and, between the last two, by content on the device:
- few rows (decode): a row's blocks, split over programs (`sm90_attend_rows`);
- tiles of neighbouring rows over the union of their blocks (`sm90_attend_tiles`): extend chunks, larger
  decode batches, and every dense layer;
- page-major (`sm90_attend_pages`): tiles of an extend chunk whose rows have little in common.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_attend_pages import (
    attend_pages,
    count_entries,
    lay_out_pages,
    list_entries,
    merge_pages,
)
from m3_kernels.triton.sm90_attend_rows import ROW, attend_rows
from m3_kernels.triton.sm90_attend_tiles import (
    DENSE,
    UNION,
    attend_tiles,
    merge_splits,
    plan_dense,
    plan_unions,
)
from m3_kernels.triton.sm90_attend_widen import mark_pages, place_pages, widen_pages
from m3_kernels.triton.sm90_common import INTERPRETING, aligned, check_workspace, multiprocessors

TARGET_PROGRAMS = 256
"""About twice the GPU's 132 multiprocessors."""

UNION_FROM_ROWS = 128
"""Below this many rows each goes by itself: finding what they share costs more than it saves."""

ROW_HEADS = 16
"""Most grouped query heads of a row that goes by itself: every warp holds an output for each."""

ROW_BLOCKS = 4
"""A row is split over more than `TARGET_PROGRAMS` / 2 programs in all only while each has so many blocks."""

PAGES_FROM_ROWS = 1024
PAGES_FROM_PROGRAMS = 256
"""From this many rows or union tiles (of all kv heads) on, tiles may be left to the page-major kernels."""

WIDEN_FROM_ROWS = 1024
"""From this many rows on, E4M3 pages are widened to bfloat16 before the union tiles read them."""

PAGE_PARTIAL_BYTES = 1 << 30
"""Most memory for the page-major kernel's partial outputs; longer chunks take several passes."""

LAYOUT_CHUNK = 1024
PAGE_PROGRAMS = 12
"""Programs per multiprocessor of the page-major kernels that walk tiles in turn."""

MERGE_CHUNK = 16
"""Partial outputs of a split walk that the merge loads at a time if there are more."""

MERGE_PROGRAMS = 8
MERGE_REGISTERS = 64
"""The same for the merge: as many as fit, with so many registers per thread."""

PAGE_TILE_M = 64
"""(row, group head) pairs per tile of the page-major kernel."""

PAGE_RESIDENT = 3
PAGE_REGISTERS = 168
"""Programs of the page-major kernel per multiprocessor, and the registers per thread that lets them fit."""
DOT = tl.float32 if INTERPRETING else tl.bfloat16
"""What the matrix products take: the interpreter multiplies bfloat16 wrongly."""

OVERLAP = {} if INTERPRETING else {"launch_pdl": True}


@dataclass(frozen=True)
class Tiling:
    """How a step's rows are cut, from shapes alone.

    Attributes:
        walk: `ROW` of `sm90_attend_rows`, `UNION` or `DENSE` of `sm90_attend_tiles`.
        tile_rows: rows per tile.
        tile_m: (row, padded group head) pairs per tile, the matrix unit's M side.
        splits: programs that share one tile's walk.
        tokens: tokens of a page per step of the walk.
        warps, stages, registers: launch configuration (registers per thread at most; None: no limit).
        pass_rows: rows per pass of the page-major kernel; 0: it is not used.
        longest_union: a tile with more distinct blocks than this is left to the page-major kernel.
    """

    walk: tl.constexpr
    tile_rows: int
    tile_m: int
    splits: int
    tokens: int
    warps: int
    stages: int
    registers: int | None
    pass_rows: int
    longest_union: int


def tiling(row_count: int, q_heads: int, kv_heads: int, head_dim: int, topk: int | None) -> Tiling:
    """The cut for a shape; the figures behind the choices are in docs/results/attention."""
    group = triton.next_power_of_2(q_heads // kv_heads)
    assert group <= 64, "a tile holds at most 64 grouped query heads"
    if topk is not None and row_count < UNION_FROM_ROWS and group <= ROW_HEADS:
        walk, tile_m, rows = ROW, max(16, group), 1
    else:
        walk = DENSE if topk is None else UNION
        tile_m = max(16, min(64, group * triton.next_power_of_2(row_count)))
        rows = min(tile_m // group, 32)
    programs = triton.cdiv(row_count, rows) * kv_heads
    wanted = triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, programs))
    if walk == ROW:
        wanted = min(wanted, max(triton.next_power_of_2(wanted // 2), topk // ROW_BLOCKS))
    splits = 1 if 4 * programs > 3 * TARGET_PROGRAMS else wanted if walk == DENSE else min(16, wanted)
    by_page = walk == UNION and (row_count >= PAGES_FROM_ROWS or programs >= PAGES_FROM_PROGRAMS)
    row_bytes = q_heads * (topk or 0) * head_dim * 2
    tiles = triton.cdiv(row_count, rows)
    return Tiling(
        walk=walk,
        tile_rows=rows,
        tile_m=tile_m,
        splits=1 if by_page else splits,
        tokens=64,
        warps=4,
        stages=3,
        registers=168 if walk == UNION else None,
        pass_rows=min(tiles, max(1, PAGE_PARTIAL_BYTES // (row_bytes * rows))) * rows if by_page else 0,
        longest_union=2 * topk if by_page else rows * (topk or 0),
    )


class _Parts:
    """Hands out typed parts of a workspace, or only adds up their sizes when there is none."""

    def __init__(self, workspace: Tensor | None) -> None:
        self.workspace = workspace
        self.size = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor | None:
        begin, size = self.size, count * dtype.itemsize
        self.size += aligned(size)
        return None if self.workspace is None else self.workspace[begin : begin + size].view(dtype)


@dataclass(frozen=True)
class _Scratch:
    """The parts of the workspace; None where the tiling needs no such part."""

    partial: Tensor | None
    partial_lse: Tensor | None
    shared_blocks: Tensor | None
    union_pages: Tensor | None
    union_blocks: Tensor | None
    union_members: Tensor | None
    union_sizes: Tensor | None
    page_counts: Tensor | None
    totals: Tensor | None
    page_used: Tensor | None
    page_slots: Tensor | None
    slot_pages: Tensor | None
    ranks: Tensor | None
    page_tiles: Tensor | None
    page_places: Tensor | None
    page_sizes: Tensor | None
    page_masked: Tensor | None
    entries: Tensor | None
    last_tokens: Tensor | None
    tile_pages: Tensor | None
    tile_ends: Tensor | None
    tile_places: Tensor | None
    places: Tensor | None
    page_partial: Tensor | None
    page_lse: Tensor | None


def _head_tiles(entries: int, tile_entries: int, pages: int) -> int:
    """Most tiles that `entries` entries of a kv head can fill, when tiles of one page hold `tile_entries`."""
    return (entries + (tile_entries - 1) * min(pages, entries)) // tile_entries


def _scratch(
    parts: _Parts,
    cut: Tiling,
    row_count: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    topk: int | None,
    pages: int,
) -> _Scratch:
    i32, f32 = torch.int32, torch.float32
    tiles = triton.cdiv(row_count, cut.tile_rows)
    split = cut.splits > 1
    union = cut.walk == UNION
    listed = tiles * kv_heads * cut.tile_rows * (topk or 0)
    by_page = cut.pass_rows > 0
    head_entries = cut.pass_rows * (topk or 0)
    tile_entries = PAGE_TILE_M // triton.next_power_of_2(q_heads // kv_heads)
    tiled = kv_heads * _head_tiles(head_entries, tile_entries, pages)
    slots = row_count * q_heads * cut.splits
    page_slots = cut.pass_rows * q_heads * (topk or 0)

    def take(wanted: bool, count: int, dtype: torch.dtype) -> Tensor | None:
        return parts.take(count, dtype) if wanted else None

    counts = take(by_page, kv_heads * (pages + 1) + 1, i32)
    return _Scratch(
        partial=take(split, slots * head_dim, f32),
        partial_lse=take(split, slots, f32),
        shared_blocks=take(cut.walk == DENSE, tiles, i32),
        union_pages=take(union, listed, i32),
        union_blocks=take(union, listed, i32),
        union_members=take(union, listed, i32),
        union_sizes=take(union, tiles * kv_heads * 2, i32),
        page_counts=counts,
        totals=None if counts is None else counts[kv_heads * pages :],
        page_used=take(by_page, pages + 1, i32),
        page_slots=take(by_page, pages, i32),
        slot_pages=take(by_page, pages, i32),
        ranks=take(by_page, cut.pass_rows * kv_heads * triton.next_power_of_2(topk or 1), i32),
        page_tiles=take(by_page, kv_heads * pages, i32),
        page_places=take(by_page, kv_heads * pages, i32),
        page_sizes=take(by_page, kv_heads * pages, i32),
        page_masked=take(by_page, kv_heads * pages, i32),
        entries=take(by_page, tiled * tile_entries, i32),
        last_tokens=take(by_page, tiled * tile_entries, i32),
        tile_pages=take(by_page, tiled, i32),
        tile_ends=take(by_page, tiled, i32),
        tile_places=take(by_page, tiled, i32),
        places=take(by_page, kv_heads * head_entries, i32),
        page_partial=take(by_page, page_slots * head_dim, torch.bfloat16),
        page_lse=take(by_page, page_slots, f32),
    )


def attend_blocks_workspace_bytes(
    row_count: int, q_heads: int, kv_heads: int, head_dim: int, *, topk: int | None, pages: int
) -> int:
    """Bytes of workspace for a step of exactly `row_count` rows; `topk` None: dense. Not monotone in
    `row_count`: who reuses one workspace takes the maximum over the row counts that occur."""
    parts = _Parts(None)
    cut = tiling(row_count, q_heads, kv_heads, head_dim, topk)
    _scratch(parts, cut, row_count, q_heads, kv_heads, head_dim, topk, pages)
    return parts.size


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    rows: Rows,
    chosen: Tensor | None,
    *,
    scale: float,
    workspace: Tensor,
    out: Tensor,
) -> Tensor:
    """Exact softmax attention of every row over the visible tokens of its chosen blocks; the contract is the
    reference operator's.

    Args:
        q: `[T, Hq, D]` bfloat16, each row contiguous; D is a power of two from 16 to 128.
        k, v: `[P, 128, Hkv, D]` pages, bfloat16 or float8_e4m3fn, each token contiguous, both strided alike,
            token strides multiples of 16 bytes; P * 128 below 2^31.
        page_table: `[R, B]` int32, last dimension contiguous.
        rows: the query tokens; padded rows give zeros. A NaN or infinity in a token that one row attends to
            may reach others of its tile, of whatever request; in tokens that no row sees anything may be.
        chosen: `[Hkv, T, topk]` int32, last dimension contiguous, or None for every visible block.
        scale: factor on the dot products, positive.
        workspace: `attend_blocks_workspace_bytes` bytes; contents before and after do not matter.
        out: `[T, Hq, D]` bfloat16, each row contiguous, overwritten.

    Returns:
        `out`: float32 accumulation; softmax weights are rounded to bfloat16 before they meet the values, and
        where the page-major kernel runs so are its partial outputs. The same bits on every run. At least one
        launch, no allocation, no host synchronisation, capturable in a CUDA graph. Launches may begin
        before their predecessor ends (programmatic dependent launch), also the first; each waits for it
        before it reads or writes.
    """
    row_count, q_heads, head_dim = q.shape
    pages, block_tokens, kv_heads, _ = k.shape
    topk = None if chosen is None else chosen.shape[-1]
    assert block_tokens == BLOCK_TOKENS and v.shape == k.shape and v.stride() == k.stride()
    assert q_heads % kv_heads == 0 and pages * BLOCK_TOKENS < 1 << 31 and scale > 0
    assert q.stride()[1:] == (head_dim, 1) and out.stride()[1:] == (head_dim, 1) and out.shape == q.shape
    assert k.stride()[2:] == (head_dim, 1) and k.stride(0) == BLOCK_TOKENS * k.stride(1)
    assert page_table.stride(1) == 1 and page_table.dtype == torch.int32 and len(rows) == row_count
    assert chosen is None or (
        chosen.shape[:2] == (kv_heads, row_count) and chosen.stride(2) == 1 and chosen.dtype == torch.int32
    )
    if row_count == 0:
        return out
    cut = tiling(row_count, q_heads, kv_heads, head_dim, topk)
    parts = _Parts(workspace)
    scratch = _scratch(parts, cut, row_count, q_heads, kv_heads, head_dim, topk, pages)
    check_workspace(workspace, parts.size)
    launch(q, k, v, page_table, rows, chosen, scale, cut, scratch, out)
    return out


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    rows: Rows,
    chosen: Tensor | None,
    scale: float,
    cut: Tiling,
    scratch: _Scratch,
    out: Tensor,
) -> None:
    """The launches of `attend_blocks` for a given cut."""
    row_count, q_heads, head_dim = q.shape
    pages, _, kv_heads, _ = k.shape
    group = q_heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    topk = 0 if chosen is None else chosen.shape[-1]
    topk_pad = triton.next_power_of_2(max(topk, 1))
    programs = PAGE_PROGRAMS * multiprocessors(q.device)
    chosen_strides = (0, 0) if chosen is None else (chosen.stride(0), chosen.stride(1))
    tiles = triton.cdiv(row_count, cut.tile_rows)
    log2_scale = scale * math.log2(math.e)
    merge_heads = math.gcd(group, 8 if cut.pass_rows else 4 if cut.splits <= MERGE_CHUNK else 1)

    selection = (chosen, *chosen_strides, page_table, page_table.stride(0), rows.request, rows.position)

    def tokens_by_head(pool: Tensor) -> TensorDescriptor:
        return TensorDescriptor(
            pool,
            [pool.shape[0] * BLOCK_TOKENS, kv_heads * head_dim],
            [pool.stride(1), 1],
            [cut.tokens, head_dim],
        )

    # What the union tiles read: with E4M3 pages a copy of the chosen ones in bfloat16, which lies where the
    # page-major kernel writes afterwards. If there is no room for them all, that kernel takes all tiles.
    tile_k, tile_v, page_slots, used_pages, slots = k, v, None, None, 0
    if k.dtype == torch.float8_e4m3fn and cut.pass_rows and row_count >= WIDEN_FROM_ROWS:
        width = kv_heads * head_dim
        slots = min(pages, scratch.page_partial.numel() // (2 * BLOCK_TOKENS * width))
        wide = scratch.page_partial[: 2 * slots * BLOCK_TOKENS * width]
        tile_k, tile_v = wide.view(2, slots, BLOCK_TOKENS, kv_heads, head_dim).unbind()
        page_slots, used_pages = scratch.page_slots, scratch.page_used[pages:]
        scratch.page_used.zero_()
        mark_pages[(programs,)](
            *selection, scratch.page_used, row_count, KV_HEADS=kv_heads, TOPK=topk, TOPK_PAD=topk_pad,
            TILE_ROWS=cut.tile_rows,
        )  # fmt: skip
        place_pages[(triton.cdiv(pages, LAYOUT_CHUNK),)](
            scratch.page_used, page_slots, scratch.slot_pages, used_pages, pages, slots, CHUNK=LAYOUT_CHUNK,
            **OVERLAP,
        )  # fmt: skip
        width_pad = triton.next_power_of_2(width)
        widen_pages[(programs,)](
            k, v, k.stride(1), scratch.slot_pages, used_pages, tile_k, tile_v, slots, WIDTH=width,
            WIDTH_PAD=width_pad, PARTS=min(BLOCK_TOKENS, triton.cdiv(BLOCK_TOKENS * width_pad, 8192)),
            **OVERLAP,
        )  # fmt: skip
    if cut.walk == DENSE:
        plan_dense[(tiles,)](
            page_table, page_table.stride(0), rows.request, rows.position, scratch.shared_blocks, row_count,
            TILE_ROWS=cut.tile_rows, CHUNK=1024 // cut.tile_rows,
        )  # fmt: skip
    elif cut.walk == UNION:
        tile_slots = cut.tile_rows * topk_pad
        plan_unions[(tiles, kv_heads)](
            *selection, scratch.union_pages, scratch.union_blocks, scratch.union_members,
            scratch.union_sizes, scratch.page_counts, kv_heads * pages if cut.pass_rows else 0, page_slots,
            used_pages, slots, row_count, TOPK=topk, TOPK_PAD=topk_pad, TILE_ROWS=cut.tile_rows,
            COMPARED_ROWS=max(1, min(cut.tile_rows, 256 // tile_slots)), LONGEST_UNION=cut.longest_union,
            num_warps=1 if tile_slots <= 64 else 4,
        )  # fmt: skip
    if cut.walk == ROW:
        span = cut.tokens // cut.warps

        def spans_by_head(pool: Tensor) -> TensorDescriptor:
            return TensorDescriptor(
                pool,
                [pool.shape[0] * BLOCK_TOKENS // span, span, kv_heads * head_dim],
                [span * pool.stride(1), pool.stride(1), 1],
                [cut.warps, span, head_dim],
            )

        attend_rows[(row_count * kv_heads * cut.splits,)](
            q, q.stride(0), spans_by_head(k), spans_by_head(v), *selection, out, out.stride(0),
            scratch.partial, scratch.partial_lse, row_count, log2_scale,
            GROUP=group, TILE_M=cut.tile_m, KV_HEADS=kv_heads, HEAD_DIM=head_dim, TOPK=topk,
            TOPK_PAD=topk_pad, TOKENS=cut.tokens, SPLITS=cut.splits, WARPS=cut.warps, DOT=DOT,
            STAGES=cut.stages, num_warps=cut.warps, **OVERLAP,
        )  # fmt: skip
    else:
        attend_tiles[(tiles * kv_heads * cut.splits,)](
            q, q.stride(0), tokens_by_head(tile_k), tokens_by_head(tile_v), page_table,
            page_table.stride(0), rows.request, rows.position, scratch.union_pages, scratch.union_blocks,
            scratch.union_members, scratch.union_sizes, scratch.shared_blocks, out, out.stride(0),
            scratch.partial, scratch.partial_lse, row_count, tiles, log2_scale,
            GROUP=group, GROUP_PAD=group_pad, KV_HEADS=kv_heads, HEAD_DIM=head_dim, TOPK=topk,
            TILE_ROWS=cut.tile_rows, TILE_M=cut.tile_m, TOKENS=cut.tokens,
            SPLITS=cut.splits, WALK=cut.walk, DOT=DOT, STAGES=cut.stages,
            num_warps=cut.warps, maxnreg=cut.registers, **OVERLAP,
        )  # fmt: skip
    if cut.splits > 1:
        merge_splits[(row_count, q_heads // merge_heads)](
            scratch.partial, scratch.partial_lse, out, out.stride(0), KV_HEADS=kv_heads, GROUP=group,
            HEAD_DIM=head_dim, SPLITS=cut.splits, MERGE_HEADS=merge_heads, CHUNK=MERGE_CHUNK,
            num_warps=2 if cut.splits <= MERGE_CHUNK else 4, **OVERLAP,
        )  # fmt: skip
    if not cut.pass_rows:
        return

    fragments = not INTERPRETING and head_dim >= 64 and group % 2 == 0
    fragments = fragments and q.stride(0) % 8 == 0 and q.data_ptr() % 16 == 0
    tile_entries = PAGE_TILE_M // group_pad
    head_tiles = _head_tiles(cut.pass_rows * topk, tile_entries, pages)
    for row_begin in range(0, row_count, cut.pass_rows):
        tile_begin = row_begin // cut.tile_rows
        tile_end = min(tile_begin + cut.pass_rows // cut.tile_rows, tiles)
        count_entries[(programs,)](
            *selection, scratch.union_sizes, scratch.page_counts, scratch.ranks, scratch.totals, tile_begin,
            tile_end, row_count, pages, KV_HEADS=kv_heads, TOPK=topk, TOPK_PAD=topk_pad,
            TILE_ROWS=cut.tile_rows, **OVERLAP,
        )  # fmt: skip
        lay_out_pages[(triton.cdiv(pages, LAYOUT_CHUNK), kv_heads)](
            scratch.page_counts, scratch.page_tiles, scratch.page_places, scratch.page_sizes,
            scratch.page_masked, scratch.totals, pages, TILE_ENTRIES=tile_entries, CHUNK=LAYOUT_CHUNK,
            **OVERLAP,
        )  # fmt: skip
        list_entries[(programs,)](
            *selection, scratch.union_sizes, scratch.ranks, scratch.page_tiles, scratch.page_places,
            scratch.page_sizes, scratch.page_masked, scratch.entries, scratch.last_tokens,
            scratch.tile_pages, scratch.tile_ends, scratch.tile_places, scratch.places, tile_begin, tile_end,
            row_count, pages, head_tiles, KV_HEADS=kv_heads, TOPK=topk, TOPK_PAD=topk_pad,
            TILE_ROWS=cut.tile_rows, TILE_ENTRIES=tile_entries, **OVERLAP,
        )  # fmt: skip
        attend_pages[(PAGE_RESIDENT * multiprocessors(q.device),)](
            q, q.stride(0), k, v, k.stride(1), scratch.entries, scratch.last_tokens, scratch.tile_pages,
            scratch.tile_ends, scratch.tile_places, scratch.page_masked, scratch.totals, scratch.page_partial,
            scratch.page_lse, row_begin, pages, head_tiles, log2_scale, GROUP=group, GROUP_PAD=group_pad,
            KV_HEADS=kv_heads, HEAD_DIM=head_dim, TILE_M=PAGE_TILE_M, DOT=DOT,
            FRAGMENTS=fragments, num_warps=4, maxnreg=PAGE_REGISTERS, **OVERLAP,
        )  # fmt: skip
        merge_pages[(MERGE_PROGRAMS * multiprocessors(q.device),)](
            scratch.page_partial, scratch.page_lse, scratch.places, scratch.union_sizes, scratch.totals, out,
            out.stride(0), row_begin, min(row_begin + cut.pass_rows, row_count), GROUP=group,
            KV_HEADS=kv_heads, HEAD_DIM=head_dim, TOPK=topk, TILE_ROWS=cut.tile_rows, MERGE_HEADS=merge_heads,
            num_warps=4, maxnreg=MERGE_REGISTERS, **OVERLAP,
        )  # fmt: skip
