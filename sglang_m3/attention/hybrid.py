"""Who serves which layer: sparse layers, and dense ones while decoding, are the plugin's."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxHybridAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from sglang_m3.attention.backend import M3SparseBackend


class M3HybridBackend(MiniMaxHybridAttnBackend):
    """SGLang's routing between a dense and a sparse backend, except for dense layers in decode and verify.

    Those attend through the plugin's operator, which loads a page once for the requests that share it; dense
    backends load it once for each. Where the dense backend has nothing to do, it prepares nothing either.
    """

    dense: AttentionBackend
    sparse: M3SparseBackend

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.sparse.init_forward_metadata(forward_batch)
        if not self._shares(forward_batch.forward_mode):
            self.dense.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
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

    @staticmethod
    def _shares(mode: ForwardMode) -> bool:
        return mode.is_decode() or mode.is_target_verify()
