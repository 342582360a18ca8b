"""What a step's requests share, as spans of blocks over runs of rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PrefixPlan:
    """The nodes of the prefix tree that a page table describes, one span per node.

    Requests are ordered so that those with a common prefix are neighbours (a depth-first walk of the tree,
    ties by request number), and rows follow their request's place, then their own number. A span covers the
    blocks that one node adds to its parent; the rows below the node are then a contiguous run of that order,
    and all of them hold the same physical pages in the span's blocks. With R requests a tree has at most
    2 R - 1 nodes that add blocks, so every tensor has a fixed size and the plan can be captured in a CUDA
    graph: slots 0 .. R - 1 are the requests' own tails (leaves), slots R .. 2 R - 2 the shared nodes; a slot
    that is not a node has `block_count` 0 and `row_count` 0.

    Every (row, block) pair with `block <= position // 128` lies in exactly one span. A span may also contain
    pairs that are not visible (a row early in an extend chunk, a block that a later row needs): users of the
    plan mask by position.

    Attributes:
        row_order: `[T]` int32, row numbers in tree order; padded rows come last.
        first_block: `[2 R - 1]` int32, first logical block of the span.
        block_count: `[2 R - 1]` int32, blocks in the span; 0 for an unused slot.
        row_start: `[2 R - 1]` int32, where the span's rows begin in `row_order`.
        row_count: `[2 R - 1]` int32, how many rows it has (0 exactly where `block_count` is 0).
        page_request: `[2 R - 1]` int32, a request whose page table row holds the span's pages.
        counters: `[3]` int64: index pages that one pass over the spans loads, index pages that a pass per
            request would have loaded beyond those (what sharing saves), and rows that are not padding.
    """

    row_order: Tensor
    first_block: Tensor
    block_count: Tensor
    row_start: Tensor
    row_count: Tensor
    page_request: Tensor
    counters: Tensor
