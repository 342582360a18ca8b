"""Choose the best blocks of every row on sm90: one program per (row, head), exact whatever the ties.

Scores become integers of the same order. A bisection over the integers finds the topk-th largest, ending as
soon as a bound separates exactly topk blocks; a second one, over ids, settles ties on the bound. Ranks from a
running count put the chosen ids in order.

A lane holds a few neighbouring blocks in each of several rounds over the row, `[lanes, rounds, neighbours]`,
so that all but one step of every count stays within a lane, and the counts of all rounds fit one integer.

A wide row is chosen from twice: first the topk groups of neighbouring blocks whose maxima are largest, then
the topk blocks of those. None of the best blocks is in another group: topk groups come before that one, by
their maximum or, of equal ones, by their place, and the best block of each comes before its best.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from m3_kernels.reference.select_blocks import check_selection
from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_common import INTERPRETING, early_launch

MOST_CHOSEN = 255
"""Blocks of a row that can be chosen: the kernel counts them in eight bits."""

MAX_BLOCKS = 1 << 15
"""Blocks of a row for which the kernel is compiled: 4 million tokens."""

WIDEST_DIRECT = 1024
"""Blocks that are chosen from at once: one warp's registers hold them. A wider row takes groups first."""

GROUPS, WARPS = 512, 4
"""Groups that a wide row is divided into, and warps for it."""


def select_blocks(
    scores: Tensor, rows: Rows, *, topk: int, init_blocks: int, local_blocks: int, out: Tensor
) -> Tensor:
    """Choose the `topk` best visible blocks of every row and head; the contract is the reference operator's.

    Args:
        scores: `[H, T, B]` float32, last dimension contiguous, B at most `MAX_BLOCKS`; entries past a row's
            own block do not matter.
        rows: the query tokens; a padded row chooses nothing (-1 everywhere).
        topk, init_blocks, local_blocks: how many blocks to choose, and which always.
        out: `[H, T, topk]` int32, last dimension contiguous, overwritten: ascending ids, then -1. Of equal
            scores the lower id wins; NaN counts as lower than every number.

    Returns:
        `out`. One launch, no allocation, no host synchronisation, capturable in a CUDA graph.

    Raises:
        ValueError: the forced blocks do not fit into `topk`, or `topk` is above `MOST_CHOSEN`.
    """
    check_selection(topk, init_blocks, local_blocks)
    launch_selection(
        scores,
        scores.stride(1),
        scores.stride(0),
        rows,
        rows.request,
        0,
        len(rows),
        scores.shape[-1],
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        out=out,
    )
    return out


def launch_selection(
    scores: Tensor,
    row_stride: int,
    head_stride: int,
    rows: Rows,
    row_order: Tensor,
    place_begin: int,
    place_end: int,
    table_blocks: int,
    *,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Tensor,
    by_place: bool = False,
    early: bool = False,
) -> None:
    """Select for the rows at places `place_begin .. place_end - 1` of `row_order`, or with those numbers.

    Args:
        scores: float32 as `launch_scores` writes them, with the same strides, places and `by_place`.
        early: the launch before this one on the stream is an early `launch_scores`. It lets this one be set
            up when all else has ended, so only the scores themselves need waiting for.
    """
    if topk > MOST_CHOSEN:
        raise ValueError(f"the sm90 kernel chooses at most {MOST_CHOSEN} blocks of a row, not topk {topk}")
    assert scores.dtype == torch.float32 and table_blocks <= MAX_BLOCKS
    assert out.dtype == torch.int32 and out.stride(2) == 1
    # Vectors of four scores, where a row may be read up to a multiple of four.
    vector = 4 if (row_stride % 4, head_stride % 4, scores.data_ptr() % 16) == (0, 0, 0) else 1
    narrow, middle, wide, warps = pick_widths(table_blocks, topk)
    _select_kernel[(place_end - place_begin, out.shape[0])](
        scores,
        rows.request,
        rows.position,
        row_order,
        out,
        row_stride,
        head_stride,
        out.stride(1),
        out.stride(0),
        place_begin,
        BLOCK_TOKENS=BLOCK_TOKENS,
        TOPK=topk,
        INIT_BLOCKS=init_blocks,
        LOCAL_BLOCKS=local_blocks,
        SLOTS=triton.next_power_of_2(topk),
        NARROW=narrow,
        MIDDLE=middle,
        WIDE=wide,
        VECTOR=vector,
        BY_PLACE=by_place,
        EARLY=early and not INTERPRETING,
        LANES=min(32 * warps, narrow),
        DIRECT=WIDEST_DIRECT,
        GROUPS=GROUPS,
        num_warps=warps,
        **early_launch(early),
    )


