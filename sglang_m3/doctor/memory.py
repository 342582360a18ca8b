"""Memory of one rank, by arithmetic alone: weights, KV, index keys, workspaces, and the tokens that fit.

Sizes are bytes. Nothing here touches a device or SGLang; `bench_serving.plan` uses it, too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from m3_kernels import workspace_bytes
from m3_kernels.rows import BLOCK_TOKENS

from sglang_m3.config import M3Config

WeightFormat = Literal["bfloat16", "float32", "mxfp8"]

MXFP8_BYTES = 1 + 1 / 32
"""Bytes of a weight: an e4m3 value, and its share of the scale of 32 values."""

VISION_CACHE_BYTES = 100 * 2**20
"""What SGLang keeps for media beside the cache (`SGLANG_VLM_CACHE_SIZE_MB`)."""

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "fp8_e4m3": 1}


@dataclass(frozen=True)
class Parallel:
    """How a model is spread over ranks.

    Attributes:
        tp: ranks that share a layer (`--tp-size`).
        ep: groups that the experts are divided among (`--ep-size`); the ranks of a group split each expert.
        pp: stages that the layers are divided among (`--pp-size`).
        attention_dp: groups of the `tp` ranks that attend to requests of their own (`--enable-dp-attention`).
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    attention_dp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.ep, self.pp, self.attention_dp) < 1:
            raise ValueError(f"sizes must be positive: {self}")
        if self.tp % self.ep or self.tp % self.attention_dp:
            raise ValueError(f"ep and attention_dp must divide tp: {self}")

    @property
    def attention_tp(self) -> int:
        """Ranks that divide an attention layer's heads."""
        return self.tp // self.attention_dp

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp


