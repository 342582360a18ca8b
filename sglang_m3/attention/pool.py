"""The pool of K, V and index key pages."""

from __future__ import annotations

from dataclasses import dataclass

import m3_kernels
from m3_kernels.rows import BLOCK_TOKENS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from torch import Tensor


@dataclass(frozen=True)
class LayerPages:
    """A sparse layer's pages, views of the pool: `k`, `v` `[P, 128, Hkv, D]`, `index_k` `[P, 128, 1, D]`."""

    k: Tensor
    v: Tensor
    index_k: Tensor


def as_pages(buffer: Tensor) -> Tensor:
    """View a pool buffer `[slots, heads, D]` as pages `[slots // 128, 128, heads, D]`."""
    return buffer.view(-1, BLOCK_TOKENS, *buffer.shape[1:])


class M3KVPool(MiniMaxSparseKVPool):
    """SGLang's pool for M3, stored into by the plugin's operator and read as pages.

    A page is a block where the plugin's backend is in use. With another page size, which a quantisation that
    is left to SGLang may have, the pool is SGLang's. Slots of K, V and index keys are common, so the radix
    cache, eviction and the allocator need to know nothing of index keys.
    """

    def pages(self, layer_id: int) -> LayerPages:
        """The pages of a sparse layer; waits for its transfer where SGLang loads pages from the host."""
        k, v = self.get_kv_buffer(layer_id)
        return LayerPages(as_pages(k), as_pages(v), as_pages(self.get_index_k_buffer(layer_id)))

    def set_fused_kv_index_buffer(
        self,
        layer: RadixAttention,
        loc: Tensor,
        cache_k: Tensor,
        cache_v: Tensor,
        cache_idx_k: Tensor,
        cache_idx_v: Tensor | None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        idx_k_scale: float | None = None,
        idx_v_scale: float | None = None,
    ) -> None:
        """Store new tokens of a sparse layer: one rounding each from the model's dtype to the pool's."""
        scales = (k_scale, v_scale, idx_k_scale)
        own = self.page_size == BLOCK_TOKENS and all(scale in (None, 1.0) for scale in scales)
        if cache_idx_v is not None or not own:
            super().set_fused_kv_index_buffer(
                layer, loc, cache_k, cache_v, cache_idx_k, cache_idx_v, *scales, idx_v_scale
            )
            return
        pages = self.pages(layer.layer_id)
        m3_kernels.store_tokens(cache_k, cache_v, cache_idx_k, loc, pages.k, pages.v, pages.index_k)
