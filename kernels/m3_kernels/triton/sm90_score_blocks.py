"""Score visible blocks for rows on sm90, every index page read once for all the rows that need it.

The plan's spans are cut into units of work: one page for one tile of columns, a column being one (row, index
head) pair. A fixed number of programs share the units evenly, each an unbroken run of them, so consecutive
units mostly differ in the page alone: the tile's queries stay on the chip and the pages stream past.

One arithmetic serves every phase: queries are the matrix unit's M side, in tiles of 64 or a multiple, a
page's keys its N side, and the whole head dimension is one product, so each element is the same sum of
products over 16 dimensions, whatever the tile.

In a decode step a program has a page or two, and what precedes them is a chain of dependent loads: spans,
page number, rows. An early launch walks that chain while its predecessor still runs, and reads index queries
and keys only when that has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_common import INTERPRETING, early_launch, multiprocessors


def score_blocks(
    index_q: Tensor, index_k: Tensor, page_table: Tensor, rows: Rows, plan: PrefixPlan, *, out: Tensor
) -> Tensor:
    """Score of a block for a row; the contract is the reference operator's.

    Args:
        index_q: `[T, H, D]` bfloat16, last dimension contiguous; D is a power of two, at least 16.
        index_k: `[P, 128, 1, D]` pages, bfloat16 or float8_e4m3fn, each page contiguous.
        page_table: `[R, B]` int32, last dimension contiguous.
        rows: the query tokens; padded rows get -inf everywhere.
        plan: `plan_prefix` of the same table and rows.
        out: `[H, T, B]` float32, last dimension contiguous, overwritten.

    Returns:
        `out`. The bits of an entry depend on its own query, keys and position alone. Two launches, no
        allocation, no host synchronisation, capturable in a CUDA graph.
    """
    out.fill_(float("-inf"))
    launch_scores(index_q, index_k, page_table, rows, plan, out, out.stride(1), out.stride(0), 0, len(rows))
    return out


def launch_scores(
    index_q: Tensor,
    index_k: Tensor,
    page_table: Tensor,
    rows: Rows,
    plan: PrefixPlan,
    out: Tensor,
    row_stride: int,
    head_stride: int,
    place_begin: int,
    place_end: int,
    *,
    by_place: bool = False,
    skip_topk: int = 0,
) -> ScoreLaunch:
    """Write the scores of the rows at places `place_begin .. place_end - 1` of the order, for visible blocks.

    Args:
        out: float32; the score of block b for head h goes to element `h * head_stride + i * row_stride + b`,
            where i is the row's number, or with `by_place` its place less `place_begin`. Nothing else is
            written.
        skip_topk: tiles whose rows all see at most so many blocks are left out: all their blocks are chosen.

    Returns:
        How it was launched. An early launch reads the page table, the rows and the plan while the launch
        before it on the stream may still run: these must be older than that one, and with `plan_prefix` are.
    """
    _, heads, head_dim = index_q.shape
    assert index_q.dtype == torch.bfloat16 and index_q.stride(2) == 1
    assert index_k.dtype in (torch.bfloat16, torch.float8_e4m3fn)
    assert index_k.shape[1:] == (BLOCK_TOKENS, 1, head_dim) and index_k[0].is_contiguous()
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1 and out.dtype == torch.float32
    assert head_dim >= 16 and head_dim & (head_dim - 1) == 0
    launch = pick_launch(len(rows), page_table.shape[0], heads, page_table.shape[1])
    spans = plan.first_block.shape[0]
    _score_kernel[(launch.programs_per_multiprocessor * multiprocessors(index_q.device),)](
        index_q,
        index_k,
        page_table,
        rows.position,
        plan.row_order,
        plan.first_block,
        plan.block_count,
        plan.row_start,
        plan.row_count,
        plan.page_request,
        out,
        index_q.stride(0),
        index_q.stride(1),
        index_k.stride(0),
        page_table.stride(0),
        row_stride,
        head_stride,
        place_begin,
        place_end,
        spans,
        launch.span_cost,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=BLOCK_TOKENS,
        COLUMNS=launch.columns,
        KEYS=launch.keys,
        BLOCKS_PER_STORE=launch.blocks_per_store,
        SPANS=padded_spans(page_table.shape[0]),
        STAGES=launch.stages,
        BY_PLACE=by_place,
        SKIP_TOPK=skip_topk,
        EARLY=launch.early and not INTERPRETING,
        INTERPRETED=INTERPRETING,
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
        **early_launch(launch.early),
    )
    return launch


SMALL_TILE_COLUMNS = 64
"""(row, index head) pairs per tile, as long as there are no more than so many for each request."""

COLUMN_CLASSES = (8, 64, 256, 1024)
"""Numbers of pairs up to which `pick_launch` launches otherwise than above them."""


def padded_spans(request_count: int) -> int:
    """Spans of a plan for so many requests, used or not, and padding: what the kernel is compiled for."""
    return max(16, triton.next_power_of_2(2 * request_count - 1))


@dataclass(frozen=True)
class ScoreLaunch:
    """How the score kernel runs: never what it computes.

    Attributes:
        columns: (row, index head) pairs per tile, a multiple of 64.
        programs_per_multiprocessor: programs resident at once.
        warps: per program; a warp group of four takes 64 columns at a time.
        stages: loads in flight per program.
        registers: per thread, so that the programs fit.
        early: whether this launch and the selection after it are set up while their predecessors run.
        span_cost: pages that starting on another span counts as when work is shared out.
        keys: of a page that are loaded and multiplied at a time.
        blocks_per_store: scores of a row that are kept until their sector of the cache is full.
    """

    columns: int
    programs_per_multiprocessor: int
    warps: int
    stages: int
    registers: int
    early: bool = False
    span_cost: int = 0
    keys: int = BLOCK_TOKENS
    blocks_per_store: int = 1


def pick_launch(row_count: int, request_count: int, heads: int, table_blocks: int) -> ScoreLaunch:
    """The launch for a step's rows and page table, whatever its passes, by what an H200 was fastest with.

    Few columns for each request: small tiles, since a private tail fills no large one. Up to 256 in all the
    launches are early; with thousands an early selection measured slower. A program has few pages then, and
    three programs with half pages read them sooner than two with whole ones. For a single request, and for
    few rows, four programs with fewer loads in flight each are sooner still, but slower once the context is
    a million tokens. More columns: large tiles, since the L2 cache, and with long contexts memory, is read
    once per tile.

    Starting on another span or tile counts as two or three pages where a span takes several tiles: programs
    that walk one tail after the other would come last.
    """
    columns = row_count * heads
    if columns > SMALL_TILE_COLUMNS * request_count:
        return ScoreLaunch(256, 1, warps=16, stages=3, registers=128, span_cost=3, blocks_per_store=8)
    if columns > 1024:
        return ScoreLaunch(64, 2, warps=4, stages=3, registers=255, span_cost=2)
    if columns > 256:
        return ScoreLaunch(64, 3, warps=4, stages=3, registers=168, span_cost=2, keys=64)
    if (request_count == 1 or columns <= 8) and table_blocks <= 1024:
        registers = 128 if request_count == 1 else 120
        return ScoreLaunch(64, 4, warps=4, stages=2, registers=registers, early=True, keys=64)
    cost = 0 if columns <= 64 else 2 if request_count <= 128 else 3
    return ScoreLaunch(64, 3, warps=4, stages=3, registers=168, early=True, span_cost=cost, keys=64)


@triton.jit(
    do_not_specialize=[
        "place_begin",
        "place_end",
        "span_count",
        "span_cost",
        "table_stride",
        "row_stride",
        "head_stride",
    ],
    do_not_specialize_on_alignment=["table_ptr", "position_ptr"],
)
def _score_kernel(
    q_ptr,
    k_ptr,
    table_ptr,
    position_ptr,
    row_order_ptr,
    first_block_ptr,
    block_count_ptr,
    row_start_ptr,
    row_count_ptr,
    page_request_ptr,
    out_ptr,
    q_row_stride,
    q_head_stride,
    page_stride,
    table_stride,
    row_stride,
    head_stride,
    place_begin,
    place_end,
    span_count,
    span_cost,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCKS_PER_STORE: tl.constexpr,
    SPANS: tl.constexpr,
    STAGES: tl.constexpr,
    BY_PLACE: tl.constexpr,
    SKIP_TOPK: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    span = tl.arange(0, SPANS)
    known = span < span_count
    run_begin = tl.load(row_start_ptr + span, mask=known, other=0)
    run_end = run_begin + tl.load(row_count_ptr + span, mask=known, other=0)
    span_blocks = tl.load(block_count_ptr + span, mask=known, other=0)
    # Never negative: these two only bring into the L1 cache what is read below.
    used = tl.load(first_block_ptr + span, mask=known, other=0) >= 0
    used &= tl.load(page_request_ptr + span, mask=known, other=0) >= 0
    run_rows = tl.maximum(tl.minimum(run_end, place_end) - tl.maximum(run_begin, place_begin), 0)
    # Each tile of a span begins with `span_cost` units that hold no page.
    units = tl.where(used, tl.cdiv(run_rows * HEADS, COLUMNS) * (span_cost + span_blocks), 0)
    units_through = tl.cumsum(units, 0)
    unit_total = tl.sum(units)

    program = tl.program_id(0)
    share = unit_total // tl.num_programs(0)
    left_over = unit_total % tl.num_programs(0)
    unit = program * share + tl.minimum(program, left_over)
    unit_end = unit + share + (program < left_over).to(tl.int32)

    column_in_tile = tl.arange(0, COLUMNS)
    dim = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, KEYS)
    key_offsets = key[:, None] * HEAD_DIM + dim[None, :]
    among = tl.arange(0, BLOCKS_PER_STORE)
    while unit < unit_end:
        passed = units_through <= unit
        here = tl.sum(passed.to(tl.int32))
        unit_in_span = unit - tl.max(tl.where(passed, units_through, 0))
        first_block = tl.load(first_block_ptr + here)
        block_count = tl.load(block_count_ptr + here)
        row_start = tl.load(row_start_ptr + here)
        row_end = tl.minimum(row_start + tl.load(row_count_ptr + here), place_end)
        row_start = tl.maximum(row_start, place_begin)
        pages = table_ptr + tl.load(page_request_ptr + here).to(tl.int64) * table_stride

        tile_units = span_cost + block_count
        tile = unit_in_span // tile_units
        unit_in_tile = unit_in_span % tile_units
        step = tl.minimum(tile_units - unit_in_tile, unit_end - unit)
        unit += step
        block = first_block + tl.maximum(unit_in_tile - span_cost, 0)
        block_end = first_block + tl.maximum(unit_in_tile + step - span_cost, 0)
        page = tl.load(pages + block)

        column = tile * COLUMNS + column_in_tile
        place = row_start + column // HEADS
        head = column % HEADS
        real = place < row_end
        row = tl.load(row_order_ptr + place, mask=real, other=0)
        position = tl.load(position_ptr + row, mask=real, other=-1)
        q_rows = q_ptr + row.to(tl.int64) * q_row_stride + head * q_head_stride
        slot = place - place_begin if BY_PLACE else row
        out_rows = out_ptr + head.to(tl.int64) * head_stride + slot.to(tl.int64) * row_stride

        own_block = tl.where(real, position // BLOCK_TOKENS, -1)
        last_block = tl.max(own_block)
        block_end = tl.minimum(block_end, last_block + 1)
        if last_block < SKIP_TOPK:
            block_end = block
        # Blocks before this one need no causal mask.
        first_masked = (tl.min(tl.where(real, position, 2147483647 - BLOCK_TOKENS)) + 1) // BLOCK_TOKENS
        if EARLY:
            # Queries and keys may be the predecessor's work. Once it has ended, the successor (the selection)
            # may be set up in turn.
            gdc_wait()
            gdc_launch_dependents()
        q = tl.load(q_rows[:, None] + dim[None, :], mask=real[:, None], other=0.0)
        PARTS: tl.constexpr = BLOCK_TOKENS // KEYS
        so_far = tl.full([COLUMNS], float("-inf"), tl.float32)
        kept = tl.full([COLUMNS, BLOCKS_PER_STORE], float("-inf"), tl.float32)
        for step in tl.range(block * PARTS, block_end * PARTS, num_stages=STAGES):
            b = step // PARTS
            part = step % PARTS
            k = tl.load(k_ptr + page.to(tl.int64) * page_stride + part * (KEYS * HEAD_DIM) + key_offsets)
            page = tl.load(pages + (step + 1) // PARTS, mask=step + 1 < block_end * PARTS, other=0)
            if INTERPRETED:
                products = tl.dot(q.to(tl.float32), k.to(tl.float32).T, input_precision="ieee")
            else:
                products = tl.dot(q, k.to(tl.bfloat16).T)
            if b >= first_masked:
                visible = key[None, :] <= (position - step * KEYS)[:, None]
                products = tl.where(visible, products, float("-inf"))
            # The maximum passes over NaN unless there is nothing else.
            best = tl.max(products, 1)
            best = tl.where(best == best, best, float("-inf"))
            if PARTS > 1:
                best = tl.maximum(best, so_far)
                so_far = tl.where(part == PARTS - 1, float("-inf"), best)
            if BLOCKS_PER_STORE > 1:
                kept = tl.where((among == b % BLOCKS_PER_STORE)[None, :], best[:, None], kept)
                if (b % BLOCKS_PER_STORE == BLOCKS_PER_STORE - 1) | (b + 1 == block_end):
                    done = b // BLOCKS_PER_STORE * BLOCKS_PER_STORE + among
                    own = ((done >= block) & (done <= b))[None, :] & (done[None, :] <= own_block[:, None])
                    tl.store(out_rows[:, None] + done[None, :], kept, mask=own)
            elif part == PARTS - 1:
                tl.store(out_rows + b, best, mask=b <= own_block)
    if EARLY:
        # Also a program without work ends after the predecessor, so that the selection can count on its end.
        gdc_wait()
