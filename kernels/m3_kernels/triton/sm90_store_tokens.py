"""Write new tokens' keys, values and index keys into their pages on sm90: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from m3_kernels.rows import BLOCK_TOKENS
from m3_kernels.triton.sm90_common import INTERPRETING

E4M3_MAX = 448.0


def store_tokens(
    k: Tensor,
    v: Tensor,
    index_k: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    index_pages: Tensor,
) -> None:
    """Store each token's key, value and index key at its slot; the contract is the reference operator's.

    Args:
        k, v: `[T, Hkv, D]`, heads and elements contiguous.
        index_k: `[T, 1, D]`, likewise.
        slots: `[T]` int64, page * 128 + offset; -1 marks a padded token, which is not stored. No slot twice,
            but for slots that nobody reads, such as SGLang's padding slot 0.
        k_pages, v_pages: `[P, 128, Hkv, D]` contiguous, written in place.
        index_pages: `[P, 128, 1, D]` contiguous, written in place; its dtype may differ from the others'.

    Each value is rounded once to the pages' dtype; float8_e4m3fn saturates at 448, and NaN stays NaN. One
    launch, no allocation, no host synchronisation, capturable in a CUDA graph.
    """
    token_count, kv_heads, head_dim = k.shape
    assert slots.dtype == torch.int64 and slots.shape == (token_count,) and slots.is_contiguous()
    assert v.shape == k.shape and index_k.shape == (token_count, 1, head_dim)
    for source, pages in ((k, k_pages), (v, v_pages), (index_k, index_pages)):
        assert source.stride(2) == 1 and (source.shape[1] == 1 or source.stride(1) == head_dim)
        assert pages.is_contiguous() and pages.shape[1:] == (BLOCK_TOKENS, *source.shape[1:])
    _store_kernel[(token_count,)](
        k,
        v,
        index_k,
        slots,
        k_pages,
        v_pages,
        index_pages,
        k.stride(0),
        v.stride(0),
        index_k.stride(0),
        KV_SIZE=kv_heads * head_dim,
        KV_TILE=triton.next_power_of_2(kv_heads * head_dim),
        INDEX_SIZE=head_dim,
        INDEX_TILE=triton.next_power_of_2(head_dim),
        MAXIMUM=E4M3_MAX,
        INTERPRETED=INTERPRETING,
        num_warps=1,
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _store_kernel(
    k_ptr,
    v_ptr,
    index_ptr,
    slots_ptr,
    k_pages_ptr,
    v_pages_ptr,
    index_pages_ptr,
    k_stride,
    v_stride,
    index_stride,
    KV_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    INDEX_SIZE: tl.constexpr,
    INDEX_TILE: tl.constexpr,
    MAXIMUM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    if not INTERPRETED:
        gdc_launch_dependents()  # a successor that waits for this launch's end may be set up meanwhile
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        _store(k_ptr + token * k_stride, k_pages_ptr + slot * KV_SIZE, KV_SIZE, KV_TILE, MAXIMUM)
        _store(v_ptr + token * v_stride, v_pages_ptr + slot * KV_SIZE, KV_SIZE, KV_TILE, MAXIMUM)
        _store(
            index_ptr + token * index_stride,
            index_pages_ptr + slot * INDEX_SIZE,
            INDEX_SIZE,
            INDEX_TILE,
            MAXIMUM,
        )


@triton.jit
def _store(source_ptr, target_ptr, SIZE: tl.constexpr, TILE: tl.constexpr, MAXIMUM: tl.constexpr):
    element = tl.arange(0, TILE)
    value = tl.load(source_ptr + element, mask=element < SIZE, other=0.0)
    if target_ptr.dtype.element_ty == tl.float8e4nv:
        # Comparisons, not a clamp, which would lose NaN.
        value = value.to(tl.float32)
        value = tl.where(value > MAXIMUM, MAXIMUM, value)
        value = tl.where(value < -MAXIMUM, -MAXIMUM, value)
    tl.store(target_ptr + element, value.to(target_ptr.dtype.element_ty), mask=element < SIZE)
