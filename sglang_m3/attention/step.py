"""One forward step, in the operators' terms."""

from __future__ import annotations

from dataclasses import dataclass

import m3_kernels
import torch
from m3_kernels.prefix_plan import PrefixPlan
from m3_kernels.rows import BLOCK_TOKENS, Rows
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

_SHORTEST_TABLE_TOKENS = 512 * BLOCK_TOKENS


@dataclass(frozen=True)
class Step:
    """What all layers of a step have in common.

    Attributes:
        page_table: `[R, B]` int32.
        rows: the step's query tokens.
        plan: what the requests share.
    """

    page_table: Tensor
    rows: Rows
    plan: PrefixPlan

    def same_memory(self, other: Step) -> bool:
        """Whether a graph that was captured with one step reads the other."""
        return all(
            (mine.data_ptr(), mine.shape) == (theirs.data_ptr(), theirs.shape)
            for mine, theirs in zip(self._tensors(), other._tensors())
        )

    def _tensors(self) -> list[Tensor]:
        return [self.page_table, self.rows.request, self.rows.position, *vars(self.plan).values()]


def rows_of(forward_batch: ForwardBatch) -> Rows:
    """The query tokens: one per request in decode, a chunk per request in extend, a draft's in verify.

    A draft is a chain (`sglang_m3.speculation.chain`), so its tokens are consecutive like those of a chunk.
    SGLang pads the decode batch of a CUDA graph with request slot 0, which no request ever has
    (`ReqToTokenPool`); such rows are padding here as well.
    """
    position = forward_batch.positions.int()
    request = torch.arange(forward_batch.req_pool_indices.shape[0], dtype=torch.int32, device=position.device)
    request = torch.where(forward_batch.req_pool_indices > 0, request, -1)
    mode = forward_batch.forward_mode
    if mode.is_decode():
        return Rows(request, position)
    if mode.is_target_verify():
        tokens = forward_batch.spec_info.draft_token_num
        return Rows(request.repeat_interleave(tokens), position)
    lengths = forward_batch.extend_seq_lens
    request = request.repeat_interleave(lengths, output_size=sum(forward_batch.extend_seq_lens_cpu))
    return Rows(request, position[: request.shape[0]])


def page_table_of(forward_batch: ForwardBatch, req_to_token: Tensor, longest: int) -> Tensor:
    """Each request's pages up to `longest` tokens, from the slots that SGLang's radix cache gave it.

    A running request's slots of a cached prefix are the tree's own, so equal pages are shared pages
    (`UnifiedRadixCache.checkpoint_into_tree`). Slots are re-pointed between steps: never keep the result.
    """
    first_slots = req_to_token[:, :longest:BLOCK_TOKENS][forward_batch.req_pool_indices]
    return (first_slots // BLOCK_TOKENS).int()


def table_sizes(context: int) -> list[int]:
    """Tokens that page tables reach on a GPU outside graphs, ascending; the last one is `context`.

    Few, because kernels are compiled for the width of the table.
    """
    sizes = []
    while not sizes or sizes[-1] < context:
        sizes.append(min(context, _SHORTEST_TABLE_TOKENS * 4 ** len(sizes)))
    return sizes


def longest_of(forward_batch: ForwardBatch) -> int:
    """Tokens of the longest context of the step, a draft included, from SGLang's host copy of the lengths."""
    longest = int(forward_batch.seq_lens_cpu.max())
    if forward_batch.forward_mode.is_target_verify():
        # The lengths end where the draft begins.
        longest += forward_batch.spec_info.draft_token_num
    return longest


def make_step(
    forward_batch: ForwardBatch, req_to_token: Tensor, *, longest: int, workspace: Tensor | None
) -> Step:
    """Build the step without reading a device value.

    Args:
        forward_batch: SGLang's.
        req_to_token: `[slots of requests, context]` int32, SGLang's.
        longest: tokens that the page table reaches, at least those of the longest context.
        workspace: of `plan_prefix`; the plan lies in it.
    """
    rows = rows_of(forward_batch)
    page_table = page_table_of(forward_batch, req_to_token, longest)
    return Step(page_table, rows, m3_kernels.plan_prefix(page_table, rows, workspace=workspace))