@dataclass(frozen=True)
class WeightBytes:
    """Weights of the fullest rank, by part. Kv and index heads are repeated where there are more ranks."""

    embedding: int
    output: int
    attention: int
    index: int
    dense_mlp: int
    shared_experts: int
    experts: int
    router: int
    norms: int
    vision: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StepSizes:
    """What decides the operators' workspaces.

    Attributes:
        rows: query tokens of the largest prefill step.
        requests: requests that run at the same time.
        context_tokens: the longest context.
        draft_tokens: tokens that a verify step has of each request, 0 without speculation.
    """

    rows: int
    requests: int
    context_tokens: int
    draft_tokens: int = 0


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory.

    Attributes:
        weights: see `WeightBytes`.
        kv_per_token, index_per_token: bytes of a cached token.
        rotary_table: cosines and sines of every position, one float32 table for all layers.
        vision_cache: what SGLang keeps for media, 0 for a text-only model.
        workspaces: scratch memory of the operators.
        cache: bytes left for cached tokens, negative where not even the weights fit.
        tokens: cached tokens that fit, in whole pages.
    """

    weights: WeightBytes
    kv_per_token: int
    index_per_token: int
    rotary_table: int
    vision_cache: int
    workspaces: int
    cache: int
    tokens: int

    @property
    def static(self) -> int:
        """Everything that the cache shares `--mem-fraction-static` with."""
        return self.weights.total + self.rotary_table + self.vision_cache + self.workspaces


def check_division(config: M3Config, parallel: Parallel) -> list[str]:
    """What cannot be divided evenly among the ranks, one sentence each; empty when all can."""
    ranks = parallel.attention_tp
    kv_heads = config.num_key_value_heads
    found = []
    if config.num_attention_heads % ranks:
        found.append(f"{config.num_attention_heads} attention heads cannot be divided among {ranks} ranks")
    if kv_heads % ranks and ranks % kv_heads:
        found.append(f"{kv_heads} kv heads can be neither divided among {ranks} ranks nor repeated evenly")
    if config.num_local_experts % parallel.ep:
        found.append(f"{config.num_local_experts} experts cannot be divided among {parallel.ep} groups")
    widths = {
        "intermediate_size": (config.intermediate_size, parallel.tp // parallel.ep),
        "shared_intermediate_size": (config.shared_intermediate_size, parallel.tp),
        "dense_intermediate_size": (config.dense_intermediate_size or 0, parallel.tp),
    }
    for name, (width, parts) in widths.items():
        if width % parts:
            found.append(f"{name} ({width}) cannot be divided among {parts} ranks")
    if config.num_hidden_layers < parallel.pp:
        found.append(f"{config.num_hidden_layers} layers cannot be divided into {parallel.pp} stages")
    return found


def weight_bytes(config: M3Config, parallel: Parallel, weights: WeightFormat) -> WeightBytes:
    """Weights of one rank of the first of `parallel.pp` stages, with the embedding; the last has as much.

    `weights` is the format of the linear layers; embedding, output, router and norms are not quantised.
    """
    plain = 4 if weights == "float32" else 2
    linear = MXFP8_BYTES if weights == "mxfp8" else plain
    hidden, dim = config.hidden_size, config.head_dim
    layers = range(-(-config.num_hidden_layers // parallel.pp))
    sparse = len(set(layers) & set(config.sparse_layers))
    moe = len(set(layers) & set(config.moe_layers))
    vocabulary = -(-config.vocab_size // 64) * 64 // parallel.attention_tp * hidden * plain
    q_heads = config.num_attention_heads // parallel.attention_tp
    kv_heads = kv_heads_per_rank(config, parallel)
    per_expert = 3 * hidden * config.intermediate_size * parallel.ep // parallel.tp
    return WeightBytes(
        embedding=vocabulary,
        output=vocabulary if parallel.pp == 1 else 0,
        attention=int(len(layers) * (2 * q_heads + 2 * kv_heads) * dim * hidden * linear),
        index=int(sparse * (kv_heads + 1) * dim * hidden * linear),
        dense_mlp=int(
            (len(layers) - moe) * 3 * hidden * (config.dense_intermediate_size or 0) // parallel.tp * linear
        ),
        shared_experts=int(moe * 3 * hidden * config.shared_intermediate_size // parallel.tp * linear),
        experts=int(moe * (config.num_local_experts // parallel.ep) * per_expert * linear),
        router=moe * config.num_local_experts * (hidden * plain + 4),
        norms=(len(layers) * (2 * hidden + 2 * dim) + sparse * 2 * dim + hidden) * plain,
        vision=_vision_bytes(config, parallel, plain),
    )


def _vision_bytes(config: M3Config, parallel: Parallel, element: int) -> int:
    vision = config.vision
    if vision is None:
        return 0
    hidden, out = vision.hidden_size, config.hidden_size
    layer = 4 * hidden * hidden + 2 * hidden * vision.intermediate_size
    middle, merged = vision.projector_hidden_size, out * vision.spatial_merge_size**2
    projector = hidden * middle + middle * out + merged * middle + middle * out
    patch = vision.num_channels * vision.temporal_patch_size * vision.patch_size**2
    divided = (vision.num_hidden_layers * layer + projector) // parallel.attention_tp
    return (divided + patch * hidden) * element


def kv_heads_per_rank(config: M3Config, parallel: Parallel) -> int:
    """Kv heads, and as many index heads of queries, of one rank; repeated where there are more ranks."""
    return max(1, config.num_key_value_heads // parallel.attention_tp)


def kv_bytes_per_token(config: M3Config, parallel: Parallel, element_bytes: int = 2) -> int:
    """K and V of a token in all layers of one rank."""
    layers = -(-config.num_hidden_layers // parallel.pp)
    return layers * 2 * kv_heads_per_rank(config, parallel) * config.head_dim * element_bytes


def index_bytes_per_token(config: M3Config, parallel: Parallel, element_bytes: int = 2) -> int:
    """Index keys of a token in all sparse layers of one rank: one head, on every rank."""
    stage = -(-config.num_hidden_layers // parallel.pp)
    fullest = max(
        sum(begin <= layer < begin + stage for layer in config.sparse_layers)
        for begin in range(0, config.num_hidden_layers, stage)
    )
    return fullest * config.head_dim * element_bytes


def operator_workspaces(config: M3Config, parallel: Parallel, step: StepSizes, pages: int) -> int:
    """Scratch memory of the sm90 operators for steps up to `step` over `pages` pages of the cache."""
    kv_heads = kv_heads_per_rank(config, parallel)
    sizes = workspace_bytes.step(
        rows=max(step.rows, step.requests * max(1, step.draft_tokens)),
        requests=step.requests,
        blocks=-(-(step.context_tokens + step.draft_tokens) // BLOCK_TOKENS),
        pages=pages,
        q_heads=config.num_attention_heads // parallel.attention_tp,
        kv_heads=kv_heads,
        index_heads=kv_heads,
        head_dim=config.head_dim,
        topk=config.topk_blocks,
    )
    return sum(sizes)


def rank_memory(
    config: M3Config,
    parallel: Parallel,
    *,
    weights: WeightFormat,
    free_bytes: int,
    static_fraction: float,
    kv_element_bytes: int = 2,
    index_element_bytes: int = 2,
    step: StepSizes | None = None,
) -> RankMemory:
    """What fits into a rank whose device has `free_bytes` before the weights load.

    As SGLang divides it: `static_fraction` (`--mem-fraction-static`) is for weights and cache, the rest for
    activations and CUDA graphs. `step` is None where there are no workspaces, as on the CPU.
    """
    loaded = weight_bytes(config, parallel, weights)
    kv = kv_bytes_per_token(config, parallel, kv_element_bytes)
    index = index_bytes_per_token(config, parallel, index_element_bytes)
    rotary = config.max_position_embeddings * config.rope.rotary_dim * ELEMENT_BYTES["float32"]
    vision = VISION_CACHE_BYTES if config.vision is not None else 0
    cache = int(free_bytes * static_fraction) - loaded.total - rotary - vision
    scratch = 0
    if step is not None and cache > 0:
        # As many pages as a server takes for its bound (`attention.workspace`).
        pages = cache // (BLOCK_TOKENS * 2 * 2 * config.head_dim)
        scratch = operator_workspaces(config, parallel, step, pages)
        cache -= scratch
    tokens = max(0, cache) // (kv + index) // BLOCK_TOKENS * BLOCK_TOKENS
    return RankMemory(loaded, kv, index, rotary, vision, scratch, cache, tokens)
