"""Products of many tokens through DeepGEMM, which SGLang compiles and warms up."""

from __future__ import annotations

import torch
from torch import Tensor

Weight = tuple[Tensor, Tensor]
"""Weight `[..., N, K]` float8_e4m3fn, and its blocks' scales `[..., N // 128, K // 128]`, float32."""


def multiply(x: Tensor, weight: Weight) -> Tensor:
    """`[M, K]` bfloat16 -> `[M, N]`, with activations in E4M3, one scale per row and 128 columns."""
    from m3_kernels.triton.sm90_mxfp8_grouped import quantize_rows
    from sglang.srt.layers.deep_gemm_wrapper import gemm_nt_f8f8bf16

    out = torch.empty(x.shape[0], weight[0].shape[0], dtype=x.dtype, device=x.device)
    gemm_nt_f8f8bf16(quantize_rows(x.contiguous(), None), weight, out)
    return out


def grouped_experts(
    x: Tensor,
    w13: Weight,
    w2: Weight,
    ids: Tensor,
    weights: Tensor,
    *,
    alpha: float,
    limit: float,
    model_experts: int,
) -> Tensor:
    """The experts of this rank, `ids` being the rank's own; see `m3_kernels` `grouped_experts`."""
    from m3_kernels.triton.sm90_mxfp8_grouped import GroupedProducts
    from m3_kernels.triton.sm90_mxfp8_grouped import grouped_experts as run
    from sglang.srt.layers.deep_gemm_wrapper import (
        grouped_gemm_nt_f8f8bf16_contig,
        grouped_gemm_nt_f8f8bf16_masked,
    )

    products = GroupedProducts(grouped_gemm_nt_f8f8bf16_masked, grouped_gemm_nt_f8f8bf16_contig)
    return run(
        x.contiguous(),
        w13,
        w2,
        ids,
        weights,
        products,
        alpha=alpha,
        limit=limit,
        first_expert=0,
        model_experts=model_experts,
    )
