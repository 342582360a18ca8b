"""Choose the best blocks of every row on sm90: one program per (row, head), exact whatever the ties.

Scores become integers of the same order. A bisection over the integers finds the topk-th largest, ending as
soon as a bound separates exactly topk blocks; a second one, over ids, settles ties on the bound. Ranks from a
running count put the chosen ids in order.

A lane holds a few neighbouring blocks in each of several rounds over the row, `[lanes, rounds, neighbours]`,
so that all but one step of every count stays within a lane, and the counts of all rounds fit one integer.
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
"""Blocks of a row that a program's registers can hold: 4 million tokens."""


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
        num_warps=warps,
        **early_launch(early),
    )


def pick_widths(table_blocks: int, topk: int) -> tuple[int, int, int, int]:
    """(narrow, middle, wide, warps): widths in blocks that rows are handled at, and warps per (row, head).

    A row takes the least width that holds it: a wide page table does not slow short requests. Measured on an
    H200: one warp is fastest until its registers no longer hold a row.
    """
    wide = triton.next_power_of_2(max(16, topk, table_blocks))
    if wide <= 1024:
        return min(wide, 512), wide, wide, 1
    return 1024, min(wide, 4096), wide, min(16, max(4, wide // 2048))


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
        elif MIDDLE > NARROW and own < MIDDLE:
            _select_row(scores_ptr, out_ptr, own, TOPK, INIT_BLOCKS, LOCAL_BLOCKS, MIDDLE, VECTOR, LANES)
        elif WIDE > MIDDLE:
            _select_row(scores_ptr, out_ptr, own, TOPK, INIT_BLOCKS, LOCAL_BLOCKS, WIDE, VECTOR, LANES)


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
    # Below the integer of -inf, above that of an invisible block.
    NAN: tl.constexpr = -2139095042
    INVISIBLE: tl.constexpr = -2147483648
    ROUNDS: tl.constexpr = min(8, max(1, WIDTH // (LANES * 4)))
    NEIGHBOURS: tl.constexpr = WIDTH // (LANES * ROUNDS)
    # A round's count in its own bits of an integer: at most TOPK blocks are chosen in all.
    COUNT_BITS: tl.constexpr = 8
    tl.static_assert(TOPK < 1 << COUNT_BITS)
    lane = tl.arange(0, LANES)[:, None, None]
    turn = tl.arange(0, ROUNDS)[None, :, None]
    block = (turn * LANES + lane) * NEIGHBOURS + tl.arange(0, NEIGHBOURS)[None, None, :]
    visible = block <= own
    score = tl.load(scores_ptr + block, mask=block < (own // VECTOR + 1) * VECTOR, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # the sum makes -0.0 equal to 0.0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(score == score, key, NAN)
    key = tl.where(visible, key, INVISIBLE)

    # At least TOPK keys reach `low`: every lane has one. Fewer exceed `high`: the forced ones at most, whose
    # own scores would only widen the search. The sum of the two may overflow, their mean not.
    high = FORCED
    if INIT_BLOCKS + LOCAL_BLOCKS < TOPK:
        high = tl.max(tl.max(tl.max(key, 2), 1))
    if INIT_BLOCKS > 0:
        key = tl.where(block < INIT_BLOCKS, FORCED, key)
    key = tl.where(visible & (block > own - LOCAL_BLOCKS), FORCED, key)
    low = INVISIBLE
    if TOPK <= LANES:
        low = tl.min(tl.max(tl.max(key, 2), 1))
    at_low = WIDTH
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)
        reach = tl.sum((key >= middle).to(tl.int32))
        high = tl.where(reach > TOPK, high, tl.where(reach == TOPK, middle, middle - 1))
        at_low = tl.where(reach >= TOPK, reach, at_low)
        low = tl.where(reach >= TOPK, middle, low)

    # Blocks on the bound count up to this id; a second bisection finds it where not all of them fit.
    last = WIDTH - 1
    if at_low > TOPK:
        first = 0
        while first < last:
            middle = (first + last) // 2
            reach = tl.sum(((key > low) | ((key == low) & (block <= middle))).to(tl.int32))
            last = tl.where(reach >= TOPK, middle, last)
            first = tl.where(reach >= TOPK, first, middle + 1)
    chosen = ((key > low) | ((key == low) & (block <= last))).to(tl.int32)

    # A block's rank: the chosen of earlier rounds, of this round's earlier lanes, and earlier in the lane.
    COUNTS: tl.constexpr = tl.int32 if ROUNDS * COUNT_BITS <= 32 else tl.int64
    place = tl.arange(0, ROUNDS)[None, :] * COUNT_BITS
    counts = tl.sum(tl.sum(chosen, 2).to(COUNTS) << place, 1)
    earlier = tl.sum(counts)
    earlier += earlier << COUNT_BITS
    earlier += earlier << 2 * COUNT_BITS
    if ROUNDS > 4:
        earlier += earlier << 4 * COUNT_BITS
    earlier = (earlier << COUNT_BITS) + tl.cumsum(counts, 0) - counts
    rank = ((earlier[:, None] >> place) & ((1 << COUNT_BITS) - 1)).to(tl.int32)
    rank = rank[:, :, None] + tl.cumsum(chosen, 2) - chosen
    tl.store(out_ptr + rank, block, mask=chosen != 0)
