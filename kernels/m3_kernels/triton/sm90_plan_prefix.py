"""Find what the requests of a step share, on the GPU: five small launches, no atomics.

1. Each request's blocks and rows, from the rows.
2. Each request's place in a depth-first walk of the prefix tree, from pairwise common prefixes, each found by
   binary search.
3. Places made a permutation, rows put in order, and the exact common prefix of each neighbouring pair.
4. Spans from the neighbours' common prefixes.
5. Counters. Last, because a scoring launch that is set up early reads everything else of the plan while the
   launch before it may still run.

Step 2 presumes a prefix tree (an equal page at block b means equal pages before it). Steps 3 and 4 presume
nothing: for any other table the plan is still right, and may only share less than it could.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows
from m3_kernels.triton.sm90_common import aligned, check_workspace

_COUNTERS, _SPAN_FIELDS = 3, 5


def plan_prefix_workspace_bytes(row_count: int, request_count: int) -> int:
    """Bytes that `plan_prefix` needs; the plan's tensors lie in the workspace."""
    spans, scratch = aligned(4 * (2 * request_count - 1)), aligned(4 * (request_count + 1))
    return aligned(8 * _COUNTERS) + aligned(4 * row_count) + _SPAN_FIELDS * spans + 6 * scratch


def plan_prefix(page_table: Tensor, rows: Rows, *, workspace: Tensor) -> PrefixPlan:
    """Group rows by the pages that their requests share; the contract is the reference operator's.

    Args:
        page_table: `[R, B]` int32, last dimension contiguous; entries past a request's last visible block are
            never read.
        rows: the step's query tokens; -1 in `request` is padding.
        workspace: uint8, at least `plan_prefix_workspace_bytes(T, R)` bytes. The returned plan's tensors lie
            in it, so it must stay untouched as long as the plan is used.

    Returns:
        The plan, at the same addresses for the same T, R and workspace. It equals the reference's for every
        table that describes a prefix tree. Five launches, no allocation, no host synchronisation,
        capturable in a CUDA graph.
    """
    request_count, table_blocks = page_table.shape
    row_count = len(rows)
    assert page_table.dtype == torch.int32 and page_table.stride(1) == 1
    assert rows.request.dtype == torch.int32 and rows.position.dtype == torch.int32
    check_workspace(workspace, plan_prefix_workspace_bytes(row_count, request_count))
    begin = 0

    def part(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        nonlocal begin
        size = count * dtype.itemsize
        taken = workspace[begin : begin + size].view(dtype)
        begin += aligned(size)
        return taken

    counters = part(_COUNTERS, torch.int64)
    row_order = part(row_count)
    spans = [part(2 * request_count - 1) for _ in range(_SPAN_FIELDS)]
    blocks, totals, place, shared, order, row_begin = (part(request_count + 1) for _ in range(6))
    row_tile = min(4096, max(128, triton.next_power_of_2(row_count)))
    lanes = max(16, triton.next_power_of_2(request_count + 1))
    _request_extent_kernel[(request_count,)](
        rows.request, rows.position, blocks, totals, row_count, BLOCK_TOKENS=BLOCK_TOKENS, ROW_TILE=row_tile
    )
    _request_place_kernel[(request_count,)](
        page_table,
        page_table.stride(0),
        blocks,
        place,
        request_count,
        LANES=lanes,
        STEPS=table_blocks.bit_length(),
        num_warps=min(4, max(1, lanes // 32)),
    )
    _order_kernel[(request_count + 1,)](
        page_table,
        page_table.stride(0),
        rows.request,
        blocks,
        totals,
        place,
        shared,
        order,
        row_begin,
        row_order,
        row_count,
        request_count,
        LANES=lanes,
        ROW_TILE=row_tile,
        BLOCK_TILE=min(2048, max(128, triton.next_power_of_2(table_blocks))),
    )
    _span_kernel[(request_count,)](
        blocks, totals, shared, order, row_begin, *spans, request_count, LANES=lanes, num_warps=1
    )
    _counter_kernel[(1,)](blocks, shared, row_begin, counters, request_count, LANES=lanes, num_warps=1)
    return PrefixPlan(row_order, *spans, counters)


_COUNTS = ["row_count", "request_count"]
_CALLERS_POINTERS = ["table_ptr", "request_ptr", "position_ptr"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_CALLERS_POINTERS)
def _request_extent_kernel(
    request_ptr,
    position_ptr,
    blocks_ptr,
    totals_ptr,
    row_count,
    BLOCK_TOKENS: tl.constexpr,
    ROW_TILE: tl.constexpr,
):
    """One program per request: blocks it sees, rows it has."""
    request = tl.program_id(0)
    most = tl.zeros([ROW_TILE], tl.int32)
    total = tl.zeros([ROW_TILE], tl.int32)
    for start in range(0, row_count, ROW_TILE):
        row = start + tl.arange(0, ROW_TILE)
        owner = tl.load(request_ptr + row, mask=row < row_count, other=-1)
        mine = owner == request
        position = tl.load(position_ptr + row, mask=mine, other=-BLOCK_TOKENS)
        most = tl.maximum(most, tl.where(mine, position // BLOCK_TOKENS + 1, 0))
        total += mine.to(tl.int32)
    tl.store(blocks_ptr + request, tl.max(most))
    tl.store(totals_ptr + request, tl.sum(total))


@triton.jit(do_not_specialize=[*_COUNTS, "table_stride"], do_not_specialize_on_alignment=_CALLERS_POINTERS)
def _request_place_kernel(
    table_ptr,
    table_stride,
    blocks_ptr,
    place_ptr,
    request_count,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
):
    """One program per request, one lane per other request: how many precede it in the tree's walk.

    A request precedes those that extend it; siblings follow their next page; equals follow their number.
    """
    request = tl.program_id(0)
    other = tl.arange(0, LANES)
    known = other < request_count
    mine = tl.load(blocks_ptr + request)
    theirs = tl.load(blocks_ptr + other, mask=known, other=0)
    my_pages = table_ptr + request.to(tl.int64) * table_stride
    their_pages = table_ptr + other.to(tl.int64) * table_stride
    low = tl.zeros([LANES], tl.int32)
    limit = tl.minimum(mine, theirs)
    high = limit
    for _ in range(STEPS):
        middle = (low + high + 1) // 2
        undecided = low < high
        same = tl.load(my_pages + middle - 1, mask=undecided, other=-1) == tl.load(
            their_pages + middle - 1, mask=undecided, other=-2
        )
        low = tl.where(undecided & same, middle, low)
        high = tl.where(undecided & (same == 0), middle - 1, high)
    common = low
    differs = common < limit
    my_next = tl.load(my_pages + common, mask=differs, other=0)
    their_next = tl.load(their_pages + common, mask=differs, other=0)
    shorter = (theirs < mine) | ((theirs == mine) & (other < request))
    precedes = tl.where(common == theirs, shorter, (common < mine) & (their_next < my_next))
    tl.store(place_ptr + request, tl.sum((known & precedes).to(tl.int32)))


@triton.jit(do_not_specialize=[*_COUNTS, "table_stride"], do_not_specialize_on_alignment=_CALLERS_POINTERS)
def _order_kernel(
    table_ptr,
    table_stride,
    request_ptr,
    blocks_ptr,
    totals_ptr,
    place_ptr,
    shared_ptr,
    order_ptr,
    row_begin_ptr,
    row_order_ptr,
    row_count,
    request_count,
    LANES: tl.constexpr,
    ROW_TILE: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
):
    """One program per request, and a last one for the padded rows.

    Writes the request's rank and rows, and `shared[rank]`: the blocks it has in common with its predecessor,
    found by comparing every page. `shared` is -1 at both ends.
    """
    request = tl.program_id(0)
    other = tl.arange(0, LANES)
    known = other < request_count
    # The request's number settles equal places, which only a table that is no prefix tree can give.
    key = tl.load(place_ptr + other, mask=known, other=0) * request_count + other
    totals = tl.load(totals_ptr + other, mask=known, other=0)
    if request < request_count:
        my_key = tl.load(place_ptr + request) * request_count + request
        before = known & (key < my_key)
        rank = tl.sum(before.to(tl.int32))
        begin = tl.sum(tl.where(before, totals, 0))
        owner = request
        common = -1
        if rank > 0:
            previous = tl.max(tl.where(before, key, -1)) % request_count
            common = tl.minimum(tl.load(blocks_ptr + request), tl.load(blocks_ptr + previous))
            my_pages = table_ptr + request.to(tl.int64) * table_stride
            their_pages = table_ptr + previous.to(tl.int64) * table_stride
            start = 0
            while start < common:
                block = start + tl.arange(0, BLOCK_TILE)
                inside = block < common
                mine = tl.load(my_pages + block, mask=inside, other=0)
                theirs = tl.load(their_pages + block, mask=inside, other=0)
                common = tl.minimum(common, tl.min(tl.where(mine != theirs, block, common)))
                start += BLOCK_TILE
        tl.store(order_ptr + rank, request)
        tl.store(shared_ptr + rank, common)
        tl.store(row_begin_ptr + rank, begin)
    else:
        begin = tl.sum(totals)
        owner = -1
        tl.store(shared_ptr + request_count, -1)
        tl.store(row_begin_ptr + request_count, begin)
    for start in range(0, row_count, ROW_TILE):
        row = start + tl.arange(0, ROW_TILE)
        mine = tl.load(request_ptr + row, mask=row < row_count, other=-2) == owner
        counted = mine.to(tl.int32)
        tl.store(row_order_ptr + begin + tl.cumsum(counted, 0) - 1, row, mask=mine)
        begin += tl.sum(counted)


@triton.jit(do_not_specialize=_COUNTS)
def _span_kernel(
    blocks_ptr,
    totals_ptr,
    shared_ptr,
    order_ptr,
    row_begin_ptr,
    first_block_ptr,
    block_count_ptr,
    row_start_ptr,
    row_count_ptr,
    page_request_ptr,
    request_count,
    LANES: tl.constexpr,
):
    """One program per rank: the tail of the request there, and the node of the pair that ends there.

    A node of the tree is a longest run of neighbours that share more blocks than the run's surroundings; the
    first pair that shares exactly its depth stands for it.
    """
    rank = tl.program_id(0)
    index = tl.arange(0, LANES)
    shared = tl.load(shared_ptr + index, mask=index <= request_count, other=-1)
    mine = tl.load(shared_ptr + rank)

    request = tl.load(order_ptr + rank)
    blocks = tl.load(blocks_ptr + request)
    depth = tl.maximum(tl.maximum(mine, tl.load(shared_ptr + rank + 1)), 0)
    count = blocks - depth
    used = count > 0
    tl.store(first_block_ptr + request, tl.where(used, depth, 0))
    tl.store(block_count_ptr + request, tl.where(used, count, 0))
    tl.store(row_start_ptr + request, tl.where(used, tl.load(row_begin_ptr + rank), 0))
    tl.store(row_count_ptr + request, tl.where(used, tl.load(totals_ptr + request), 0))
    tl.store(page_request_ptr + request, tl.where(used, request, 0))

    if rank > 0:
        left = tl.max(tl.where((index < rank) & (shared < mine), index, -1))
        nearest = tl.max(tl.where((index < rank) & (shared <= mine), index, -1))
        right = tl.min(tl.where((index > rank) & (shared < mine), index, request_count))
        node_depth = tl.maximum(tl.maximum(tl.load(shared_ptr + left), tl.load(shared_ptr + right)), 0)
        node_count = tl.where(nearest == left, mine - node_depth, 0)
        node_used = node_count > 0
        row_start = tl.load(row_begin_ptr + left)
        rows = tl.load(row_begin_ptr + right) - row_start
        slot = request_count + rank - 1
        tl.store(first_block_ptr + slot, tl.where(node_used, node_depth, 0))
        tl.store(block_count_ptr + slot, tl.where(node_used, node_count, 0))
        tl.store(row_start_ptr + slot, tl.where(node_used, row_start, 0))
        tl.store(row_count_ptr + slot, tl.where(node_used, rows, 0))
        tl.store(page_request_ptr + slot, tl.where(node_used, tl.load(order_ptr + left), 0))


@triton.jit(do_not_specialize=_COUNTS)
def _counter_kernel(
    blocks_ptr,
    shared_ptr,
    row_begin_ptr,
    counters_ptr,
    request_count,
    LANES: tl.constexpr,
):
    """Pages that the spans hold, pages that walking every request would load beyond those, rows in use."""
    index = tl.arange(0, LANES)
    shared = tl.load(shared_ptr + index, mask=index <= request_count, other=-1)
    every = tl.load(blocks_ptr + index, mask=index < request_count, other=0)
    saved = tl.sum(tl.maximum(shared, 0).to(tl.int64))
    tl.store(counters_ptr, tl.sum(every.to(tl.int64)) - saved)
    tl.store(counters_ptr + 1, saved)
    tl.store(counters_ptr + 2, tl.load(row_begin_ptr + request_count).to(tl.int64))
