"""The way of many tokens through SGLang's DeepGEMM wrapper, with a product in float64 in DeepGEMM's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from torch import Tensor
from torch.nn import Module

from tests.kernels.sm90 import REAL

from m3_kernels.triton import sm90_mxfp8_grouped  # isort: skip
from sglang_m3.quantization import deep_gemm  # isort: skip
from sglang_m3.quantization import layout as layout_module  # isort: skip
from sglang_m3.quantization.config import M3MxFp8Config  # isort: skip
from sglang_m3.quantization.layout import layout  # isort: skip
from tests.kernels.test_sm90_mxfp8 import relative  # isort: skip
from tests.kernels.test_sm90_mxfp8_grouped import ROUNDING, contiguous, masked, numbers_of  # isort: skip
from tests.quantization.test_ranks import ALPHA, LIMIT, load_experts, matrix, rank_of  # isort: skip

pytestmark = pytest.mark.skipif(REAL, reason="layers are built on the CPU platform")

EXPERTS, HIDDEN, INNER, TOPK, TOKENS = 4, 128, 256, 2, 19


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_M3_MXFP8", "fast")
    layout.cache_clear()
    yield
    layout.cache_clear()


@pytest.mark.parametrize("layout", ["masked", "contiguous"])
@pytest.mark.parametrize("load", ["plugin's model file"], indirect=True)
@pytest.mark.usefixtures("load", "fast")
def test_experts_of_many_tokens_are_those_of_few_up_to_rounded_activations(
    plain: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    used = []

    def noting(product: Callable[..., None]) -> Callable[..., None]:
        return lambda *given: (used.append(product.__name__), product(*given))

    monkeypatch.setattr(deep_gemm_wrapper, "grouped_gemm_nt_f8f8bf16_contig", noting(contiguous))
    monkeypatch.setattr(deep_gemm_wrapper, "grouped_gemm_nt_f8f8bf16_masked", noting(masked))
    if layout == "contiguous":
        monkeypatch.setattr(sm90_mxfp8_grouped, "masked_tokens", lambda *sizes: 0)
    generator = torch.Generator().manual_seed(5)
    shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
    weights = {name: [matrix(generator, *shape) for _ in range(EXPERTS)] for name, shape in shapes.items()}
    with rank_of(plain, 0, 1, 1):
        layer = FusedMoE(
            num_experts=EXPERTS,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            layer_id=0,
            top_k=TOPK,
            quant_config=M3MxFp8Config("plain"),
            prefix="layer.mlp.experts",
            gemm1_alpha=ALPHA,
            gemm1_clamp_limit=LIMIT,
            gate_up_interleaved=False,
        )
    load_experts(layer, weights, "plain")
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)]).int()
    ids[3] = -1
    gates = torch.rand(TOKENS, TOPK, generator=generator) + 0.1
    few = layer.quant_method.multiply_few(layer, x.double(), ids, gates)
    many = layer.quant_method.multiply_many(layer, x, ids, gates)
    assert relative(many, few) < 2.5 * ROUNDING and not many[3].any()
    assert used == [layout] * 2
    # A captured graph reads scales where they were, so an update of the weights must leave them there.
    places = {name: scales.data_ptr() for name, scales in layer.block_scales.items()}
    before = {name: scales.clone() for name, scales in layer.block_scales.items()}
    load_experts(layer, {name: [4 * m for m in matrices] for name, matrices in weights.items()}, "plain")
    layer.quant_method.process_weights_after_loading(layer)
    for name, scales in layer.block_scales.items():
        assert scales.data_ptr() == places[name]
        assert torch.equal(scales, 4 * before[name]), name


def test_linears_of_many_tokens_are_those_of_few_up_to_rounded_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def multiply(activations: tuple, weight: tuple, out: Tensor) -> None:
        scales = weight[1].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        out.copy_(numbers_of(activations) @ (weight[0].double() * scales).T)

    monkeypatch.setattr(deep_gemm_wrapper, "gemm_nt_f8f8bf16", multiply)
    generator = torch.Generator().manual_seed(6)
    value = torch.randn(256, 384, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 1, 2], [4, 0.25, 1]])
    x = torch.randn(9, 384, generator=generator).bfloat16()
    numbers = value.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert relative(deep_gemm.multiply(x, (value, scale)), x.double() @ numbers.T) < 1.5 * ROUNDING


def test_auto_is_fast_where_deep_gemm_is_there_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_m3 import hardware

    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", False)
    runner = SimpleNamespace(is_deep_gemm=lambda: True)
    monkeypatch.setattr(layout_module, "get_moe_runner_backend", lambda: runner)
    for asked, expected in (("auto", "exact"), ("exact", "exact")):
        monkeypatch.setenv("SGLANG_M3_MXFP8", asked)
        layout.cache_clear()
        assert layout() == expected
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    monkeypatch.setenv("SGLANG_M3_MXFP8", "auto")
    layout.cache_clear()
    assert layout() == "fast"
    runner.is_deep_gemm = lambda: False
    layout.cache_clear()
    assert layout() == "exact", "FP8 activations must be asked for by name"
    layout.cache_clear()


def test_the_number_of_tokens_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_m3.quantization.experts import M3MxFp8ExpertsMethod

    method = M3MxFp8ExpertsMethod(M3MxFp8Config("plain"), "layer.mlp.experts")
    layer = Module()
    layer.num_experts, layer.top_k, layer.block_scales = 128, 4, {"w13_weight": None}
    assert [method.takes_many(layer, tokens, on_gpu=True) for tokens in (1, 64, 65, 8192)] == [
        False,
        False,
        True,
        True,
    ]
    assert not method.takes_many(layer, 8192, on_gpu=False)
    layer.block_scales = None
    assert not method.takes_many(layer, 8192, on_gpu=True)


def test_linears_go_through_deep_gemm_where_it_measured_faster() -> None:
    assert [layout_module.takes_deep_gemm(tokens, 6144) for tokens in (1, 64, 65, 8192)] == [
        False,
        False,
        True,
        True,
    ]
    assert [layout_module.takes_deep_gemm(tokens, 1536) for tokens in (64, 65, 512, 513, 8191, 8192)] == [
        False,
        True,
        True,
        False,
        False,
        True,
    ]
