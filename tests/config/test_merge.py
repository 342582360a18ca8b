"""`--json-model-override-args`: merged where it belongs, refused by name where it does not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs import model_config as sglang_model_config
from sglang.srt.utils.hf_transformers import config as sglang_config
from transformers import PretrainedConfig

from sglang_m3 import hardware
from sglang_m3.config import ConfigError, M3Config
from sglang_m3.config.merge import around_get_config, around_model_config, merge
from tests.config.test_m3_config import by_transformers, flat, nested


def test_a_nested_override_leaves_its_neighbours_alone() -> None:
    config = nested()
    override = {"text_config": {"sparse_attention_config": {"sparse_topk_blocks": 3}, "rms_norm_eps": 1e-5}}
    merged = merge(config, override)
    text = merged["text_config"]
    assert text["rms_norm_eps"] == 1e-5
    assert text["sparse_attention_config"]["sparse_topk_blocks"] == 3
    text["rms_norm_eps"], text["sparse_attention_config"]["sparse_topk_blocks"] = 1e-6, 4
    assert merged == config == nested()


@pytest.mark.parametrize(
    ("config", "override"),
    [
        (nested(), {"image_seq_length": 100}),
        (nested(), {"architectures": ["MiniMaxM3SparseForCausalLM"]}),
        (nested(), {"quantization_config": {"quant_method": "mxfp8", "anything": 1}}),
        (nested(), {"vision_config": {"image_size": 672}}),
        (nested(), {"text_config": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}}),
        (nested(rope_scaling={"rope_type": "yarn", "factor": 2.0}), {"text_config": {"rope_scaling": None}}),
        (nested(), {"text_config": {"moe_layer_freq": [1, 1, 1, 1, 1]}}),
        (flat(), {"sparse_attention_config": {"sparse_topk_blocks": 3}}),
        (flat(), {"max_position_embeddings": 4096}),
        (nested() | {"private_field": 1}, {"private_field": 2}),
        (nested(), {}),
    ],
    ids=lambda value: "" if "architectures" in value else str(value),
)
def test_right_level_overrides_are_taken(config: dict[str, Any], override: dict[str, Any]) -> None:
    def check(merged: Any, wanted: Any) -> None:
        if isinstance(wanted, dict):
            for name, value in wanted.items():
                check(merged[name], value)
        else:
            assert merged == wanted

    check(merge(config, override), override)


@pytest.mark.parametrize(
    ("config", "override", "message"),
    [
        (
            nested(),
            {"max_position_embeddings": 4096},
            "max_position_embeddings is not a field of the top level but of text_config: pass .*"
            '\'{"text_config": {"max_position_embeddings": 4096}}\'',
        ),
        (nested(), {"rope_scaling": {"factor": 2}}, r"rope_scaling is not .* but of text_config"),
        (
            nested(),
            {"text_config": {"sparse_topk_blocks": 3}},
            r"text_config\.sparse_topk_blocks is not .* but of text_config\.sparse_attention_config",
        ),
        (
            nested(),
            {"text_config": {"image_token_index": 3}},
            "image_token_index is not .* but of the top level",
        ),
        (nested(), {"num_hiden_layers": 3}, "num_hiden_layers in .* did you mean num_hidden_layers"),
        (
            nested(),
            {"text_config": {"num_hiden_layers": 3}},
            r"text_config\.num_hiden_layers in .* did you mean",
        ),
        (
            nested(),
            {"text_config": {"sparse_attention_config": {"topk": 3}}},
            r"sparse_attention_config\.topk in",
        ),
        (nested(), {"text_config": 3}, "text_config is an object; .* gives 3"),
        (nested(), {"text_config": {"hidden_size": {}}}, "hidden_size is a plain value; .* gives {}"),
        (flat(), {"text_config": {"hidden_size": 3}}, "text_config in .* is not a field"),
        (nested(), [], "must be an object"),
    ],
    ids=lambda value: "" if isinstance(value, dict) and "architectures" in value else str(value)[:60],
)
def test_wrong_level_and_unknown_names_are_refused(
    config: dict[str, Any], override: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        merge(config, override)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's `get_config` as a server has it."""
    original = sglang_config.get_config

    def get_config(*args: Any, **kwargs: Any) -> Any:
        return around_get_config(original, *args, **kwargs)

    monkeypatch.setattr(sglang_model_config, "get_config", get_config)
    return get_config


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_sglangs_model_configuration_takes_a_nested_override(hooked: Any, tmp_path: Path) -> None:
    override = {
        "text_config": {
            "sparse_attention_config": {"sparse_topk_blocks": 3},
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
            "max_position_embeddings": 2048,
        }
    }
    config = sglang_model_config.ModelConfig(
        written(tmp_path, nested()), model_override_args=json.dumps(override)
    )
    assert config.hf_text_config.num_hidden_layers == 5
    assert config.context_len == 8192
    read = M3Config.read(config.hf_config)
    assert (read.topk_blocks, read.max_position_embeddings) == (3, 8192)
    assert read.rope.scaling is not None and read.rope.scaling.attention_factor == pytest.approx(1.5)
    parameters = config.hf_text_config.rope_parameters
    assert (parameters["rope_type"], parameters["original_max_position_embeddings"]) == ("yarn", 2048)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [(nested(), [1, 2, 3, 4]), (flat(), [1, 2, 3, 4]), (by_transformers(), [1, 2, 3, 4])],
    ids=["nested", "flat", "transformers"],
)
def test_sglang_finds_every_shape_spelled_out(
    hooked: Any, tmp_path: Path, shape: dict[str, Any], layers: list[int]
) -> None:
    config = sglang_model_config.ModelConfig(written(tmp_path, shape)).hf_config
    sparse = sglang_model_config.get_minimax_sparse_attention_config(config)
    assert sglang_model_config.get_minimax_sparse_layer_ids(sparse)[1] == layers
    text = getattr(config, "text_config", config)
    assert (text.hidden_act, text.moe_layer_freq) == ("swigluoai", [0, 1, 1, 1, 1])


