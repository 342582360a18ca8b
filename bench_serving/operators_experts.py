"""SGLang's BF16 experts on a rank of M3 with expert parallelism, under its configuration and the plugin's.

One of the families of `python -m bench_serving.operators`. The kernels are the same; what differs is how the
files that SGLang looks up divide their work (`sglang_m3.experts`, `bench_serving.tune_experts`).
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from bench_serving.experts_layer import Layer, relative
from bench_serving.experts_product import Experts
from bench_serving.graph_time import time_us

RANKS = {"EP8": Experts(16, 3072), "EP4": Experts(32, 3072)}
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 8192)
DIFFERENCE = 1e-2
"""Both results are sums of bfloat16 products in another order, rounded to bfloat16."""


@dataclass(frozen=True)
class Case:
    """So many tokens in a step, routed over the whole model, on one rank."""

    rank: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{'decode' if self.tokens <= 256 else 'extend'}; MoE {self.rank}, {self.tokens:,} tokens"


@dataclass(frozen=True)
class Times:
    """Median microseconds of the layer, from routing to the sum, and the least that the machine allows."""

    sglang_us: float
    ours_us: float
    floor_us: float


def cases() -> Iterator[Case]:
    return itertools.starmap(Case, itertools.product(RANKS, TOKENS))


@functools.lru_cache(maxsize=1)
def layer_of(rank: str) -> Layer:
    return Layer(RANKS[rank])


@contextmanager
def plugins_configurations() -> Iterator[None]:
    """SGLang looks up the plugin's files, by its own variable for another directory."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_moe_configs

    from sglang_m3.experts.tuned import CONFIGS, DIRECTORY_VARIABLE

    get_moe_configs.cache_clear()
    with mock.patch.dict(os.environ, {DIRECTORY_VARIABLE: str(CONFIGS.parent)}):
        yield
    get_moe_configs.cache_clear()


def compile_kernels(case: Case) -> None:
    """A step under either configuration, so that the caches on disk have its kernels."""
    layer = layer_of(case.rank)
    routing = layer.routing(case.tokens, 0)
    layer.run(routing)
    with plugins_configurations():
        layer.run(routing)


def measure(case: Case) -> Times:
    """Time a step of six routings under both, after comparing their results.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    layer = layer_of(case.rank)
    routings = [layer.routing(case.tokens, seed) for seed in range(6)]
    runs = [functools.partial(layer.run, routing) for routing in routings]
    theirs = layer.run(routings[0]).double()
    sglang_us = time_us(operator.call, runs)
    with plugins_configurations():
        error = relative(layer.run(routings[0]), theirs)
        if not error < DIFFERENCE:
            raise RuntimeError(f"{case.name}: the configurations' results differ by {error:.2g}")
        ours_us = time_us(operator.call, runs)
    return Times(sglang_us, ours_us, layer.floor_us(routings))
