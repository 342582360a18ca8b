"""The routed experts of a layer with MXFP8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from m3_kernels.reference.mxfp8_linear import mxfp8_linear
from m3_kernels.reference.swiglu_oai import swiglu_oai


def mxfp8_experts(
    x: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    alpha: float,
    limit: float,
    first_expert: int,
    model_experts: int | None = None,
) -> Tensor:
    """Sum over each token's chosen experts of this rank of weight * w2(SwiGLU-OAI(w13(x))).

    Args:
        x: `[M, K]` bfloat16 (or float32, float64), M may be 0.
        w13: `[E, 2 * I, K]` float8_e4m3fn; the gate half first, not interleaved. K and I multiples of 32.
        w13_scale: `[E, 2 * I, K // 32]` uint8.
        w2: `[E, K, I]` float8_e4m3fn.
        w2_scale: `[E, K, I // 32]` uint8.
        topk_ids: `[M, topk]` int32 or int64, ids among the experts of all ranks. This rank has
            `first_expert` to `first_expert + E - 1`; every other id, -1 included, contributes nothing.
        topk_weights: `[M, topk]` float32, applied to the experts' outputs; never read for another rank's ids.
        alpha, limit: of `swiglu_oai`.
        model_experts: experts of all ranks. Only speed depends on it.

    Returns:
        `[M, K]` in `x`'s dtype, zeros for tokens without an expert here. Everything between is float32
        (float64 where `x` is float64), with one rounding at the end. Experts that no token chose are not
        read. Reads the ids on the host.

    Raises:
        ValueError: `dequantize_mxfp8` refuses a weight.

    Source: transformers `minimax_m3_vl`, SGLang `swigluoai`.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    inputs = x.to(compute)
    out = torch.zeros_like(inputs)
    for expert in range(w13.shape[0]):
        token, choice = torch.where(topk_ids == first_expert + expert)
        if token.numel() == 0:
            continue
        gate_up = mxfp8_linear(inputs[token], w13[expert], w13_scale[expert])
        hidden = swiglu_oai(gate_up, alpha=alpha, limit=limit)
        routed = mxfp8_linear(hidden, w2[expert], w2_scale[expert])
        out.index_add_(0, token, routed * topk_weights[token, choice].to(compute)[:, None])
    return out.to(x.dtype)
