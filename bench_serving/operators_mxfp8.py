"""Time the MXFP8 products on this GPU, beside SGLang's BF16 experts and cuBLAS.

    python -m bench_serving.operators_mxfp8 [--only SUBSTRING] [--tune [--seconds 110]]

Weights are those of one rank of eight. Every timing is the median of graph replays that cycle through several
layers' weights, 200 MB or more, so that no layer finds its weights in the L2 cache. With `--tune` other
divisions of the work are checked and timed as well (`operators_mxfp8_tune.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile, mxfp8_experts
from m3_kernels.triton.sm90_mxfp8_experts_few import FewExpertsTile
from m3_kernels.triton.sm90_mxfp8_linear import mxfp8_linear
from torch import Tensor

from bench_serving import graph_time

DEVICE = torch.device("cuda")
HIDDEN, WIDTH, EXPERTS, TOPK = 6144, 3072, 128, 4
ALPHA, LIMIT = 1.702, 7.0
CYCLED_BYTES = 200 << 20
BYTES_PER_US = 4.3e6
"""The device copy rate measured on an H200."""

LINEARS = {
    "q, k, v and index": (1536, HIDDEN),
    "o": (HIDDEN, 1024),
    "shared gate, up": (768, HIDDEN),
    "shared down": (HIDDEN, 384),
    "dense gate, up": (3072, HIDDEN),
    "dense down": (HIDDEN, 1536),
}
"""Rows and columns on one of eight ranks."""


@dataclass(frozen=True)
class Rank:
    """The experts of one rank."""

    name: str
    experts: int
    width: int


RANKS = (Rank("EP8", EXPERTS // 8, WIDTH), Rank("TP8", EXPERTS, WIDTH // 8))
TOKENS = (1, 8, 32, 64, 256, 1024, 8192)
LINEAR_TOKENS = (1, 8, 16, 32, 64, 128, 256, 2048, 8192)
FEWEST_FAST = 32
"""From so many tokens on linears are timed through DeepGEMM as well."""
MOST_APART = 256
"""Up to so many they are timed after launches that let nothing begin early as well."""


def time_us(run: Callable[[int], object], layers: int, repeats: int = 15) -> float:
    """`graph_time.time_us` of `run(layer)` for so many layers, by number."""
    return graph_time.time_us(run, range(layers), repeats)


def random_mxfp8(*shape: int) -> tuple[Tensor, Tensor]:
    """`[..., N, K]`, normally distributed, so that products of normal activations are normal, too."""
    value = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.empty(*shape[:-1], shape[-1] // 32, dtype=torch.uint8, device=DEVICE)
    for value_part, scale_part in zip(value.view(-1, *shape[-2:]), scale.view(-1, *scale.shape[-2:])):
        numbers = torch.randn(shape[-2:], device=DEVICE, dtype=torch.bfloat16) * shape[-1] ** -0.5
        quantized = quantize_mxfp8(numbers)
        value_part.copy_(quantized[0])
        scale_part.copy_(quantized[1])
    return value, scale


@dataclass(frozen=True)
class Routing:
    """A step's tokens and their choices, as every rank sees them."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def random(cls, tokens: int, rank: Rank) -> Routing:
        """Uniform over the model's experts; ids are the rank's own, -1 for the other ranks' experts."""
        ids = torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOPK, 1).indices.int()
        ids = torch.where(ids < rank.experts, ids, -1)
        x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        return cls(x, ids, torch.rand(tokens, TOPK, device=DEVICE) + 0.1)

    @property
    def touched(self) -> int:
        return int(self.ids[self.ids >= 0].unique().numel())


def experts_weights(rank: Rank) -> dict[str, Tensor]:
    w13, w13_scale = random_mxfp8(rank.experts, 2 * rank.width, HIDDEN)
    w2, w2_scale = random_mxfp8(rank.experts, HIDDEN, rank.width)
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}


def run_experts(
    given: Routing, weights: dict[str, Tensor], tile: ExpertsTile | FewExpertsTile | None = None
) -> Tensor:
    return mxfp8_experts(
        given.x,
        **weights,
        topk_ids=given.ids,
        topk_weights=given.weights,
        alpha=ALPHA,
        limit=LIMIT,
        first_expert=0,
        model_experts=EXPERTS,
        tile=tile,
    )


