"""The experts of a mixture-of-experts layer on the CPU, with M3's activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from m3_kernels.reference.swiglu_oai import swiglu_oai
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from torch import Tensor
from torch.nn import functional


def around_moe_forward_native(
    original: Callable[..., Tensor],
    layer: torch.nn.Module,
    x: Tensor,
    topk_output: Any,
    moe_runner_config: MoeRunnerConfig,
) -> Tensor:
    """Around `moe_forward_native`, which takes gate and up as interleaved whenever a layer has an alpha.

    M3's layers, which its model file marks, are computed here; all others go to SGLang's code.
    """
    config = moe_runner_config
    if getattr(layer, "_minimax_activation", None) != "swigluoai":
        return original(layer, x, topk_output, moe_runner_config)
    assert config.activation == "silu" and not config.gate_up_interleaved
    assert not config.apply_router_weight_on_input and config.gemm1_alpha is not None
    assert config.gemm1_clamp_limit is not None
    weights, expert_ids, _ = topk_output
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(layer.w13_weight.shape[0]):
        token, choice = torch.where(expert_ids == expert)
        if token.numel() == 0:
            continue
        hidden = functional.linear(x[token], layer.w13_weight[expert])
        hidden = swiglu_oai(hidden, alpha=config.gemm1_alpha, limit=config.gemm1_clamp_limit)
        hidden = functional.linear(hidden, layer.w2_weight[expert])
        out.index_add_(0, token, hidden.to(out.dtype) * weights[token, choice][:, None])
    return out.to(x.dtype)