def test_a_config_that_contradicts_itself_stops_sglangs_model_configuration(
    hooked: Any, tmp_path: Path
) -> None:
    folder = written(tmp_path, nested(num_attention_heads=6))
    with pytest.raises(ConfigError, match=r"text_config\.num_attention_heads \(6\) is not a multiple"):
        sglang_model_config.ModelConfig(folder)


def test_the_cached_configuration_is_not_touched(hooked: Any, tmp_path: Path) -> None:
    folder = written(tmp_path, nested())
    hooked(folder, trust_remote_code=False, model_override_args={"text_config": {"rms_norm_eps": 1e-4}})
    assert M3Config.read(hooked(folder, trust_remote_code=False)).rms_norm_eps == 1e-6


def test_other_models_are_read_by_sglang_alone() -> None:
    config = PretrainedConfig(architectures=["LlamaForCausalLM"])
    calls: list[tuple[Any, ...]] = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append((*args, kwargs))
        return config

    override = {"whatever": {"level": 1}}
    assert around_get_config(original, "path", True, model_override_args=override, x=1) is config
    assert calls[-1] == ("path", True, None, override, {"model_config_parser": "auto", "x": 1})


def test_a_quantisation_left_to_sglang_is_read_by_sglang_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    declared = {
        "quant_method": "mxfp8",
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
    }
    config = SimpleNamespace(
        architectures=["MiniMaxM3SparseForConditionalGeneration"], quantization_config=declared
    )
    assert around_get_config(lambda *_, **__: config, "path", True) is config


def test_the_flag_decides_what_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang makes a model's configuration knowing `--quantization`; its reading of config.json does not."""
    monkeypatch.setattr(hardware, "target", lambda: "sm90")
    read: dict[str | None, bool] = {}

    def model_config(_: Any, path: str, *, quantization: str | None) -> None:
        config = PretrainedConfig(**nested())
        again = around_get_config(lambda *_, **__: config, path, True)
        read[quantization] = again is not config

    for quantization in (None, "mxfp8", "minimax_m3_nvfp4", "modelopt_mixed"):
        around_model_config(model_config, None, "path", quantization=quantization)
    assert read == {None: True, "mxfp8": True, "minimax_m3_nvfp4": False, "modelopt_mixed": False}