@functools.cache
def prepare_sglang() -> None:
    """What SGLang's experts look up: server arguments and groups of one process. Once in a process."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.server_args import ServerArgs

    from sglang_m3.tiny import build

    checkpoint = build(Path(tempfile.mkdtemp()) / "tiny")
    args = ServerArgs(
        model_path=str(checkpoint),
        skip_tokenizer_init=True,
        attention_backend="triton",
        sampling_backend="pytorch",
    )
    args.resolve_once()
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(args, role="scheduler", ranks=ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")


def has_tuned(rank: Rank) -> bool:
    """Whether the plugin has a configuration of SGLang's BF16 experts for this rank."""
    from sglang_m3.experts.tuned import shipped

    return shipped(rank.experts, rank.width, False) is not None


def stock_experts(rank: Rank) -> Callable[[Routing], Tensor]:
    """SGLang's BF16 Triton experts with random weights."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl

    w13 = torch.randn(rank.experts, 2 * rank.width, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    w2 = torch.randn(rank.experts, HIDDEN, rank.width, device=DEVICE, dtype=torch.bfloat16)

    def run(given: Routing) -> Tensor:
        return fused_experts_impl(
            given.x,
            w13,
            w2,
            given.weights,
            given.ids,
            gemm1_alpha=ALPHA,
            gemm1_limit=LIMIT,
            filter_expert=rank.experts < EXPERTS,
            gate_up_interleaved=False,
        )

    return run


def coarsened(value: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The weight with one scale per 128 x 128 values, coarsened in place."""
    from m3_kernels.reference.coarsen_mxfp8 import block_scales, coarsen_mxfp8

    matrices = [(value, scale)] if value.dim() == 2 else zip(value, scale)
    for matrix in matrices:
        coarsen_mxfp8(*matrix)
    return value, block_scales(scale)


