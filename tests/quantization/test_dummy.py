"""Dummy weights of M3: distinct, repeatable, of one size; other models' are SGLang's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_m3 import hardware
from sglang_m3.quantization.dummy import around_initialize_dummy_weights, fill
from sglang_m3.tiny import build
from tests.quantization import dummy_use
from tests.quantization.conftest import Load

NAMES = ("model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight")


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_loader import loader

    original = loader.initialize_dummy_weights
    monkeypatch.setattr(
        loader,
        "initialize_dummy_weights",
        lambda *args, **kwargs: around_initialize_dummy_weights(original, *args, **kwargs),
    )


@pytest.mark.usefixtures("hooked")
def test_quantised_dummy_weights_are_distinct_and_of_the_size_of_weights(load: Load, plain: Path) -> None:
    parameters = dict(load(plain, quantization="mxfp8", load_format="dummy").named_parameters())
    one, two = (parameters[name].float() for name in NAMES)
    assert not torch.equal(one, two)
    for name, value in parameters.items():
        if name.endswith("_scale_inv"):
            assert {118, 119, 120} == set(value.unique().tolist()), name
        elif value.dtype == torch.float8_e4m3fn:
            deviation = float(value.float().std()) / 256 * value.shape[-1] ** 0.5
            assert 0.8 < deviation < 1.2, name


@pytest.mark.skipif(hardware.target() != "cpu", reason="layers are built for the CPU")
def test_layers_choose_among_all_blocks_and_experts(tmp_path: Path) -> None:
    checkpoint = build(tmp_path / "tiny", dummy_use.SHAPE)
    used = dummy_use.use_of(dummy_use.by_plugin, checkpoint)
    assert list(used) == [1, 2, 3, 4]
    for layer, use in used.items():
        assert use.blocks == dummy_use.TOKENS // 128 and use.experts == dummy_use.SHAPE.experts, (layer, use)
        assert use.selections > 300 and use.tied == 0, (layer, use)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_are_the_same_in_every_run(dtype: torch.dtype) -> None:
    tensors = [torch.empty(37, 64, dtype=dtype) for _ in range(2)]
    for tensor in tensors:
        fill("name", tensor)
    assert torch.equal(*(tensor.view(torch.uint8) for tensor in tensors))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("LlamaForCausalLM", None), ("MiniMaxM3SparseForCausalLM", "minimax_m3_nvfp4")],
)
def test_other_models_are_left_to_sglang(name: str, quantization: str | None) -> None:
    model = type(name, (nn.Module,), {})()
    model.weight = nn.Parameter(torch.zeros(3))
    model.quant_config = quantization and SimpleNamespace(get_name=lambda: quantization)
    calls = []
    around_initialize_dummy_weights(lambda *args, **kwargs: calls.append((args, kwargs)), model, seed=3)
    assert calls == [((model,), {"seed": 3})] and not model.weight.any()
