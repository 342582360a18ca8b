"""SGLang's fused CUDA kernels that the model uses where they apply; each has an unfused twin in the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.layer_boundary import is_dense_ffn_fully_dp
from sglang.srt.layers.layernorm import GemmaRMSNorm
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import Tensor

FUSED_HEAD_DIM, FUSED_ROTARY_DIM = 128, 64
"""Head sizes that SGLang's kernel for normalising and rotating is written for: the released model's."""

TINY_ROUTER_ROWS = 16
"""Rows up to which SGLang's small matrix product beats cuBLAS for the router."""


def norm_and_rotate_is_fused(weight: Tensor, head_dim: int, rotary_emb: Any) -> bool:
    """Whether `norm_and_rotate` does a layer with this projection weight."""
    return (
        weight.is_cuda
        and (head_dim, rotary_emb.rotary_dim) == (FUSED_HEAD_DIM, FUSED_ROTARY_DIM)
        and rotary_emb.is_neox_style
        and rotary_emb.cos_sin_cache.dtype == torch.float32
    )


def norm_and_rotate(
    projected: Tensor,
    heads: Sequence[tuple[GemmaRMSNorm | None, int]],
    rotary_emb: Any,
    positions: Tensor,
) -> None:
    """Normalise and rotate heads in place, in one launch.

    Args:
        projected: `[T, heads * 128]` bfloat16, contiguous.
        heads: runs of heads in order, at most four of them with a norm: the run's norm, or None for heads
            that stay as they are, and its length.
        positions: `[T]`.
    """
    from sglang.kernels.ops.attention.minimax_qknorm_rope import minimax_qknorm_rope_grouped

    ends = itertools.accumulate(count for _, count in heads)
    runs = [(norm, end - count, count) for (norm, count), end in zip(heads, ends) if norm is not None]
    cache, epsilon = rotary_emb.cos_sin_cache, runs[0][0].variance_epsilon
    groups = [(norm.weight, begin, count) for norm, begin, count in runs]
    minimax_qknorm_rope_grouped(projected, groups, cache, positions, epsilon)


def router_logits(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """`[T, hidden]` x `[experts, hidden]`, both bfloat16 on CUDA, to `[T, experts]` float32."""
    from sglang.kernels.ops.gemm.tiny_gemm import can_use_tiny_gemm, tiny_gemm_bf16

    small = hidden_states.shape[0] <= TINY_ROUTER_ROWS
    deterministic = get_exec().deterministic.enable_deterministic_inference
    if small and not deterministic and can_use_tiny_gemm(*weight.shape, max_m=TINY_ROUTER_ROWS):
        return tiny_gemm_bf16(hidden_states, weight, out_dtype=torch.float32, max_m=TINY_ROUTER_ROWS)
    return torch.mm(hidden_states, weight.t(), out_dtype=torch.float32)


def all_reduce_is_fused() -> bool:
    """Whether a layer's sum over ranks, residual and norm are one kernel: plain tensor parallelism."""
    parallel = get_parallel()
    return (
        torch.cuda.is_available()
        and parallel.attn_tp_size == parallel.tp_size
        and parallel.attn_cp_size == 1
        and parallel.pp_size == 1
        and not is_dp_attention_enabled()
        and not is_dense_ffn_fully_dp()
    )


def boundary_options(hidden_size: int) -> dict[str, Any]:
    """Options of a layer's two stage boundaries."""
    if not all_reduce_is_fused():
        return {}
    from sglang.srt.layers.layer_boundary.fusions.custom_all_reduce_fusion import CustomAllReduceFusion

    return {"fusions": CustomAllReduceFusion(hidden_size=hidden_size, defers_finalize=False)}


def register_all_reduce() -> None:
    """Give the fused sums their buffers, before graphs are captured."""
    if not all_reduce_is_fused():
        return
    from sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe import register_fused_all_reduce_comm

    # 4 MiB are 341 tokens of 6,144 bfloat16 values: decode and verify steps.
    register_fused_all_reduce_comm(max_push_size=4 << 20, max_push_blocks=512)
