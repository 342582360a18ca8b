"""Step time of M3 on paper: what one rank reads and multiplies in a step, and the least time that takes.

Arithmetic only, on top of the memory model of `sglang_m3.doctor`. A step's floor leaves out launches,
collectives, norms and sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_m3.config import M3Config
from sglang_m3.doctor import machine
from sglang_m3.doctor.memory import (
    ELEMENT_BYTES,
    MXFP8_BYTES,
    Parallel,
    WeightFormat,
    index_bytes_per_token,
    kv_bytes_per_token,
    kv_heads_per_rank,
    weight_bytes,
)

BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Gpu:
    """What a GPU has and does.

    Attributes:
        memory_bytes: as the driver reports it.
        bytes_per_second: read rate to plan with.
        flops, fp8_flops: dense products per second, with bfloat16 and with 8-bit operands.
        source: where the rates come from.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    flops: float
    fp8_flops: float
    source: str


_H200, _H100 = (machine.GPUS[name].total_bytes for name in ("h200", "h100"))

GPUS = {
    "h200": Gpu("H200", _H200, 4.3e12, 790e12, 1244e12, "measured: device copy, 8192-cubed product"),
    "h100": Gpu("H100", _H100, 3.0e12, 790e12, 1244e12, "0.9 x 3.35 TB/s; products as on H200"),
}


@dataclass(frozen=True)
class Layout:
    """How a model lies on a node: its ranks, and the formats of weights, keys and values, and index keys."""

    config: M3Config
    parallel: Parallel
    weights: WeightFormat = "bfloat16"
    kv_element_bytes: int = 2
    index_element_bytes: int = 2

    @property
    def linear_bytes(self) -> float:
        """Per weight of a linear layer or an expert."""
        return MXFP8_BYTES if self.weights == "mxfp8" else ELEMENT_BYTES[self.weights]


@dataclass(frozen=True)
class Step:
    """A step's load: `requests` that each bring `new_tokens` on `shared_tokens` + `private_tokens` of cache.

    `sharing`: index pages of the shared prefix are read once for all requests, else once for each.
    """

    requests: int
    new_tokens: int
    shared_tokens: int
    private_tokens: int
    sharing: bool

    @property
    def rows(self) -> int:
        """Query tokens."""
        return self.requests * self.new_tokens

    @property
    def context(self) -> int:
        """Cached tokens of a request."""
        return self.shared_tokens + self.private_tokens


@dataclass(frozen=True)
class Cost:
    """Bytes read and operations of one rank in one step, by what they are for."""

    bytes: dict[str, float]
    flops: dict[str, float]

    def seconds(self, gpu: Gpu, weights: WeightFormat) -> float:
        """The least time: the larger of bytes and operations for each part, one part after the other."""
        total = 0.0
        for part in self.bytes:
            quantised = weights == "mxfp8" and part in QUANTISED_PARTS
            rate = gpu.fp8_flops if quantised else gpu.flops
            total += max(self.bytes[part] / gpu.bytes_per_second, self.flops[part] / rate)
        return total


QUANTISED_PARTS = frozenset({"attention weights", "experts", "shared expert and dense MLP"})


def step_cost(layout: Layout, step: Step) -> Cost:
    """What one rank reads and multiplies in a step of the whole model (`parallel.pp` 1)."""
    config, parallel = layout.config, layout.parallel
    assert parallel.pp == 1, parallel
    weights = weight_bytes(config, parallel, layout.weights)
    rows, sparse = step.rows, len(config.sparse_layers)
    dense = config.num_hidden_layers - sparse
    heads = config.num_attention_heads // parallel.attention_tp
    kv_heads = kv_heads_per_rank(config, parallel)
    cached_tokens = step.requests * step.context
    if step.sharing:
        cached_tokens = step.shared_tokens + step.requests * step.private_tokens
    chosen = min(config.topk_blocks * BLOCK_TOKENS, step.context)
    # Rows may choose the same blocks: no more is read than there is.
    chosen_tokens = min(cached_tokens, rows * chosen)
    kv_per_layer = kv_bytes_per_token(config, parallel, layout.kv_element_bytes) / config.num_hidden_layers
    untouched = (1 - config.num_experts_per_tok / config.num_local_experts) ** rows
    attention = weights.attention + weights.index
    mlp = weights.shared_experts + weights.dense_mlp
    expert_values = 3 * config.hidden_size * config.intermediate_size
    return Cost(
        bytes={
            "attention weights": attention,
            "experts": weights.experts * (1 - untouched),
            "shared expert and dense MLP": mlp,
            "router and head": weights.router + weights.output,
            "index keys": cached_tokens * index_bytes_per_token(config, parallel, layout.index_element_bytes),
            "chosen blocks": chosen_tokens * kv_per_layer * sparse,
            "dense layers' cache": cached_tokens * kv_per_layer * dense,
        },
        flops={
            "attention weights": 2 * rows * attention / layout.linear_bytes,
            "experts": 2
            * rows
            * len(config.moe_layers)
            * config.num_experts_per_tok
            / parallel.tp
            * expert_values,
            "shared expert and dense MLP": 2 * rows * mlp / layout.linear_bytes,
            "router and head": 2
            * rows
            * len(config.moe_layers)
            * config.hidden_size
            * config.num_local_experts
            + 2 * step.requests * config.vocab_size / parallel.tp * config.hidden_size,
            "index keys": 2 * rows * step.context * kv_heads * config.head_dim * sparse,
            "chosen blocks": 4 * rows * chosen * heads * config.head_dim * sparse,
            "dense layers' cache": 4 * rows * step.context * heads * config.head_dim * dense,
        },
    )
