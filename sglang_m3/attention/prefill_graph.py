"""Prefill steps that keep their addresses, so that SGLang's prefill graphs hold attention as well.

SGLang's breakable graphs leave a graph at every attention layer and run it eagerly; with short prompts the
launches of 60 layers then take longer than their work. What attention reads besides its input lies here
instead, is refilled before each replay, and is captured like the rest.
"""

from __future__ import annotations

import m3_kernels
import torch
from m3_kernels.rows import Rows
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from sglang_m3.attention.step import Step, longest_of, page_table_of, rows_of
from sglang_m3.attention.workspace import StepShape

MOST_REQUESTS = 64
"""Requests of a prefill step that is replayed; SGLang runs one with more without a graph."""


class PrefillGraphSteps:
    """The one set of buffers that the graphs of all sizes read: only one step runs at a time.

    Attributes:
        requests: rows of the page table, R.
    """

    def __init__(self, shape: StepShape, workspace: Tensor | None, device: torch.device | str) -> None:
        """
        Args:
            shape: the largest step.
            workspace: of `plan_prefix`; shared with other steps, as every step plans anew.
        """
        self.requests = min(shape.requests, MOST_REQUESTS)
        self._workspace = workspace
        self._page_table = torch.zeros(self.requests, shape.blocks, dtype=torch.int32, device=device)
        self._request = torch.full((shape.rows,), -1, dtype=torch.int32, device=device)
        self._position = torch.zeros(shape.rows, dtype=torch.int32, device=device)
        count = shape.index_heads * shape.rows * shape.topk
        self._chosen = torch.empty(count, dtype=torch.int32, device=device)
        self._chosen_shape = (shape.index_heads, shape.topk)

    def refill(self, forward_batch: ForwardBatch, req_to_token: Tensor, tokens: int) -> Step:
        """The batch's step in `tokens` rows, those past the batch's own being padding.

        No device value is read. Page table entries that no row sees keep what an earlier step left there.

        Args:
            forward_batch: an extend step of at most `requests` requests and `tokens` tokens.
            req_to_token: `[slots of requests, context]` int32, SGLang's.
            tokens: rows of the graph.
        """
        rows = rows_of(forward_batch)
        table = page_table_of(forward_batch, req_to_token, longest_of(forward_batch))
        assert len(rows) <= tokens <= len(self._request), (len(rows), tokens, len(self._request))
        assert len(table) <= self.requests, table.shape
        self._page_table[: table.shape[0], : table.shape[1]] = table
        request, position = self._request[:tokens], self._position[:tokens]
        request[: len(rows)] = rows.request
        request[len(rows) :] = -1
        position[: len(rows)] = rows.position
        padded = Rows(request, position)
        plan = m3_kernels.plan_prefix(self._page_table, padded, workspace=self._workspace)
        return Step(self._page_table, padded, plan)

    def chosen(self, tokens: int) -> Tensor:
        """`[H, tokens, topk]` int32: where the layers of a graph of so many rows put what they choose."""
        heads, topk = self._chosen_shape
        return self._chosen[: heads * tokens * topk].view(heads, tokens, topk)
