"""The attention backend of M3's sparse layers."""

from __future__ import annotations

from typing import Any

import m3_kernels
import torch
from m3_kernels.rows import BLOCK_TOKENS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from sglang_m3 import settings
from sglang_m3.attention import metrics
from sglang_m3.attention.counters import SelectionCounters
from sglang_m3.attention.parameters import SelectionParameters
from sglang_m3.attention.pool import M3KVPool, as_pages
from sglang_m3.attention.prefill_graph import PrefillGraphSteps
from sglang_m3.attention.recorder import BlockRecorder
from sglang_m3.attention.step import Step, longest_of, make_step, table_sizes
from sglang_m3.attention.warmup import warm_up
from sglang_m3.attention.workspace import StepShape, Workspaces
from sglang_m3.speculation import chain


class M3SparseBackend(AttentionBackend):
    """Stores tokens, chooses blocks and attends to them, the same way in every phase.

    Serves SGLang's contract for sparse M3 layers: `forward` gets index queries and keys besides q, k and v
    and returns `(None, output [T, Hq * D])`; the None stands for index values, which no released model has.
    """

    def __init__(self, runner: Any) -> None:
        pool = runner.token_to_kv_pool
        assert isinstance(pool, M3KVPool) and pool.page_size == BLOCK_TOKENS, (type(pool), pool.page_size)
        self.token_to_kv_pool: M3KVPool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.parameters = SelectionParameters.from_hf_config(runner.model_config.hf_config)
        # The pool has the layers of this pipeline stage.
        stage = range(runner.layer_info.start_layer, runner.layer_info.end_layer)
        self.sparse_layer_ids = [layer for layer in self.parameters.sparse_layers if layer in stage]
        if not self.sparse_layer_ids:
            raise ValueError(
                f"the pipeline stage of layers {stage[0]} to {stage[-1]} has no sparse layer, which is not "
                "supported; use a smaller --pp-size or another SGLANG_PP_LAYER_PARTITION"
            )
        self._last_layer = stage[-1]
        self.counters = SelectionCounters(runner.device)
        metrics.publish_from(self.counters)
        record = settings.read().record_blocks
        self._recorder = BlockRecorder(record, max(self.sparse_layer_ids)) if record is not None else None
        if runner.server_args.speculative_algorithm == "NGRAM":
            chain.require_chains()
        shape = StepShape.of(
            runner.model_config,
            runner.server_args,
            requests=self.req_to_token_pool.size,
            pages=self.token_to_kv_pool.size // BLOCK_TOKENS + 1,
        )
        self._workspaces = Workspaces.allocate(shape, runner.device)
        on_gpu = torch.device(runner.device).type == "cuda"
        self._table_sizes = table_sizes(shape.blocks * BLOCK_TOKENS) if on_gpu else []
        self._in_capture = False
        self.prefill_graph_steps: PrefillGraphSteps | None = None
        if on_gpu:
            self.prefill_graph_steps = PrefillGraphSteps(shape, self._workspaces.plan, runner.device)
            pages = self.token_to_kv_pool.pages(self.sparse_layer_ids[0])
            warm_up(shape, self.parameters, pages, self._workspaces, runner.dtype)
        self._step: Step | None = None
        self._chosen: Tensor | None = None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.counters.unpublished = True
        self._step = None
        self._in_capture = in_capture
        if forward_batch.forward_mode.is_extend_without_speculative():
            self._make_step(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_decode() or mode.is_target_verify():
            self._make_step(forward_batch)

    def refill_prefill_graph_step(self, forward_batch: ForwardBatch, tokens: int) -> Step:
        """Prepare a prefill step of `tokens` rows, padding included, that a graph holds or is to hold."""
        assert self.prefill_graph_steps is not None
        self.counters.unpublished = True
        # The graph waits for no layer that SGLang still loads from the host; the last one comes last.
        self.token_to_kv_pool.get_kv_buffer(self._last_layer)
        steps, table = self.prefill_graph_steps, self.req_to_token_pool.req_to_token
        self._step, self._chosen = steps.refill(forward_batch, table, tokens), steps.chosen(tokens)
        self.counters.count(self._step.plan)
        return self._step

    def _table_tokens(self, forward_batch: ForwardBatch) -> int:
        if self._in_capture:
            # A captured step must do for every later length.
            return self._table_sizes[-1]
        longest = longest_of(forward_batch)
        return next((size for size in self._table_sizes if size >= longest), longest)

    def _make_step(self, forward_batch: ForwardBatch) -> None:
        self._step = make_step(
            forward_batch,
            self.req_to_token_pool.req_to_token,
            longest=self._table_tokens(forward_batch),
            workspace=self._workspaces.plan,
        )
        self._chosen = None
        self.counters.count(self._step.plan)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        # Nothing to prepare: workspaces suit the largest step, and a step's tensors belong to its graph.
        assert max_bs <= self.req_to_token_pool.size, (max_bs, self.req_to_token_pool.size)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        idx_q: Tensor,
        idx_k: Tensor,
        idx_v: Tensor | None = None,
    ) -> tuple[None, Tensor]:
        """Attention of one sparse layer.

        Args:
            q: `[T, Hq, D]`, after normalisation and rotation, like k and the index tensors.
            k, v: `[T, Hkv, D]`.
            idx_q: `[T, H, D]`; idx_k: `[T, 1, D]`.
            idx_v: must be None.

        Returns:
            None and `[T, Hq * D]`. Tokens past the step's rows (padding) give zeros.
        """
        assert idx_v is None, "index values are refused at start-up"
        step = self._step
        if step is None:
            assert forward_batch.forward_mode.is_idle(), forward_batch.forward_mode
            return None, torch.zeros_like(q).flatten(1)
        if save_kv_cache:
            self.token_to_kv_pool.set_fused_kv_index_buffer(
                layer,
                forward_batch.out_cache_loc,
                k,
                v,
                idx_k,
                None,
                layer.k_scale_float,
                layer.v_scale_float,
                layer.idx_k_scale_float,
            )
        pages = self.token_to_kv_pool.pages(layer.layer_id)
        row_count = len(step.rows)
        out = torch.empty_like(q) if row_count == q.shape[0] else torch.zeros_like(q)
        if self._chosen is None:
            # All layers of a step use the same memory.
            shape = (idx_q.shape[1], row_count, self.parameters.topk)
            self._chosen = torch.empty(shape, dtype=torch.int32, device=q.device)
        chosen = m3_kernels.choose_blocks(
            idx_q[:row_count],
            pages.index_k,
            step.page_table,
            step.rows,
            step.plan,
            topk=self.parameters.topk,
            init_blocks=self.parameters.init_blocks,
            local_blocks=self.parameters.local_blocks,
            workspace=self._workspaces.choose,
            out=self._chosen,
        )
        if self._recorder is not None:
            self._recorder.record(forward_batch, step, layer.layer_id, chosen)
        m3_kernels.attend_blocks(
            q[:row_count],
            pages.k,
            pages.v,
            step.page_table,
            step.rows,
            chosen,
            scale=layer.scaling,
            workspace=self._workspaces.attend,
            out=out[:row_count],
        )
        return None, out.flatten(1)

    def attend_to_all(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """Attention of one dense layer to every visible token.

        Args:
            q: `[T, Hq * D]` or `[T, Hq, D]`, after normalisation and rotation, like k.
            k, v: `[T, Hkv, D]`.

        Returns:
            `[T, Hq * D]`; padded rows give zeros.
        """
        step = self._step
        assert step is not None and len(step.rows) == len(q), (step, q.shape)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(
                layer, forward_batch.out_cache_loc, k, v, layer.k_scale_float, layer.v_scale_float
            )
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        q = q.view(len(q), -1, layer.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        m3_kernels.attend_blocks(
            q,
            as_pages(keys),
            as_pages(values),
            step.page_table,
            step.rows,
            None,
            scale=layer.scaling,
            workspace=self._workspaces.attend,
            out=out,
        )
        return out.flatten(1)

    def forward_extend(self, *args: Any, **kwargs: Any) -> tuple[None, Tensor]:
        return self.forward(*args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> tuple[None, Tensor]:
        return self.forward(*args, **kwargs)