def block_weights(weights: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Both products' weights, likewise."""
    return [coarsened(weights[name], weights[f"{name}_scale"]) for name in ("w13", "w2")]


def run_grouped(given: Routing, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The experts through DeepGEMM's grouped products."""
    import deep_gemm
    from m3_kernels.triton.sm90_mxfp8_grouped import GroupedProducts, grouped_experts

    return grouped_experts(
        given.x,
        *weights,
        given.ids,
        given.weights,
        GroupedProducts(deep_gemm.fp8_m_grouped_gemm_nt_masked, deep_gemm.m_grouped_fp8_gemm_nt_contiguous),
        alpha=ALPHA,
        limit=LIMIT,
        first_expert=0,
        model_experts=EXPERTS,
    )


def multiply_fast(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    """A linear through DeepGEMM, activations in E4M3."""
    import deep_gemm
    from m3_kernels.triton.sm90_mxfp8_grouped import quantize_rows

    out = torch.empty(x.shape[0], weight[0].shape[0], dtype=x.dtype, device=x.device)
    deep_gemm.fp8_gemm_nt(quantize_rows(x, None), weight, out)
    return out


def run_stock(rank: Rank, tokens: Sequence[int]) -> Callable[[Routing], Tensor]:
    """`stock_experts` after a run of so many tokens each, under both configurations."""
    from bench_serving.operators_experts import plugins_configurations

    run = stock_experts(rank)
    for count in tokens:
        given = Routing.random(count, rank)
        run(given)
        if has_tuned(rank):
            with plugins_configurations():
                run(given)
    return run


def measure_experts(stock: dict[Rank, Callable[[Routing], Tensor]]) -> None:
    """Rows of a table, each as soon as it is known. `stock` loses a rank's weights when that rank is done."""
    if stock:
        print(
            "| rank | tokens | experts touched | SGLang BF16 us | tuned BF16 us | weight-only us "
            "| SGLang's / it | weights TB/s | DeepGEMM us | SGLang's / it | weights TB/s |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for rank in list(stock):
        measure_rank(rank, stock.pop(rank))
        torch.cuda.empty_cache()


def measure_rank(rank: Rank, stock: Callable[[Routing], Tensor]) -> None:
    from bench_serving.operators_experts import plugins_configurations

    weights = [experts_weights(rank) for _ in range(2)]
    size = sum(w.nbytes for w in weights[0].values())
    blocks = [block_weights(w) for w in weights]
    for tokens in TOKENS:
        given = [Routing.random(tokens, rank) for _ in range(6)]
        touched = sum(g.touched for g in given) / len(given)
        weight_bytes = size * touched / rank.experts
        theirs = time_us(lambda i: stock(given[i]), 6, 9)  # noqa: B023
        cells = [f"{theirs:.1f}", "–"]
        if has_tuned(rank):
            with plugins_configurations():
                cells[1] = f"{time_us(lambda i: stock(given[i]), 6, 9):.1f}"  # noqa: B023
        for run in (
            lambda i: run_experts(given[i], weights[i % 2]),  # noqa: B023
            lambda i: run_grouped(given[i], blocks[i % 2]),  # noqa: B023
        ):
            us = time_us(run, 6, 9)
            cells += [f"{us:.1f}", f"{theirs / us:.2f}", f"{weight_bytes / us / 1e6:.2f}"]
        print(f"| {rank.name} | {tokens:,} | {touched:.1f} |", " | ".join(cells), "|", flush=True)


def apart_us(run: Callable[[int], object], layers: int, x: Tensor) -> float:
    """The same with a launch before each, during which nothing begins early, less that launch's own time."""

    def ordinary(layer: int) -> None:
        torch.neg(x, out=x)

    def both(layer: int) -> None:
        ordinary(layer)
        run(layer)

    return time_us(both, layers, 9) - time_us(ordinary, layers, 9)


def measure_linears(only: str) -> None:
    """Rows of a table, each as soon as it is known."""
    names = [name for name in LINEARS if only in f"linear {name}"]
    if names:
        print(
            "| weight | rows x columns | tokens | cuBLAS BF16 us | weight-only us | ratio | weights TB/s "
            "| DeepGEMM us | ratio | apart: cuBLAS us | weight-only us | DeepGEMM us |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        rows, columns = LINEARS[name]
        count = max(4, CYCLED_BYTES // (rows * columns))
        ours_layers = [random_mxfp8(rows, columns) for _ in range(count)]
        their_layers = [torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
        fast_layers = [coarsened(*layer) for layer in ours_layers]
        for tokens in LINEAR_TOKENS:
            x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
            runs: list[Callable[[int], object]] = [
                lambda i: torch.mm(x, their_layers[i].T),  # noqa: B023
                lambda i: mxfp8_linear(x, *ours_layers[i]),  # noqa: B023
            ]
            if tokens >= FEWEST_FAST:
                runs.append(lambda i: multiply_fast(x, fast_layers[i]))  # noqa: B023
            theirs, ours, *fast = (time_us(run, count, 9) for run in runs)
            apart = [f"{apart_us(run, count, x):.2f}" for run in runs] if tokens <= MOST_APART else []
            rate = rows * columns * 33 / 32 / ours / 1e6
            cells = [f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.2f}", f"{rate:.2f}"]
            cells += [f"{fast[0]:.2f}", f"{theirs / fast[0]:.2f}"] if fast else ["", ""]
            cells += apart + [""] * (3 - len(apart))
            print(f"| {name} | {rows:,} x {columns:,} | {tokens:,} |", " | ".join(cells), "|", flush=True)


def one_jit_cache() -> None:
    """DeepGEMM's kernels in one folder, whether SGLang has been imported or not."""
    folder = os.environ.setdefault("SGLANG_DG_CACHE_DIR", str(Path.home() / ".cache" / "deep_gemm"))
    os.environ["DG_JIT_CACHE_DIR"] = folder


def early_launches() -> None:
    """Let DeepGEMM's kernels be set up while their predecessors run, as SGLang does by default."""
    import deep_gemm

    deep_gemm.set_pdl(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of 'experts EP8', 'linear o', ...")
    parser.add_argument("--tune", action="store_true", help="check and time other divisions: JSON lines")
    parser.add_argument("--seconds", type=float, default=110, help="when --tune begins nothing new any more")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    one_jit_cache()
    if arguments.tune:
        from bench_serving.operators_mxfp8_tune import tune

        tune(arguments.only, arguments.seconds)
        return
    from bench_serving.operators_mxfp8_compile import Dense, Experts, Grouped, Linear, Stock, Work, compiling

    ranks = [rank for rank in RANKS if arguments.only in f"experts {rank.name}"]
    linears = [shape for name, shape in LINEARS.items() if arguments.only in f"linear {name}"]
    works: list[Work] = [Stock(rank, part) for rank in ranks for part in (TOKENS[::2], TOKENS[1::2])]
    works += [work(rank, tokens) for rank in ranks for tokens in TOKENS for work in (Experts, Grouped)]
    works += [Linear(*shape, tokens) for shape in linears for tokens in LINEAR_TOKENS]
    works += [Dense(*shape, tokens) for shape in linears for tokens in LINEAR_TOKENS if tokens >= FEWEST_FAST]
    with compiling(works):
        if ranks:
            prepare_sglang()
    early_launches()
    measure_experts({rank: run_stock(rank, TOKENS) for rank in ranks})
    measure_linears(arguments.only)


if __name__ == "__main__":
    main()
