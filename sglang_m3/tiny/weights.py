"""Tensors of a tiny checkpoint: the released names, and values that make every part of the model matter.

Scales, and why:
- Activations stay O(1), embeddings (exact in every implementation) are a good part of the residual, and
  logits have a standard deviation of 1.5. Two float32 implementations then agree to a few 1e-6 in
  log-probability.
- q and k gains spread attention scores by about 1.5, so a row attends to a few dozen tokens: losing one
  selected block moves log-probabilities by about 0.1, which an almost uniform attention would hide.
- Index gains put most of a score on a few channels. Block maxima then spread widely, and two implementations
  that differ in the last bits still choose the same blocks (near-ties are rare).
- Output rows of the markers are damped, so that sampled text carries no stray markers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt

import numpy as np
import torch

from sglang_m3.tiny.config import PATCH_SIZE, SPATIAL_MERGE, TEMPORAL_PATCH, TinyConfig
from sglang_m3.tiny.vocabulary import MARKERS

INDEX_CHANNEL_GAIN = 3.0
"""Added to the index norm weights of `_index_channels`."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the checkpoint: values are uniform with this mean and standard deviation."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    float32: bool = False
    """Stored in float32 whatever the checkpoint's dtype, as the released router tensors are."""


def tensor_specs(config: TinyConfig) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, in file order."""
    hidden, vocab = config.hidden, config.vocab
    yield TensorSpec("language_model.model.embed_tokens.weight", (vocab, hidden), 3.0)
    for layer in range(config.layers):
        yield from _layer_specs(config, layer)
    yield TensorSpec("language_model.model.norm.weight", (hidden,), 0.1)
    yield TensorSpec("language_model.lm_head.weight", (vocab, hidden), 1.5 / sqrt(hidden))
    yield from _vision_specs(config)


def _matrix(name: str, out: int, into: int, gain: float = 1.0, *, float32: bool = False) -> TensorSpec:
    return TensorSpec(f"{name}.weight", (out, into), gain / sqrt(into), float32=float32)


def _layer_specs(config: TinyConfig, layer: int) -> Iterator[TensorSpec]:
    hidden, dim = config.hidden, config.head_dim
    prefix = f"language_model.model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    yield TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,), 0.1)
    yield TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.1)
    yield _matrix(f"{attention}.q_proj", config.heads * dim, hidden)
    yield _matrix(f"{attention}.k_proj", config.kv_heads * dim, hidden)
    yield _matrix(f"{attention}.v_proj", config.kv_heads * dim, hidden)
    yield _matrix(f"{attention}.o_proj", hidden, config.heads * dim, 1.5)
    yield TensorSpec(f"{attention}.q_norm.weight", (dim,), 0.1, mean=0.25)
    yield TensorSpec(f"{attention}.k_norm.weight", (dim,), 0.1, mean=0.25)
    if layer in config.sparse_layers:
        yield _matrix(f"{attention}.index_q_proj", config.kv_heads * dim, hidden)
        yield _matrix(f"{attention}.index_k_proj", dim, hidden)
        yield TensorSpec(f"{attention}.index_q_norm.weight", (dim,), 0.1, mean=-0.5)
        yield TensorSpec(f"{attention}.index_k_norm.weight", (dim,), 0.1, mean=-0.5)
        moe = f"{prefix}.block_sparse_moe"
        yield _matrix(f"{moe}.gate", config.experts, hidden, 2.0, float32=True)
        yield TensorSpec(f"{moe}.e_score_correction_bias", (config.experts,), 0.1, float32=True)
        for expert in range(config.experts):
            path = f"{moe}.experts.{expert}"
            yield from _mlp_specs(path, ("w1", "w3", "w2"), hidden, config.expert_intermediate)
        names = ("gate_proj", "up_proj", "down_proj")
        yield from _mlp_specs(f"{moe}.shared_experts", names, hidden, config.expert_intermediate)
    else:
        names = ("gate_proj", "up_proj", "down_proj")
        yield from _mlp_specs(f"{prefix}.mlp", names, hidden, config.dense_intermediate)


def _mlp_specs(path: str, names: tuple[str, str, str], hidden: int, inner: int) -> Iterator[TensorSpec]:
    gate, up, down = names
    yield _matrix(f"{path}.{gate}", inner, hidden)
    yield _matrix(f"{path}.{up}", inner, hidden)
    yield _matrix(f"{path}.{down}", hidden, inner, 0.7)


def _vision_specs(config: TinyConfig) -> Iterator[TensorSpec]:
    width = config.vision_hidden
    patch = (3, TEMPORAL_PATCH, PATCH_SIZE, PATCH_SIZE)
    model = "vision_tower.vision_model"
    yield TensorSpec(f"{model}.embeddings.patch_embedding.weight", (width, *patch), 1 / sqrt(prod(patch)))
    yield from _layer_norm(f"{model}.pre_layrnorm", width)
    for layer in range(config.vision_layers):
        path = f"{model}.encoder.layers.{layer}"
        yield from _layer_norm(f"{path}.layer_norm1", width)
        yield from _layer_norm(f"{path}.layer_norm2", width)
        yield from _linear(f"{path}.self_attn.q_proj", width, width, 1.5)
        yield from _linear(f"{path}.self_attn.k_proj", width, width, 1.5)
        yield from _linear(f"{path}.self_attn.v_proj", width, width)
        yield from _linear(f"{path}.self_attn.out_proj", width, width)
        yield from _linear(f"{path}.mlp.fc1", 2 * width, width)
        yield from _linear(f"{path}.mlp.fc2", width, 2 * width)
    hidden = config.hidden
    yield from _linear("multi_modal_projector.linear_1", hidden, width)
    yield from _linear("multi_modal_projector.linear_2", hidden, hidden, 1.5)
    yield from _linear("patch_merge_mlp.linear_1", hidden, hidden * SPATIAL_MERGE**2)
    # Image tokens enter the text layers where embeddings of unit scale do.
    yield from _linear("patch_merge_mlp.linear_2", hidden, hidden, 2.0)


def _layer_norm(path: str, width: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{path}.weight", (width,), 0.1, mean=1.0)
    yield TensorSpec(f"{path}.bias", (width,), 0.1)


def _linear(path: str, out: int, into: int, gain: float = 1.0) -> Iterator[TensorSpec]:
    yield _matrix(path, out, into, gain)
    yield TensorSpec(f"{path}.bias", (out,), 0.1)


def tensor(config: TinyConfig, spec: TensorSpec) -> torch.Tensor:
    """Values of one tensor. They depend on the seed, the name and the shape alone, never on other tensors.

    Only exact arithmetic on a counter-based generator's bits, so every platform produces the same bytes.
    """
    digest = hashlib.sha256(f"{config.seed}/{spec.name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(digest[:16], "little")).random_raw(prod(spec.shape))
    unit = (bits >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
    values = torch.from_numpy(unit * (spec.std * sqrt(3.0)) + spec.mean).reshape(spec.shape)
    if "index_q_norm" in spec.name or "index_k_norm" in spec.name:
        values[_index_channels(config.head_dim)] += INDEX_CHANNEL_GAIN
    if spec.name == "language_model.lm_head.weight":
        values[-len(MARKERS) :] *= 0.125
    values = values.to(torch.float32).to(torch.bfloat16)
    return values.to(torch.float32) if spec.float32 or config.dtype == "float32" else values


def _index_channels(head_dim: int) -> list[int]:
    """Channels that dominate index scores: two rotary pairs, one turning within a block and one across
    blocks, and two channels that do not rotate."""
    rotary = head_dim // 2
    fast, slow = rotary // 16, 3 * rotary // 16
    return [fast, fast + rotary // 2, slow, slow + rotary // 2, rotary, rotary + 1]
