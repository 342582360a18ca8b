"""A layer of SGLang's BF16 experts on one rank, whole or one product at a time, to be timed and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bench_serving import operators_mxfp8 as family
from bench_serving.experts_product import Blocks, Division, Experts, Kernel, in_order, run_product

BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
"""A device copy and an 8192-cubed bfloat16 product on an H200."""


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


class Layer:
    """A rank's weights and steps to run on them, in SGLang's terms."""

    def __init__(self, experts: Experts) -> None:
        self.experts = experts
        self.weights = {
            product: torch.randn(experts.local, *experts.shape(product), device="cuda", dtype=torch.bfloat16)
            * experts.shape(product)[1] ** -0.5
            for product in ("up", "down")
        }

    def routing(self, tokens: int, seed: int) -> family.Routing:
        """Uniform over the model's experts, at least one of them on this rank."""
        torch.manual_seed(seed)
        rank = family.Rank("", self.experts.local, self.experts.width)
        while True:
            routing = family.Routing.random(tokens, rank)
            if routing.touched:
                return routing

    def routings(self, tokens: int) -> list[family.Routing]:
        """More of them the fewer tokens there are: those touch few experts, and not equally many."""
        count = 8 if tokens <= 16 else 4 if tokens <= 256 else 2
        return [self.routing(tokens, seed) for seed in range(count)]

    def blocks(self, routing: family.Routing, rows: int) -> Blocks:
        from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

        order = moe_align_block_size(routing.ids, rows, self.experts.local)
        return Blocks(*order, routing.ids, routing.weights)

    def product(self, kernel: Kernel, routing: family.Routing) -> tuple[Callable[[], Tensor], Blocks, Tensor]:
        """What launches the kernel, its blocks, and its input: of the second product a row per choice."""
        blocks = self.blocks(routing, kernel.division.rows)
        weight = self.weights[kernel.product]
        choices = routing.ids.numel()
        given = routing.x
        if kernel.product == "down":
            given = torch.randn(choices, weight.shape[2], device="cuda", dtype=torch.bfloat16)
        rows = len(blocks.order) if kernel.ordered else choices
        out = torch.zeros(
            rows if kernel.product == "up" else choices, weight.shape[1], device="cuda", dtype=given.dtype
        )
        passed = in_order(given, blocks.order) if kernel.product == "down" and kernel.ordered else given
        run = functools.partial(run_product, kernel, self.experts, blocks, passed, weight, out)
        return run, blocks, given

    def run(self, routing: family.Routing) -> Tensor:
        """The layer as SGLang runs it, with whatever configuration it looks up."""
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl

        return fused_experts_impl(
            routing.x,
            self.weights["up"],
            self.weights["down"],
            routing.weights,
            routing.ids,
            gemm1_alpha=family.ALPHA,
            gemm1_limit=family.LIMIT,
            filter_expert=self.experts.local < self.experts.model,
            gate_up_interleaved=False,
        )

    def expected(self, routing: family.Routing) -> Tensor:
        from m3_kernels.reference.swiglu_oai import swiglu_oai

        out = torch.zeros_like(routing.x, dtype=torch.float64)
        for expert in routing.ids[routing.ids >= 0].unique().tolist():
            token, choice = torch.where(routing.ids == expert)
            up = routing.x[token].double() @ self.weights["up"][expert].double().T
            hidden = swiglu_oai(up, alpha=family.ALPHA, limit=family.LIMIT)
            scaled = routing.weights[token, choice].double()[:, None]
            out.index_add_(0, token, hidden @ self.weights["down"][expert].double().T * scaled)
        return out

    def floor_us(self, routings: list[family.Routing]) -> float:
        one = sum(rows * columns for rows, columns in map(self.experts.shape, ("up", "down")))
        touched = sum(routing.touched for routing in routings) / len(routings)
        choices = sum(int((routing.ids >= 0).sum()) for routing in routings) / len(routings)
        return max(2 * one * touched / BYTES_PER_US, 2 * one * choices / FLOPS_PER_US)


@contextmanager
def configured(up: Division | None, down: Division | None) -> Iterator[None]:
    """SGLang's experts under these divisions, or under its own choice."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    before = fused_moe.try_get_optimal_moe_config
    if up is not None:
        fused_moe.try_get_optimal_moe_config = lambda *_, **__: (
            up.entry(),
            (None if down is None else down.entry(), None),
        )
    try:
        yield
    finally:
        fused_moe.try_get_optimal_moe_config = before
