"""Reads a checkpoint's sizes and experts."""

from __future__ import annotations

from typing import Any

from sglang_m3.config.fields import Fields
from sglang_m3.config.rope import read_rope
from sglang_m3.config.selection import SWITCH

CONSTANTS: dict[str, Any] = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "hidden_act": "swigluoai",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "n_shared_experts": 1,
}
"""Fields that only one value is served of."""

_MLP_TYPES = {"dense": False, "sparse": True}


def read_sizes(text: Fields) -> dict[str, Any]:
    """Sizes, heads and rotary embedding, as fields of `M3Config`."""
    heads, kv_heads = text.integer("num_attention_heads"), text.integer("num_key_value_heads")
    if heads % kv_heads:
        raise text.error(
            "num_attention_heads", f"({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    for name, served in CONSTANTS.items():
        if name != "hidden_act":
            text.fixed(name, served)
    # transformers computes the activation in place and writes "silu" beside its flattened names.
    if not (
        {"mlp_layer_types", "index_topk_blocks"} & set(text.names())
        and text.string("hidden_act", "") == "silu"
    ):
        text.fixed("hidden_act", "swigluoai")
    head_dim = text.integer("head_dim")
    rope = read_rope(text, head_dim)
    longest = text.integer("max_position_embeddings")
    if rope.scaling is not None:
        scaled = int(rope.scaling.original_tokens * rope.scaling.factor)
        if longest > scaled:
            raise text.error(
                "max_position_embeddings",
                f"is {longest}, but YaRN reaches {scaled} tokens: original_max_position_embeddings "
                f"{rope.scaling.original_tokens} * factor {rope.scaling.factor:g}",
            )
        longest = scaled
    return {
        "hidden_size": text.integer("hidden_size"),
        "vocab_size": text.integer("vocab_size"),
        "num_hidden_layers": text.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": longest,
        "rms_norm_eps": text.number("rms_norm_eps"),
        "rope": rope,
    }


def read_experts(text: Fields) -> dict[str, Any]:
    """Experts and MLPs, as fields of `M3Config`."""
    layers = text.integer("num_hidden_layers")
    moe_layers = text.per_layer("moe_layer_freq", layers, SWITCH, None)
    if moe_layers is None:
        moe_layers = text.per_layer("mlp_layer_types", layers, _MLP_TYPES, tuple(range(layers)))
    elif "mlp_layer_types" in text and moe_layers != text.per_layer("mlp_layer_types", layers, _MLP_TYPES):
        raise text.error("mlp_layer_types", "and moe_layer_freq name different layers")
    experts = text.integer("num_local_experts", None)
    if experts is None:
        experts = text.integer("num_experts", None)
    if experts is None:
        raise text.error("num_local_experts", "is missing")
    per_token = text.integer("num_experts_per_tok")
    if per_token > experts:
        raise text.error("num_experts_per_tok", f"is {per_token}, more than num_local_experts ({experts})")
    width = text.integer("intermediate_size")
    return {
        "intermediate_size": width,
        "shared_intermediate_size": text.integer("shared_intermediate_size", width),
        "dense_intermediate_size": text.integer(
            "dense_intermediate_size", None if len(moe_layers) == layers else ...
        ),
        "num_local_experts": experts,
        "num_experts_per_tok": per_token,
        "routed_scaling_factor": text.number("routed_scaling_factor", 1.0),
        "swiglu_alpha": text.number("swiglu_alpha"),
        "swiglu_limit": text.number("swiglu_limit"),
        "moe_layers": moe_layers,
    }