def pick_widths(table_blocks: int, topk: int) -> tuple[int, int, int, int]:
    """(narrow, middle, wide, warps): widths in blocks that rows are handled at, and warps per (row, head).

    A row takes the least width that holds it, so that a wide page table slows short requests little. Measured
    on an H200: one warp is fastest while its registers hold a row; for wider ones 4 warps are as fast as 8 in
    a decode step, and faster with many rows.
    """
    wide = triton.next_power_of_2(max(16, topk, table_blocks))
    if wide <= WIDEST_DIRECT:
        return min(wide, 512), wide, wide, 1
    return WIDEST_DIRECT, min(wide, 4096), wide, WARPS


@triton.jit(
    do_not_specialize=["place_begin", "out_row_stride", "out_head_stride"],
    do_not_specialize_on_alignment=["request_ptr", "position_ptr", "row_order_ptr"],
)
def _select_kernel(
    scores_ptr,
    request_ptr,
    position_ptr,
    row_order_ptr,
    out_ptr,
    row_stride,
    head_stride,
    out_row_stride,
    out_head_stride,
    place_begin,
    BLOCK_TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    INIT_BLOCKS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    NARROW: tl.constexpr,
    MIDDLE: tl.constexpr,
    WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BY_PLACE: tl.constexpr,
    EARLY: tl.constexpr,
    LANES: tl.constexpr,
    DIRECT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    number = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(row_order_ptr + place_begin + number) if BY_PLACE else place_begin + number
    own = tl.load(position_ptr + row) // BLOCK_TOKENS
    if tl.load(request_ptr + row) < 0:
        own = -1
    slot = number if BY_PLACE else row
    scores_ptr += head * head_stride + slot.to(tl.int64) * row_stride
    out_ptr += head * out_head_stride + row.to(tl.int64) * out_row_stride
    place = tl.arange(0, SLOTS)
    tl.store(out_ptr + place, -1, mask=(place > own) & (place < TOPK))
    if own < TOPK:
        tl.store(out_ptr + place, place, mask=(place <= own) & (place < TOPK))
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    if own >= TOPK:
        if own < NARROW:
            _select_row(scores_ptr, out_ptr, own, TOPK, INIT_BLOCKS, LOCAL_BLOCKS, NARROW, VECTOR, LANES)
        elif WIDE > NARROW and WIDE <= DIRECT:
            _select_row(scores_ptr, out_ptr, own, TOPK, INIT_BLOCKS, LOCAL_BLOCKS, WIDE, VECTOR, LANES)
        elif MIDDLE > NARROW and own < MIDDLE:
            _select_wide_row(
                scores_ptr,
                out_ptr,
                own,
                TOPK,
                INIT_BLOCKS,
                LOCAL_BLOCKS,
                SLOTS,
                MIDDLE,
                VECTOR,
                LANES,
                GROUPS,
            )
        elif WIDE > MIDDLE:
            _select_wide_row(
                scores_ptr, out_ptr, own, TOPK, INIT_BLOCKS, LOCAL_BLOCKS, SLOTS, WIDE, VECTOR, LANES, GROUPS
            )


@triton.jit
def _select_row(
    scores_ptr,
    out_ptr,
    own,
    TOPK: tl.constexpr,
    INIT_BLOCKS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the TOPK chosen of the blocks 0 .. own, of which there are more than TOPK and at most WIDTH."""
    FORCED: tl.constexpr = 2147483647
    INVISIBLE: tl.constexpr = -2147483648
    ROUNDS: tl.constexpr = min(8, max(1, WIDTH // (LANES * 4)))
    NEIGHBOURS: tl.constexpr = WIDTH // (LANES * ROUNDS)
    lane = tl.arange(0, LANES)[:, None, None]
    turn = tl.arange(0, ROUNDS)[None, :, None]
    block = (turn * LANES + lane) * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, None, :]
    visible = block <= own
    score = tl.load(scores_ptr + block, mask=block < (own // VECTOR + 1) * VECTOR, other=0.0)
    key = tl.where(visible, _key(score), INVISIBLE)
    # At least TOPK keys reach `low`: every lane has one. Fewer exceed `high`: the forced ones at most, whose
    # own scores would only widen the search.
    high = FORCED
    if INIT_BLOCKS + LOCAL_BLOCKS < TOPK:
        high = tl.max(tl.max(tl.max(key, 2), 1))
    if INIT_BLOCKS > 0:
        key = tl.where(block < INIT_BLOCKS, FORCED, key)
    key = tl.where(visible & (block > own - LOCAL_BLOCKS), FORCED, key)
    low = INVISIBLE
    if TOPK <= LANES:
        low = tl.min(tl.max(tl.max(key, 2), 1))
    _write_largest(
        key, block, out_ptr, low, high, TOPK, WIDTH - 1, WIDTH, ROUNDS, NEIGHBOURS, False, LANES > 32
    )


@triton.jit
def _select_wide_row(
    scores_ptr,
    out_ptr,
    own,
    TOPK: tl.constexpr,
    INIT_BLOCKS: tl.constexpr,
    LOCAL_BLOCKS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """`_select_row` by way of the chosen groups, whose numbers are in the row's output meanwhile."""
    FORCED: tl.constexpr = 2147483647
    INVISIBLE: tl.constexpr = -2147483648
    SIZE: tl.constexpr = WIDTH // GROUPS
    TURNS: tl.constexpr = GROUPS // LANES
    lane = tl.arange(0, LANES)[:, None]
    group = tl.arange(0, TURNS)[None, :] * LANES + lane
    first = group * SIZE
    # All loads of a lane in one tensor, so that they are in flight together.
    within = tl.arange(0, SIZE // 4)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    block = first[:, :, None, None] + within
    score = tl.load(scores_ptr + block, mask=block < (own // VECTOR + 1) * VECTOR, other=float("nan"))
    # The maximum passes over NaN unless there is nothing else.
    best = tl.max(tl.max(tl.where(block <= own, score, float("nan")), 3), 2)
    key = tl.where(first <= own, _key(best), INVISIBLE)
    high = FORCED
    if INIT_BLOCKS + LOCAL_BLOCKS < TOPK:
        high = tl.max(tl.max(key, 1))
    if INIT_BLOCKS > 0:
        key = tl.where(first < INIT_BLOCKS, FORCED, key)
    if LOCAL_BLOCKS > 0:
        # The group's last visible block is one of the row's last.
        key = tl.where((first <= own) & (first + SIZE > own - LOCAL_BLOCKS + 1), FORCED, key)
    low = INVISIBLE
    if TOPK <= LANES:
        low = tl.min(tl.max(key, 1))
    key, group = key[:, :, None], group[:, :, None]
    low = _write_largest(
        key, group, out_ptr, low, high, TOPK, GROUPS - 1, GROUPS, TURNS, 1, False, LANES > 32
    )
    tl.debug_barrier()

    # At least TOPK blocks of the chosen groups reach `low` again: the best of each.
    CANDIDATES: tl.constexpr = SLOTS * SIZE
    HOLDERS: tl.constexpr = min(LANES, CANDIDATES)
    ROUNDS: tl.constexpr = min(8, max(1, CANDIDATES // (HOLDERS * 4)))
    NEIGHBOURS: tl.constexpr = CANDIDATES // (HOLDERS * ROUNDS)
    holder = tl.arange(0, HOLDERS)[:, None, None]
    turn = tl.arange(0, ROUNDS)[None, :, None]
    candidate = (turn * HOLDERS + holder) * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, None, :]
    real = candidate < TOPK * SIZE
    block = tl.load(out_ptr + candidate // SIZE, mask=real, other=0) * SIZE + candidate % SIZE
    visible = real & (block <= own)
    score = tl.load(scores_ptr + block, mask=visible, other=0.0)
    # The groups have been read: their places are for the blocks now.
    tl.debug_barrier()
    key = tl.where(visible, _key(score), INVISIBLE)
    if INIT_BLOCKS > 0:
        key = tl.where(visible & (block < INIT_BLOCKS), FORCED, key)
    key = tl.where(visible & (block > own - LOCAL_BLOCKS), FORCED, key)
    _write_largest(
        key, block, out_ptr, low, high, TOPK, WIDTH - 1, CANDIDATES, ROUNDS, NEIGHBOURS, True, LANES > 32
    )


@triton.jit
def _key(score):
    """An integer of the same order: NaN lower than -inf, and above an invisible block's."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # the sum makes -0.0 equal to 0.0
    return tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2139095042)


@triton.jit
def _mean(low, high):
    """The mean of two integers, rounded up: their sum may overflow, their mean not."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _write_largest(
    key,
    number,
    out_ptr,
    low,
    high,
    TOPK: tl.constexpr,
    LARGEST: tl.constexpr,
    COUNT: tl.constexpr,
    ROUNDS: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    NEAR_LOW: tl.constexpr,
    SEVERAL_WARPS: tl.constexpr,
):
    """Write the ascending numbers of the TOPK largest of COUNT keys, of equal ones those of least number.

    Args:
        key, number: `[lanes, ROUNDS, NEIGHBOURS]`; numbers ascend with round, lane and neighbour, and are at
            most LARGEST.
        low: at least TOPK keys reach it.
        high: fewer than TOPK exceed it.
        NEAR_LOW: the bound is probably close to `low`.
        SEVERAL_WARPS: hold the keys.

    Returns:
        The bound that was found; at least TOPK keys reach it.
    """
    # A round's count in its own bits of an integer: at most TOPK are chosen in all.
    COUNT_BITS: tl.constexpr = 8
    tl.static_assert(TOPK < 1 << COUNT_BITS and COUNT < 1 << 15)
    at_low = COUNT
    while low < high:
        upper = _mean(low, high)
        if NEAR_LOW:
            upper = _mean(low, upper)
        if SEVERAL_WARPS:
            # Counting takes a warp less time than waiting for the others: two counts at a time.
            lower = _mean(low, upper)
            if NEAR_LOW:
                lower = _mean(low, lower)
            both = tl.sum((key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16))
            many = both & 0xFFFF
            few = both >> 16
        else:
            lower = upper
            few = tl.sum((key >= upper).to(tl.int32))
            many = few
        at_low = tl.where(few >= TOPK, few, tl.where(many >= TOPK, many, at_low))
        above = tl.where(many == TOPK, lower, tl.where(many > TOPK, upper - 1, lower - 1))
        high = tl.where(few > TOPK, high, tl.where(few == TOPK, upper, above))
        low = tl.where(few >= TOPK, upper, tl.where(many >= TOPK, lower, low))

    # Those on the bound count up to this number; a second bisection finds it where not all of them fit.
    last = LARGEST
    if at_low > TOPK:
        first = 0
        while first < last:
            middle = (first + last) // 2
            reach = tl.sum(((key > low) | ((key == low) & (number <= middle))).to(tl.int32))
            last = tl.where(reach >= TOPK, middle, last)
            first = tl.where(reach >= TOPK, first, middle + 1)
    chosen = ((key > low) | ((key == low) & (number <= last))).to(tl.int32)

    # A rank: the chosen of earlier rounds, of this round's earlier lanes, and earlier in the lane.
    COUNTS: tl.constexpr = tl.int32 if ROUNDS * COUNT_BITS <= 32 else tl.int64
    place = tl.arange(0, ROUNDS)[None, :] * COUNT_BITS
    counts = tl.sum(tl.sum(chosen, 2).to(COUNTS) << place, 1)
    earlier = tl.sum(counts)
    earlier += earlier << COUNT_BITS
    earlier += earlier << 2 * COUNT_BITS
    if ROUNDS > 4:
        earlier += earlier << 4 * COUNT_BITS
    earlier = (earlier << COUNT_BITS) + tl.cumsum(counts, 0) - counts
    rank = ((earlier[:, None] >> place) & ((1 << COUNT_BITS) - 1)).to(tl.int32)[:, :, None]
    if NEIGHBOURS > 1:
        rank += tl.cumsum(chosen, 2) - chosen
    tl.store(out_ptr + rank, number, mask=chosen != 0)
    return low
