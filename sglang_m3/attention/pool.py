"""The pool of K, V and index key pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import m3_kernels
import torch
from m3_kernels.rows import BLOCK_TOKENS
from sglang.kernels.ops.kvcache.cache_move import copy_all_layer_kv_cache_func
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from sglang_m3 import settings
from sglang_m3.overrides import SERVED_BY_SGLANG

_MOVED_AT_ONCE = 128
"""Tokens that one launch moves; a power of two."""


def around_index_dtype(original: Callable[..., torch.dtype], **kwargs: Any) -> torch.dtype:
    """Around `get_minimax_sparse_index_dtype`, which only M3's pool and its budget ask: our own setting.

    SGLang's on Hopper follows the dtype of K and V, and so changes the choice of blocks without a word.
    """
    if resolving_view(get_server_args()).quantization in SERVED_BY_SGLANG:
        return original(**kwargs)
    if settings.read().index_dtype == "fp8_e4m3":
        return torch.float8_e4m3fn
    return kwargs["model_dtype"]


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

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copy tokens from slots `src_loc` to `tgt_loc` (`[N]` int64): K, V and index keys of all layers.

        SGLang calls it with a draft's accepted tokens, where they are and where they belong. A slot that is
        written must not be read for another one's sake.
        """
        if not tgt_loc.is_cuda:
            for buffer in self._buffers():
                buffer[tgt_loc] = buffer[src_loc]
            return
        addresses, slot_bytes = self._buffer_table
        tiling = {"bytes_per_tile": 256, "byte_tiles": -(-self._slot_bytes_max // 256), "num_warps": 4}
        for begin in range(0, tgt_loc.numel(), _MOVED_AT_ONCE):
            target, source = (loc[begin : begin + _MOVED_AT_ONCE] for loc in (tgt_loc, src_loc))
            copy_all_layer_kv_cache_func(
                addresses, slot_bytes, target, source, target.numel(), _MOVED_AT_ONCE, tiling
            )

    def _buffers(self) -> list[Tensor]:
        pools = (self.main_pool, self.dense_pool, self.index_kv_pool, self.index_k_pool)
        return [
            buffer
            for pool in pools
            if pool is not None
            for buffer in (*pool.k_buffer, *getattr(pool, "v_buffer", ()))
        ]

    @property
    def _slot_bytes_max(self) -> int:
        return max(buffer[0].nbytes for buffer in self._buffers())

    @functools.cached_property
    def _buffer_table(self) -> tuple[Tensor, Tensor]:
        """Address and slot bytes of every buffer, on the device: one launch moves tokens in all layers."""
        buffers = self._buffers()
        addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device=self.device)
        slot_bytes = torch.tensor([b[0].nbytes for b in buffers], dtype=torch.int64, device=self.device)
        return addresses, slot_bytes

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
