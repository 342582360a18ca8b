"""The map of checkpoint tensors agrees with the released checkpoint and with the tiny one."""

from __future__ import annotations

from typing import Any

from sglang_m3.config import M3Config
from sglang_m3.models.weight_map import checkpoint_weights, find, value_count
from sglang_m3.tiny import TinyConfig
from sglang_m3.tiny.config import model_config
from sglang_m3.tiny.weights import tensor_specs


def tiny(**sizes: Any) -> M3Config:
    return M3Config.read(model_config(TinyConfig(**sizes)))


def text_only(**changes: Any) -> M3Config:
    """A tiny text-only checkpoint, with fields of its config.json changed."""
    text = model_config(TinyConfig())["text_config"]
    return M3Config.read(text | changes)


def released() -> M3Config:
    """The released checkpoint's sizes (config.json of MiniMaxAI/MiniMax-M3)."""
    config = model_config(
        TinyConfig(
            layers=60,
            dense_layers=3,
            hidden=6144,
            heads=64,
            kv_heads=4,
            head_dim=128,
            dense_intermediate=12288,
            expert_intermediate=3072,
            experts=128,
            experts_per_token=4,
            topk_blocks=16,
            vocab=200064,
            vision_layers=32,
            vision_hidden=1280,
            vision_heads=16,
        )
    )
    config["vision_config"]["intermediate_size"] = 5120
    return M3Config.read(config)


def test_the_released_checkpoint_has_as_many_tensors_and_values_as_the_map_says() -> None:
    # NVIDIA's Megatron-Bridge verification page counts both for revision 5094273 of the checkpoint.
    weights = checkpoint_weights(released())
    assert (len(weights), value_count(weights)) == (23_416, 427_040_140_160)


def test_the_tiny_checkpoint_has_exactly_the_tensors_of_the_map() -> None:
    config = TinyConfig(layers=7, dense_layers=2, experts=5, hidden=160, heads=10, kv_heads=5, head_dim=64)
    weights = checkpoint_weights(M3Config.read(model_config(config)))
    written = {spec.name: spec.shape for spec in tensor_specs(config)}
    assert {name: to.shape for name, to in weights.items()} == written


def test_no_two_tensors_go_to_the_same_place() -> None:
    places = [(to.parameter, to.shard, to.expert) for to in checkpoint_weights(tiny()).values()]
    assert len(set(places)) == len(places)


def test_sparse_attention_and_experts_are_independent_lists() -> None:
    text = model_config(TinyConfig())["text_config"]
    sparse = {"sparse_attention_freq": [0, 1, 0, 1, 1], "sparse_disable_index_value": [0, 1, 0, 1, 1]}
    names = checkpoint_weights(
        text_only(
            sparse_attention_config=text["sparse_attention_config"] | sparse, moe_layer_freq=[1, 0, 0, 1, 1]
        )
    )
    for layer, (sparse, experts) in enumerate([(0, 1), (1, 0), (0, 0), (1, 1), (1, 1)]):
        path = f"model.layers.{layer}"
        assert (f"{path}.self_attn.index_q_proj.weight" in names) == sparse
        assert (f"{path}.block_sparse_moe.gate.weight" in names) == experts
        assert (f"{path}.mlp.gate_proj.weight" in names) == (not experts)


def test_a_text_checkpoint_has_the_same_tensors_without_their_prefix() -> None:
    nested = [name for name in checkpoint_weights(tiny()) if name.startswith("language_model.")]
    assert set(checkpoint_weights(text_only())) == {name.removeprefix("language_model.") for name in nested}


def test_scales_go_beside_their_weight_one_per_32_values() -> None:
    weights = checkpoint_weights(text_only(dense_intermediate_size=288))
    down = find(weights, "model.layers.0.mlp.down_proj.weight_scale_inv")
    assert down is not None
    assert (down.parameter, down.shape) == ("model.layers.0.mlp.down_proj.weight_scale_inv", (128, 9))
    expert = find(weights, "model.layers.2.block_sparse_moe.experts.3.w3.weight_scale_inv")
    assert expert is not None
    assert (expert.parameter, expert.shard, expert.expert) == (
        "model.layers.2.mlp.experts.w13_weight_scale_inv",
        "w3",
        3,
    )
    assert find(weights, "model.norm.weight_scale_inv") is None
    assert find(weights, "model.layers.0.mlp.down_proj.weight_scale") is None
