"""Which tensors an M3 checkpoint has, and where each of them goes in the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from m3_kernels.reference.quantize_mxfp8 import VALUES_PER_SCALE

from sglang_m3.config import M3Config, VisionConfig

SCALE_SUFFIX = "_scale_inv"
"""Appended to the name of an MXFP8 weight: the name of its scales, in checkpoints and parameters alike."""

DRAFT_TENSORS = re.compile(r"(language_model\.)?(model\.)?(mtp|dspark)\.")
"""Draft heads that a checkpoint may bring along; the main model has no place for them."""


@dataclass(frozen=True)
class Destination:
    """Where one checkpoint tensor goes.

    Attributes:
        parameter: name of the model's parameter.
        shape: of the checkpoint tensor, before it is split over ranks.
        shard: which part of a merged parameter, as its weight loader calls it; None for the whole of it.
        expert: number of the routed expert, None for everything else.
    """

    parameter: str
    shape: tuple[int, ...]
    shard: str | int | None = None
    expert: int | None = None

    @property
    def quantisable(self) -> bool:
        """Whether the weight, or the weight of these scales, is a linear layer's or an expert's."""
        layer = self.parameter.removesuffix(SCALE_SUFFIX)
        return (
            layer.startswith("model.layers.")
            and len(self.shape) == 2
            and not layer.endswith(".mlp.gate.weight")
        )

    def scales(self) -> Destination:
        """Where the scales of an MXFP8 weight go: one per 32 values of the last dimension."""
        shape = (*self.shape[:-1], -(-self.shape[-1] // VALUES_PER_SCALE))
        return replace(self, parameter=self.parameter + SCALE_SUFFIX, shape=shape)


WeightMap = dict[str, Destination]
"""Checkpoint name -> destination. MXFP8 scales are not in it: they follow from their weight."""

Entry = tuple[str, Destination]


def checkpoint_weights(config: M3Config) -> WeightMap:
    """All tensors of a checkpoint with or without a vision half, drafts and MXFP8 scales apart."""
    text = dict(_text(config))
    if config.vision is None:
        return text
    nested = {f"language_model.{name}": to for name, to in text.items()}
    return nested | dict(_vision(config.vision, config.hidden_size))


def find(weights: WeightMap, name: str) -> Destination | None:
    """The destination of a tensor, scales included; None for a name that no M3 checkpoint has."""
    found = weights.get(name)
    if found is None and name.endswith(SCALE_SUFFIX):
        weight = weights.get(name.removesuffix(SCALE_SUFFIX))
        found = weight.scales() if weight is not None and len(weight.shape) == 2 else None
    return found


def value_count(weights: WeightMap) -> int:
    """Values of all tensors together."""
    return sum(prod(to.shape) for to in weights.values())


def _text(config: M3Config) -> Iterator[Entry]:
    embedding = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", Destination("model.embed_tokens.weight", embedding)
    for layer in range(config.num_hidden_layers):
        yield from _layer(config, layer)
    yield "model.norm.weight", Destination("model.norm.weight", (config.hidden_size,))
    yield "lm_head.weight", Destination("lm_head.weight", embedding)


def _layer(config: M3Config, layer: int) -> Iterator[Entry]:
    hidden = config.hidden_size
    path = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{path}.{norm}.weight", Destination(f"{path}.{norm}.weight", (hidden,))
    yield from _attention(config, f"{path}.self_attn", sparse=layer in config.sparse_layers)
    if layer not in config.moe_layers:
        assert config.dense_intermediate_size is not None
        yield from _mlp(f"{path}.mlp", f"{path}.mlp", hidden, config.dense_intermediate_size)
        return
    there, here = f"{path}.block_sparse_moe", f"{path}.mlp"
    experts, inner = config.num_local_experts, config.intermediate_size
    yield f"{there}.gate.weight", Destination(f"{here}.gate.weight", (experts, hidden))
    bias = "e_score_correction_bias"
    yield f"{there}.{bias}", Destination(f"{here}.{bias}", (experts,))
    for expert in range(experts):
        # w1 is the gate, w3 the up projection.
        for shard, merged, shape in (
            ("w1", "w13_weight", (inner, hidden)),
            ("w3", "w13_weight", (inner, hidden)),
            ("w2", "w2_weight", (hidden, inner)),
        ):
            name = f"{there}.experts.{expert}.{shard}.weight"
            yield name, Destination(f"{here}.experts.{merged}", shape, shard, expert)
    shared = config.shared_intermediate_size
    yield from _mlp(f"{there}.shared_experts", f"{here}.shared_experts", hidden, shared)


def _attention(config: M3Config, path: str, *, sparse: bool) -> Iterator[Entry]:
    hidden, dim = config.hidden_size, config.head_dim
    heads = {
        "q": config.num_attention_heads,
        "k": config.num_key_value_heads,
        "v": config.num_key_value_heads,
    }
    for shard, count in heads.items():
        to = Destination(f"{path}.qkv_proj.weight", (count * dim, hidden), shard)
        yield f"{path}.{shard}_proj.weight", to
    output = (hidden, config.num_attention_heads * dim)
    yield f"{path}.o_proj.weight", Destination(f"{path}.o_proj.weight", output)
    for norm in ("q_norm", "k_norm"):
        yield f"{path}.{norm}.weight", Destination(f"{path}.{norm}.weight", (dim,))
    if not sparse:
        return
    for shard, count in {"q": config.num_key_value_heads, "k": 1}.items():
        to = Destination(f"{path}.index_qkv_proj.weight", (count * dim, hidden), shard)
        yield f"{path}.index_{shard}_proj.weight", to
    for norm in ("index_q_norm", "index_k_norm"):
        yield f"{path}.{norm}.weight", Destination(f"{path}.{norm}.weight", (dim,))


def _mlp(there: str, here: str, hidden: int, inner: int) -> Iterator[Entry]:
    merged = f"{here}.gate_up_proj.weight"
    yield f"{there}.gate_proj.weight", Destination(merged, (inner, hidden), 0)
    yield f"{there}.up_proj.weight", Destination(merged, (inner, hidden), 1)
    yield f"{there}.down_proj.weight", Destination(f"{here}.down_proj.weight", (hidden, inner))


def _vision(vision: VisionConfig, text_hidden: int) -> Iterator[Entry]:
    width, inner, patch = vision.hidden_size, vision.intermediate_size, vision.patch_size
    tower = "vision_tower.vision_model"
    kernel = (width, vision.num_channels, vision.temporal_patch_size, patch, patch)
    name = f"{tower}.embeddings.patch_embedding.weight"
    yield name, Destination(name, kernel)
    yield from _affine(f"{tower}.pre_layrnorm", f"{tower}.pre_layrnorm", (width,))
    for layer in range(vision.num_hidden_layers):
        path = f"{tower}.encoder.layers.{layer}"
        for norm in ("layer_norm1", "layer_norm2"):
            yield from _affine(f"{path}.{norm}", f"{path}.{norm}", (width,))
        for shard in "qkv":
            here = f"{path}.self_attn.qkv_proj"
            yield from _affine(f"{path}.self_attn.{shard}_proj", here, (width, width), shard)
        yield from _affine(f"{path}.self_attn.out_proj", f"{path}.self_attn.proj", (width, width))
        yield from _affine(f"{path}.mlp.fc1", f"{path}.fc1", (inner, width))
        yield from _affine(f"{path}.mlp.fc2", f"{path}.fc2", (width, inner))
    middle = vision.projector_hidden_size
    merged = text_hidden * vision.spatial_merge_size**2
    for projector, into in (("multi_modal_projector", width), ("patch_merge_mlp", merged)):
        here = f"vision_tower.{projector}"
        yield from _affine(f"{projector}.linear_1", f"{here}.linear_1", (middle, into))
        yield from _affine(f"{projector}.linear_2", f"{here}.linear_2", (text_hidden, middle))


def _affine(there: str, here: str, shape: tuple[int, ...], shard: str | None = None) -> Iterator[Entry]:
    yield f"{there}.weight", Destination(f"{here}.weight", shape, shard)
    yield f"{there}.bias", Destination(f"{here}.bias", shape[:1], shard)
