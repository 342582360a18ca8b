"""What a config.json may say, in which shapes, and which field is named when it cannot be served."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import MiniMaxM3VLConfig

from sglang_m3.config import ConfigError, M3Config, Rope
from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny.config import model_config

TINY = TinyConfig()
LAYERS = TINY.layers


def nested(**text: Any) -> dict[str, Any]:
    """The tiny checkpoint's config.json with other text fields; None removes one."""
    config = copy.deepcopy(model_config(TINY))
    config["text_config"] |= text
    return config


def with_sparse(**sparse: Any) -> dict[str, Any]:
    config = nested()
    config["text_config"]["sparse_attention_config"] |= sparse
    return config


def flat(**fields: Any) -> dict[str, Any]:
    return nested()["text_config"] | fields


def by_transformers() -> dict[str, Any]:
    """What transformers writes for the same checkpoint: flattened names, and `silu`."""
    return json.loads(MiniMaxM3VLConfig(**nested()).to_json_string())


def test_the_tiny_checkpoint_is_read_field_by_field() -> None:
    config = M3Config.read(nested())
    assert (config.hidden_size, config.vocab_size, config.head_dim) == (
        TINY.hidden,
        TINY.vocab,
        TINY.head_dim,
    )
    assert (config.num_attention_heads, config.num_key_value_heads) == (TINY.heads, TINY.kv_heads)
    assert config.rope == Rope(5e6, TINY.head_dim // 2, None)
    assert config.sparse_layers == config.moe_layers == (1, 2, 3, 4)
    assert config.dense_attention_layers == (0,)
    assert (config.topk_blocks, config.init_blocks, config.local_blocks) == (TINY.topk_blocks, 0, 1)
    assert (config.num_local_experts, config.num_experts_per_tok) == (TINY.experts, TINY.experts_per_token)
    assert (config.quant_method, config.dtype) == (None, "bfloat16")
    assert config.vision is not None and config.vision.hidden_size == TINY.vision_hidden


def test_a_flat_config_means_the_same_as_a_nested_one() -> None:
    expected = replace(M3Config.read(nested()), architecture="MiniMaxM3SparseForCausalLM", vision=None)
    assert M3Config.read(flat()) == expected


def test_transformers_flattened_names_mean_the_same() -> None:
    written = by_transformers()
    assert "sparse_attention_config" not in written["text_config"]
    assert written["text_config"]["hidden_act"] == "silu"
    assert M3Config.read(written) == M3Config.read(nested())


def test_a_configuration_object_is_read_like_the_file() -> None:
    assert M3Config.read(MiniMaxM3VLConfig(**nested())) == M3Config.read(nested())


@pytest.mark.parametrize(
    "config", [nested(), flat(), by_transformers()], ids=["nested", "flat", "transformers"]
)
def test_spelled_out_fields_read_back_as_the_same(config: dict[str, Any]) -> None:
    read = M3Config.read(config)
    again = M3Config.read({"architectures": ["MiniMaxM3SparseForCausalLM"], **read.text_fields()})
    assert again == replace(read, architecture=again.architecture, vision=None, dtype=None, quant_method=None)


@pytest.mark.parametrize(
    ("tokens", "init_blocks", "local_blocks"),
    [((0, 128), 0, 2), ((1, 0), 1, 1), ((128, 129), 1, 3), ((129, 1), 2, 2)],
)
def test_forced_tokens_are_counted_in_blocks_as_sglang_counts_them(
    tokens: tuple[int, int], init_blocks: int, local_blocks: int
) -> None:
    init_tokens, local_tokens = tokens
    config = with_sparse(
        sparse_init_block=None,
        sparse_local_block=None,
        sparse_init_tokens=init_tokens,
        sparse_local_tokens=local_tokens,
        sparse_topk_blocks=16,
    )
    read = M3Config.read(config)
    assert (read.init_blocks, read.local_blocks) == (init_blocks, local_blocks)


def test_further_fields_are_ignored_and_the_quantisation_is_read() -> None:
    """M3.1 carries its draft's fields and a mixed quantisation."""
    config = nested(dspark_block_size=7) | {"dflash_config": {"num_target_layers": 5}}
    config["quantization_config"] = {"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}
    assert M3Config.read(config) == replace(M3Config.read(nested()), quant_method="mxfp8")


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        (with_sparse(sparse_score_type="mean"), "sparse_score_type", r"is 'mean'; .*'max' only"),
        (with_sparse(sparse_score_type="lse"), "sparse_score_type", r"is 'lse'; .*'max' only"),
        (
            with_sparse(sparse_attention_freq=[0, 1, 1]),
            "sparse_attention_freq",
            "has 3 entries; num_hidden_layers",
        ),
        (with_sparse(sparse_attention_freq=[0, 1, 2, 1, 1]), "sparse_attention_freq", "is 2 for layer 2"),
        (with_sparse(sparse_attention_freq=[0] * LAYERS), "num_hidden_layers", "no layer with sparse"),
        (with_sparse(sparse_attention_freq=None), "sparse_attention_freq", "is missing"),
        (with_sparse(sparse_disable_index_value=None), "sparse_disable_index_value", "not supported"),
        (with_sparse(sparse_disable_index_value=[1]), "sparse_disable_index_value", "has 1 entries"),
        (
            with_sparse(sparse_init_block=4),
            "sparse_topk_blocks",
            r"sparse_init_block \(4 blocks\) and .* do not fit into",
        ),
        (with_sparse(sparse_local_block=5), "sparse_topk_blocks", "do not fit"),
        (
            with_sparse(sparse_init_block=None),
            "sparse_init_block",
            "is missing, and so is sparse_init_tokens",
        ),
        (with_sparse(sparse_block_size=64), "sparse_block_size", "is 64; sglang-m3 serves 128 only"),
        (with_sparse(sparse_num_index_heads=2), "sparse_num_index_heads", r"num_key_value_heads \(4\)"),
        (with_sparse(sparse_index_dim=64), "sparse_index_dim", r"must equal head_dim \(32\)"),
        (with_sparse(use_sparse_attention=False), "use_sparse_attention", "is False"),
        (nested(sparse_attention_config=None), "sparse_attention_config", "is missing"),
        (nested(sparse_attention_config=[]), "sparse_attention_config", "must be an object"),
        (nested(index_topk_blocks=8), "index_topk_blocks", "is 8, but .*sparse_topk_blocks is 4"),
        (nested(moe_layer_freq=[0, 1]), "moe_layer_freq", "has 2 entries"),
        (nested(mlp_layer_types=["sparse"] * LAYERS), "mlp_layer_types", "different layers"),
        (nested(layer_types=["minimax_m3_sparse"] * LAYERS), "layer_types", "different layers"),
        (
            nested(num_attention_heads=6),
            "num_attention_heads",
            r"\(6\) is not a multiple of num_key_value_heads",
        ),
        (nested(num_attention_heads="8"), "num_attention_heads", "must be an integer, not '8'"),
        (nested(num_attention_heads=True), "num_attention_heads", "must be an integer, not True"),
        (nested(hidden_size=0), "hidden_size", "is 0"),
        (nested(hidden_size=None), "hidden_size", "is missing"),
        (nested(hidden_size=2**40), "hidden_size", r"below 2\^31"),
        (nested(num_experts_per_tok=9), "num_experts_per_tok", r"is 9, more than num_local_experts \(8\)"),
        (nested(dense_intermediate_size=None), "dense_intermediate_size", "is missing"),
        (nested(hidden_act="silu"), "hidden_act", "is 'silu'; .*'swigluoai' only"),
        (nested(scoring_func="softmax"), "scoring_func", "is 'softmax'"),
        (nested(use_gemma_norm=False), "use_gemma_norm", "is False"),
        (nested(qk_norm_type="per_layer"), "qk_norm_type", "is 'per_layer'"),
        (nested(attention_output_gate=True), "attention_output_gate", "is True"),
        (nested(n_shared_experts=2), "n_shared_experts", "is 2"),
        (nested(tie_word_embeddings=True), "tie_word_embeddings", "is True"),
        (nested(rms_norm_eps=float("nan")), "rms_norm_eps", "is nan"),
        (nested(rotary_dim=15), "rotary_dim", r"is 15, but partial_rotary_factor \(0.5\) of head_dim \(32\)"),
        (nested(rotary_dim=None, partial_rotary_factor=None), "rotary_dim", "is missing"),
        (nested(rope_theta=None), "rope_theta", "is missing"),
        (nested() | {"hidden_size": 256}, "hidden_size", "is 256 beside text_config, but 128 in it"),
        (nested() | {"text_config": None}, "text_config", "is missing"),
        (nested() | {"text_config": "tiny"}, "text_config", "must be an object"),
        (nested() | {"vision_config": None}, "vision_config", "is missing"),
        (nested() | {"architectures": ["LlamaForCausalLM"]}, "architectures", "LlamaForCausalLM"),
        (nested() | {"architectures": None}, "architectures", "is None"),
        (nested() | {"quantization_config": "mxfp8"}, "quantization_config", "must be an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_with_the_fields_name(
    config: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        M3Config.read(config)
    assert caught.value.field.split(".")[-1] == field


def test_errors_say_where_the_field_is() -> None:
    with pytest.raises(ConfigError) as caught:
        M3Config.read(with_sparse(sparse_score_type="lse"))
    assert caught.value.field == "text_config.sparse_attention_config.sparse_score_type"


def test_the_released_sizes_are_read() -> None:
    config = M3Config.read(json.loads(released().read_text()))
    assert (config.hidden_size, config.num_hidden_layers, config.num_local_experts) == (6144, 60, 128)
    assert len(config.sparse_layers) == len(config.moe_layers) == 57


def released() -> Path:
    from sglang_m3.doctor import published

    return published.CONFIG
