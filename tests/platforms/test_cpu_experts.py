"""The experts' activation on the CPU: M3's own, and nobody else's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from m3_kernels.reference.swiglu_oai import swiglu_oai
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from torch import Tensor

from sglang_m3.platforms.cpu_experts import around_moe_forward_native

ALPHA, LIMIT = 1.702, 7.0


def unreachable(*_: object) -> Tensor:
    raise AssertionError("SGLang's own code must not compute M3's experts")


def test_values_beyond_the_limit_are_clamped_gate_above_only_and_up_on_both_sides() -> None:
    gate, up = torch.tensor([-30.0, 9.0, 0.5]), torch.tensor([8.0, -9.0, 100.0])
    got = swiglu_oai(torch.cat([gate, up]), alpha=ALPHA, limit=LIMIT)
    clamped_gate, clamped_up = torch.tensor([-30.0, 7.0, 0.5]), torch.tensor([7.0, -7.0, 7.0])
    want = (clamped_up + 1) * clamped_gate / (1 + torch.exp(-ALPHA * clamped_gate))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_experts_equal_a_loop_over_tokens(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    experts, hidden, inner, topk = 5, 12, 9, 2
    layer = SimpleNamespace(
        w13_weight=torch.randn(experts, 2 * inner, hidden, generator=generator) * 2,
        w2_weight=torch.randn(experts, hidden, inner, generator=generator),
        _minimax_activation="swigluoai",
    )
    x = torch.randn(tokens, hidden, generator=generator) * 2
    ids = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
    weights = torch.rand(tokens, topk, generator=generator)
    config = MoeRunnerConfig(
        activation="silu", gemm1_alpha=ALPHA, gemm1_clamp_limit=LIMIT, gate_up_interleaved=False
    )
    got = around_moe_forward_native(unreachable, layer, x, (weights, ids, None), config)
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for choice in range(topk):
            expert = int(ids[token, choice])
            gate_up = layer.w13_weight[expert].double() @ x[token].double()
            gate, up = gate_up[:inner].clamp(max=LIMIT), gate_up[inner:].clamp(-LIMIT, LIMIT)
            inside = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
            want[token] += weights[token, choice] * (layer.w2_weight[expert].double() @ inside)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        MoeRunnerConfig(activation="silu"),
        MoeRunnerConfig(activation="silu", gemm1_alpha=ALPHA),
        MoeRunnerConfig(activation="situ", gemm1_alpha=4.0, gate_up_interleaved=False),
    ],
    ids=["plain SiLU", "interleaved", "another activation"],
)
def test_other_models_keep_sglangs_experts(config: MoeRunnerConfig) -> None:
    answer = torch.ones(1)
    assert around_moe_forward_native(lambda *_: answer, None, None, None, config) is answer
