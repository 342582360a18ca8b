"""Who serves which layer: sparse layers are the plugin's, and dense ones where that is faster."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxHybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor, nn

from sglang_m3.attention.backend import M3SparseBackend
from sglang_m3.attention.step import Step

MOST_WHOLE_ROWS = 1024
"""Rows of a prefill graph that holds the dense layers' attention whatever the dense backend.

A graph that breaks at them waits for the host between short pieces, 4 to 5 ms a step in docs/results/profile.
Per row the plugin's operator took about 1.3 times as long as FA3 there, in runs of their own: 0.4 ms of three
layers at 1,024 rows and 60,000 cached tokens, as much as the waits at some 650,000.
"""


class M3HybridBackend(MiniMaxHybridAttnBackend):
    """SGLang's routing between a dense and a sparse backend, except for some dense layers.

    In decode and verify those attend through the plugin's operator, which loads a page once for the requests
    that share it; dense backends load it once for each. In prefill they do where the dense backend is
    SGLang's Triton one, which is slower, and in graphs of up to `MOST_WHOLE_ROWS` rows. FA3, SGLang's default
    for M3 on Hopper, and FlashInfer keep the rest. Where the dense backend has nothing to do, it prepares
    nothing either.
    """

    dense: AttentionBackend
    sparse: M3SparseBackend
    use_captured_forward_metadata_for_breakable_cuda_graph = True

    def __init__(
        self, dense_backend: AttentionBackend, sparse_backend: M3SparseBackend, sparse_layer_ids: list[int]
    ) -> None:
        super().__init__(dense_backend, sparse_backend, sparse_layer_ids)
        pair = isinstance(dense_backend, HybridAttnBackend)
        prefill_backend = dense_backend.prefill_backend if pair else dense_backend
        self._always_extends = isinstance(prefill_backend, TritonAttnBackend)
        self._extends = self._always_extends
        self._dense_layers: list[RadixAttention] = []
        steps = sparse_backend.prefill_graph_steps
        self.prefill_cuda_graph_max_batch_size = None if steps is None else steps.requests

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: ForwardBatch) -> Step:
        """Prepare the capture of a prefill graph."""
        self._extends = self._in_whole(len(forward_batch.input_ids))
        for layer in self._dense_layers:
            layer.use_prefill_attention_wrapper = not self._extends
        if not self._shares(forward_batch.forward_mode):
            self.dense.init_forward_metadata(forward_batch)
        return self.sparse.refill_prefill_graph_step(forward_batch, len(forward_batch.input_ids))

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self,
        capture_metadata: Step,
        forward_batch: ForwardBatch,
        *,
        static_forward_batch: ForwardBatch | None = None,
    ) -> None:
        """Prepare a replay: `capture_metadata`, the captured step, comes to describe `forward_batch`."""
        self._extends = self._in_whole(len(capture_metadata.rows))
        if not self._shares(forward_batch.forward_mode):
            self.dense.init_forward_metadata(forward_batch)
        step = self.sparse.refill_prefill_graph_step(forward_batch, len(capture_metadata.rows))
        assert step.same_memory(capture_metadata)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._extends = self._always_extends
        self.sparse.init_forward_metadata(forward_batch)
        if not self._shares(forward_batch.forward_mode):
            self.dense.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._extends = self._always_extends
        self.sparse.init_forward_metadata_out_graph(forward_batch, in_capture)
        if not self._shares(forward_batch.forward_mode):
            self.dense.init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.sparse.init_forward_metadata_in_graph(forward_batch)
        if not self._shares(forward_batch.forward_mode):
            self.dense.init_forward_metadata_in_graph(forward_batch)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attention of one layer; shapes and results are those of the backend that serves it."""
        if layer.layer_id in self.sparse_layer_ids or not self._shares(forward_batch.forward_mode):
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self.sparse.attend_to_all(q, k, v, layer, forward_batch, save_kv_cache)

    def capture_whole(self, model: nn.Module) -> None:
        """Tell SGLang at which attention layers prefill graphs need no break: the plugin's.

        Of the dense ones that is decided before the capture of each size.
        """
        for module in model.modules():
            if isinstance(module, RadixAttention):
                dense = module.layer_id not in self.sparse_layer_ids
                module.use_prefill_attention_wrapper = dense and not self._always_extends
                self._dense_layers += [module] * dense

    def _in_whole(self, rows: int) -> bool:
        return self._always_extends or rows <= MOST_WHOLE_ROWS

    def _shares(self, mode: ForwardMode) -> bool:
        if mode.is_decode() or mode.is_target_verify():
            return True
        return self._extends and mode.is_extend_without_speculative()
