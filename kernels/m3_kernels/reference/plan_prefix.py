"""Find what the requests of a step share, from the page table alone."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows


def plan_prefix(page_table: Tensor, rows: Rows, *, workspace: Tensor | None = None) -> PrefixPlan:
    """Group rows by the pages that their requests share.

    Two requests share block b when their page tables hold the same pages in blocks 0 .. b, which is what a
    radix cache with one page per block produces. Nothing is assumed of the table: pages that are equal
    without an equal prefix are merely loaded twice.

    Args:
        page_table: `[R, B]` int32, physical page of each block of each request; entries past a request's last
            visible block are never read.
        rows: the step's query tokens; -1 in `request` is padding and belongs to no span.
        workspace: scratch memory of the caller for the kernels; not used here.

    Returns:
        The plan; its spans hold every visible (row, block) pair exactly once (see `PrefixPlan`).
        No host synchronisation, but temporary tensors of `[R, R, B]`.
    """
    request_count, table_blocks = page_table.shape
    device = page_table.device
    real = rows.request >= 0
    row_request = torch.where(real, rows.request, request_count).long()

    blocks = torch.zeros(request_count + 1, dtype=torch.int64, device=device)
    row_blocks = torch.where(real, rows.position // BLOCK_TOKENS + 1, 0).long()
    blocks = blocks.scatter_reduce(0, row_request, row_blocks, "amax")[:request_count]
    row_totals = torch.zeros(request_count + 1, dtype=torch.int64, device=device)
    row_totals = row_totals.scatter_add(0, row_request, torch.ones_like(row_request))[:request_count]

    # common[r, s]: blocks that r and s share from the start.
    block = torch.arange(table_blocks, device=device)
    both_have = block < torch.minimum(blocks[:, None], blocks[None, :])[:, :, None]
    equal = (page_table[:, None, :] == page_table[None, :, :]) & both_have
    common = equal.long().cumprod(-1).sum(-1)

    # Depth-first order: a request precedes those that extend it; siblings follow their next page.
    next_page = page_table.long().gather(1, common.clamp(max=table_blocks - 1))
    ends_here = common == blocks[:, None]
    number = torch.arange(request_count, device=device)
    shorter = (blocks[:, None] < blocks[None, :]) | (
        (blocks[:, None] == blocks[None, :]) & (number[:, None] < number[None, :])
    )
    precedes = torch.where(ends_here, shorter, ~ends_here.T & (next_page < next_page.T))
    place = precedes.long().sum(0)
    order = torch.argsort(place)

    row_place = torch.cat([place, torch.full((1,), request_count, device=device)])[row_request]
    row_order = torch.argsort(row_place, stable=True)
    totals_in_order = row_totals[order]
    row_begin = torch.zeros(request_count + 1, dtype=torch.int64, device=device)
    row_begin[1:] = totals_in_order.cumsum(0)

    # shared[k]: blocks that the neighbours k - 1 and k share; -1 bounds the tree at both ends.
    bound = torch.full((1,), -1, dtype=torch.int64, device=device)
    neighbours = common[order[:-1], order[1:]]
    shared = torch.cat([bound, neighbours, bound])

    leaf_depth = torch.maximum(shared[:-1], shared[1:]).clamp(min=0)
    leaf_count = blocks[order] - leaf_depth
    leaf = torch.stack([leaf_depth, leaf_count, row_begin[:-1], totals_in_order, order])[:, place]

    # Neighbour pair k stands for the node of depth shared[k] around it, if it is that node's first such pair.
    index = torch.arange(request_count + 1, device=device)
    inner = index[1:-1]
    lower = shared[None, :] < shared[inner][:, None]
    left = torch.where(lower & (index[None, :] < inner[:, None]), index, -1).amax(1)
    right = torch.where(lower & (index[None, :] > inner[:, None]), index, request_count + 1).amin(1)
    same = shared[None, :] == shared[inner][:, None]
    first_pair = ~(same & (index[None, :] > left[:, None]) & (index[None, :] < inner[:, None])).any(1)
    depth = torch.maximum(shared[left], shared[right.clamp(max=request_count)]).clamp(min=0)
    count = torch.where(first_pair, shared[inner] - depth, 0)
    node = torch.stack([depth, count, row_begin[left], row_begin[right] - row_begin[left], order[left]])

    spans = torch.cat([leaf, node], 1)
    spans = torch.where(spans[1] > 0, spans, 0).int()
    loaded = spans[1].sum(dtype=torch.int64)
    counters = torch.stack([loaded, blocks.sum() - loaded, real.sum()])
    return PrefixPlan(row_order.int(), *spans.unbind(0), counters)
