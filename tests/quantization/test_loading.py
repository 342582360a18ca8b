"""Both ways in give the converter's bytes, and what is not the format is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from m3_kernels.reference.coarsen_mxfp8 import coarsen_mxfp8
from torch import Tensor

from sglang_m3.models.loading import WeightError
from sglang_m3.quantization.layout import layout
from sglang_m3.quantization.loading import LayerTensors
from sglang_m3.quantize.shard import same_bytes
from sglang_m3.tiny import TinyConfig, build
from tests.quantization.conftest import SMALL, Load
from tests.quantization.edited import Edit, edited
from tests.quantize.checkpoints import tensors_of

TEXT = "language_model.model.layers"
MOE = f"{TEXT}.1.block_sparse_moe"


def expected_parameters(tensors: dict[str, Tensor], config: TinyConfig = SMALL) -> dict[str, Tensor]:
    """What the quantised parameters must hold, by name, from a converted checkpoint's tensors."""
    found: dict[str, Tensor] = {}
    merged = {
        "self_attn.qkv_proj": [f"self_attn.{name}_proj" for name in "qkv"],
        "self_attn.index_qkv_proj": ["self_attn.index_q_proj", "self_attn.index_k_proj"],
        "self_attn.o_proj": ["self_attn.o_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down_proj": ["mlp.down_proj"],
        "mlp.shared_experts.gate_up_proj": [
            f"block_sparse_moe.shared_experts.{name}_proj" for name in ("gate", "up")
        ],
        "mlp.shared_experts.down_proj": ["block_sparse_moe.shared_experts.down_proj"],
    }
    for layer in range(config.layers):
        for suffix in ("weight", "weight_scale_inv"):
            for ours, theirs in merged.items():
                parts = [tensors.get(f"{TEXT}.{layer}.{name}.{suffix}") for name in theirs]
                if None not in parts:
                    found[f"model.layers.{layer}.{ours}.{suffix}"] = torch.cat(parts)
            if f"{TEXT}.{layer}.block_sparse_moe.experts.0.w1.{suffix}" not in tensors:
                continue
            w1, w2, w3 = (
                torch.stack(
                    [
                        tensors[f"{TEXT}.{layer}.block_sparse_moe.experts.{e}.{w}.{suffix}"]
                        for e in range(config.experts)
                    ]
                )
                for w in ("w1", "w2", "w3")
            )
            found[f"model.layers.{layer}.mlp.experts.w13_{suffix}"] = torch.cat([w1, w3], 1)
            found[f"model.layers.{layer}.mlp.experts.w2_{suffix}"] = w2
    return found


@pytest.mark.parametrize("way", ["converted checkpoint", "BF16 quantised while loading"])
def test_both_ways_in_hold_the_converters_bytes(load: Load, plain: Path, converted: Path, way: str) -> None:
    model = load(converted) if way == "converted checkpoint" else load(plain, quantization="mxfp8")
    parameters = dict(model.named_parameters())
    expected = expected_parameters(tensors_of(converted))
    assert len(expected) == 2 * (2 + 2 + 3 + 2 + 2), sorted(expected)
    wrong = [name for name, value in expected.items() if not same_bytes(parameters[name].data, value)]
    assert not wrong
    of_format = {
        name
        for name, value in parameters.items()
        if value.dtype in (torch.float8_e4m3fn, torch.uint8) and value.numel()
    }
    assert of_format == expected.keys(), "nothing but the format's tensors is quantised"


def test_layers_that_a_checkpoint_leaves_unquantised_stay_as_they_are(
    load: Load, plain: Path, converted: Path, tmp_path: Path
) -> None:
    source = tensors_of(plain)
    left = [f"{TEXT}.1.self_attn.index_{part}_proj.weight" for part in "qk"] + [
        f"{TEXT}.1.self_attn.o_proj.weight"
    ]

    def unquantise(tensors: dict[str, Tensor]) -> None:
        for name in left:
            tensors[name] = source[name]
            del tensors[f"{name}_scale_inv"]

    parameters = dict(load(edited(converted, tmp_path / "mixed", unquantise)).named_parameters())
    index = torch.cat([source[left[0]], source[left[1]]]).float()
    assert same_bytes(parameters["model.layers.1.self_attn.index_qkv_proj.weight"].data, index)
    assert same_bytes(parameters["model.layers.1.self_attn.o_proj.weight"].data, source[left[2]].float())
    rest = {
        name: value
        for name, value in expected_parameters(tensors_of(tmp_path / "mixed")).items()
        if value.dtype in (torch.float8_e4m3fn, torch.uint8)
    }
    assert len(rest) == 22 - 4
    assert not [name for name, value in rest.items() if not same_bytes(parameters[name].data, value)]


def change(name: str, how: object) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = how(tensors[name])

    return edit


def with_byte(tensor: Tensor, byte: int) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[2, 1] = byte
    return changed


def drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


Q, OUT = f"{TEXT}.1.self_attn.q_proj.weight", f"{TEXT}.1.self_attn.o_proj.weight"
W2 = f"{MOE}.experts.1.w2.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            change(f"{Q}_scale_inv", Tensor.float),
            rf"{Q}_scale_inv is torch.float32, MXFP8's scales are uint8",
        ),
        (change(f"{W2}_scale_inv", Tensor.float), rf"{W2}_scale_inv is torch.float32"),
        (change(f"{OUT}_scale_inv", Tensor.char), rf"{OUT}_scale_inv is torch.int8"),
        (
            change(f"{OUT}_scale_inv", lambda s: s[:, :-1]),
            rf"{OUT}_scale_inv (has shape .* 8 columns|is 96x7, not 96x8)",
        ),
        (
            change(f"{W2}_scale_inv", lambda s: s[:-1]),
            rf"{W2}_scale_inv (has shape .* 96 rows|is 95x2, not 96x2)",
        ),
        (change(Q, lambda w: w[:-32]), rf"{Q} (has shape .* 256 rows|is 224x96, not 256x96)"),
        (change(Q, lambda w: w.view(torch.int8)), rf"{Q} is torch.int8"),
        (drop(f"{OUT}_scale_inv"), rf"{OUT} is float8_e4m3fn without scales|missing: {OUT}_scale_inv"),
        (drop(f"{W2}_scale_inv"), rf"{W2} is float8_e4m3fn without scales|missing: {W2}_scale_inv"),
        (drop(Q), rf"{Q}_scale_inv are scales without a weight|missing: {Q}"),
        (change(OUT, Tensor.bfloat16), rf"{OUT}_scale_inv are scales of a weight that is torch.bfloat16"),
        (change(Q, Tensor.bfloat16), rf"{Q}.* one format|{Q}_scale_inv are scales of a weight"),
        (change(W2, lambda w: with_byte(w, 0xFF)), r"experts.w2: a value is NaN"),
        (change(OUT, lambda w: with_byte(w, 0x7F)), rf"{OUT}: a value is NaN"),
        (change(f"{OUT}_scale_inv", lambda s: with_byte(s, 255)), rf"{OUT}: a scale is NaN or above"),
        (change(W2, Tensor.bfloat16), rf"{W2} is torch.bfloat16: experts .* must be quantised"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_the_format_is_refused_by_name(
    load: Load, converted: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    with pytest.raises(WeightError, match=message):
        load(edited(converted, tmp_path / "wrong", edit))


def test_one_layer_in_two_formats_is_refused(load: Load, converted: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[Q] = tensors[Q].bfloat16()
        del tensors[f"{Q}_scale_inv"]

    with pytest.raises(WeightError, match=rf"{Q} is torch.bfloat16 and .* is MXFP8: .* one format"):
        load(edited(converted, tmp_path / "wrong", edit))


def test_mxfp8_tensors_behind_a_config_without_the_method_are_refused(
    load: Load, converted: Path, tmp_path: Path
) -> None:
    wrong = edited(converted, tmp_path / "wrong", lambda tensors: None, declared=False)
    with pytest.raises(WeightError, match="declares no quantization_config"):
        load(wrong, quantization="mxfp8")


@pytest.mark.parametrize("name", [Q, W2])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_have_no_mxfp8_are_refused_while_quantising(
    load: Load, plain: Path, tmp_path: Path, name: str, value: float
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name][3, 5] = value

    with pytest.raises(WeightError, match=rf"{name} has infinite or NaN values"):
        load(edited(plain, tmp_path / "wrong", edit), quantization="mxfp8")


def test_fast_coarsens_what_blocks_divide_and_says_how_much_changed(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shape = TinyConfig(layers=2, vocab=512, vision_layers=1, experts=3, quantize="mxfp8")
    checkpoint = build(tmp_path / "blocks", shape)
    monkeypatch.setenv("SGLANG_M3_MXFP8", "fast")
    layout.cache_clear()
    with caplog.at_level("INFO", logger="sglang_m3.quantization.layout"):
        parameters = dict(load(checkpoint).named_parameters())
    layout.cache_clear()
    assert "kept fast" in caplog.text
    assert f"{MOE}.experts.w13: " in caplog.text and "values changed" in caplog.text
    before = expected_parameters(tensors_of(checkpoint))
    for name in [name for name in before if name.endswith(("weight", "w13_weight", "w2_weight"))]:
        weight, scale = before[name].clone(), before[f"{name}_scale_inv"].clone()
        if "index_qkv" in name:
            assert weight.shape[0] % 128, "the case of a weight that blocks do not divide"
        else:
            for matrix in [(weight, scale)] if weight.dim() == 2 else zip(weight, scale):
                coarsen_mxfp8(*matrix)
        assert same_bytes(parameters[name].data, weight), name
        assert same_bytes(parameters[f"{name}_scale_inv"].data, scale), name


def test_a_refused_tensor_that_comes_again_right_is_forgotten() -> None:
    tensors = LayerTensors("mxfp8")
    value, scale = torch.zeros(8, 64, dtype=torch.float8_e4m3fn), torch.zeros(8, 2, dtype=torch.uint8)
    tensors.arrive("a.weight", value, 64, 8)
    tensors.arrive("a.weight_scale_inv", scale, 64, 8)
    tensors.check_complete()
    for wrong in (value.bfloat16(), value[:4], value.view(torch.int8)):
        with pytest.raises(WeightError, match=r"a\.weight"):
            tensors.arrive("a.weight", wrong, 64, 8)
        with pytest.raises(WeightError, match=r"a\.weight"):
            tensors.check_complete()
        tensors.arrive("a.weight", value, 64, 8)
        tensors.arrive("a.weight_scale_inv", scale, 64, 8)
        tensors.check_complete()


def test_columns_that_scales_do_not_divide_are_refused_before_weights_load(
    load: Load, tmp_path: Path
) -> None:
    narrow = build(tmp_path / "narrow", replace(SMALL, hidden=72))
    with pytest.raises(
        ValueError, match=r"self_attn\.qkv_proj\.weight: 72 of 72 columns .* multiples of 32$"
    ):
        load(narrow, quantization="mxfp8")
