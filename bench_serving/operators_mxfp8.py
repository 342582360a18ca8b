"""Time the MXFP8 products on this GPU, beside SGLang's BF16 experts and cuBLAS where they can be imported.

    python -m bench_serving.operators_mxfp8 [--only SUBSTRING] [--tune] [--compile]

Weights are those of one rank of eight. Every timing is the median of graph replays that cycle through several
layers' weights, 200 MB or more, so that no layer finds its weights in the L2 cache.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from m3_kernels.reference.quantize_mxfp8 import quantize_mxfp8
from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile, experts_tile, mxfp8_experts
from m3_kernels.triton.sm90_mxfp8_linear import LinearTile, linear_tile, mxfp8_linear
from torch import Tensor

DEVICE = torch.device("cuda")
HIDDEN, WIDTH, EXPERTS, TOPK = 6144, 3072, 128, 4
ALPHA, LIMIT = 1.702, 7.0
CYCLED_BYTES = 200 << 20
BYTES_PER_US = 4.3e6
"""The device copy rate measured on an H200."""

LINEARS = {
    "q, k, v": (1280, HIDDEN),
    "q, k, v and index": (1536, HIDDEN),
    "o": (HIDDEN, 1024),
    "dense gate, up": (3072, HIDDEN),
    "dense down": (HIDDEN, 1536),
    "shared gate, up": (768, HIDDEN),
    "shared down": (HIDDEN, 384),
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
EAGER_TOKENS = 512
"""From here on the grouped experts are timed as prefill runs them: without a graph, waiting for sizes."""


def time_us(run: Callable[[int], object], layers: int, repeats: int = 15, graph: bool = True) -> float:
    """Median microseconds of `run(layer)`, called for every layer in turn, by default replayed in a graph."""

    def run_all() -> None:
        for layer in range(layers):
            run(layer)

    again = run_all
    run_all()
    torch.cuda.synchronize()
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run_all()
        again = captured.replay
    again()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        again()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / layers * 1e3)
    return sorted(times)[len(times) // 2]


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


def run_experts(given: Routing, weights: dict[str, Tensor], tile: ExpertsTile | None = None) -> Tensor:
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


def prepare_sglang() -> None:
    """What SGLang's experts look up: server arguments and groups of one process."""
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
    parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:29591", 0, backend="gloo")
    parallel_state.initialize_model_parallel(backend="gloo")


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


def grouped(weights: dict[str, Tensor]) -> Callable[[Routing, bool], Tensor]:
    """The experts through DeepGEMM's grouped product, with the weights coarsened in place.

    The second argument: as in a CUDA graph, with room for any routing.
    """
    import deep_gemm
    from m3_kernels.reference.coarsen_mxfp8 import block_scales, coarsen_mxfp8
    from m3_kernels.triton.sm90_mxfp8_grouped import grouped_experts

    given_weights = []
    for name in ("w13", "w2"):
        for matrix in zip(weights[name], weights[f"{name}_scale"]):
            coarsen_mxfp8(*matrix)
        given_weights.append((weights[name], block_scales(weights[f"{name}_scale"])))

    def run(given: Routing, room_for_all: bool) -> Tensor:
        return grouped_experts(
            given.x,
            *given_weights,
            given.ids,
            given.weights,
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous,
            alpha=ALPHA,
            limit=LIMIT,
            first_expert=0,
            room_for_all=room_for_all,
        )

    return run


def experts_tiles(pairs: int, experts: int) -> list[ExpertsTile]:
    """Divisions to try for so many pairs; the one in use is the first."""
    base = experts_tile(pairs, experts)
    if pairs > 48 * experts:
        shapes = ((128, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 64, 128, 4, 3), (128, 128, 64, 4, 3))
    else:
        shapes = tuple(
            (rows, base.pairs, columns, warps, stages)
            for rows, columns, warps, stages in (
                (64, 128, 4, 2),
                (64, 128, 4, 3),
                (64, 128, 4, 4),
                (64, 256, 4, 3),
                (128, 128, 8, 2),
                (128, 128, 8, 3),
                (128, 64, 4, 3),
                (128, 128, 4, 3),
            )
        )
    tried = [ExpertsTile(r, p, c, base.walks, w, s) for r, p, c, w, s in shapes]
    return [base, *(tile for tile in tried if tile != base)]


def linear_tiles(tokens: int, rows: int, columns: int) -> list[LinearTile]:
    """Likewise for a linear."""
    base = linear_tile(tokens, rows, columns, 132)
    if tokens > 64:
        tried = [replace(base, splits=1), replace(base, tokens=128, warps=8), replace(base, columns=128)]
    else:
        tried = [
            replace(base, splits=splits, stages=stages)
            for splits in (1, 2, 4, 6, 8, 12)
            for stages in (3, 4)
            if splits * 256 <= columns
        ]
    return [base, *(tile for tile in tried if tile != base)]


def compile_tile(tile: ExpertsTile | LinearTile) -> str | None:
    """Run once on little, so that Triton's cache has the kernels; returns the error of a tile that fails."""
    try:
        if isinstance(tile, LinearTile):
            x = torch.randn(1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
            mxfp8_linear(x, *random_mxfp8(256, HIDDEN), tile=tile)
        else:
            rank = Rank("compile", 1, WIDTH)
            run_experts(Routing.random(1, rank), experts_weights(rank), tile)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{tile}: {type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all() -> None:
    """Compile every division to try on many processes."""
    tiles: set[ExpertsTile | LinearTile] = set()
    for rank, tokens in itertools.product(RANKS, TOKENS):
        expected = tokens * TOPK * rank.experts // EXPERTS
        tiles |= {replace(tile, walks=1) for tile in experts_tiles(expected, rank.experts)}
    for (rows, columns), tokens in itertools.product(LINEARS.values(), (1, 64, 1024)):
        tiles |= {replace(tile, splits=2) for tile in linear_tiles(tokens, rows, columns) if tokens <= 64}
        tiles |= {tile for tile in linear_tiles(tokens, rows, columns) if tokens > 64}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(12, mp_context=context) as pool:
        for error in filter(None, pool.map(compile_tile, tiles, chunksize=2)):
            print(error, flush=True)


def fastest(
    run: Callable[[ExpertsTile | LinearTile], float], tiles: list[ExpertsTile] | list[LinearTile], tune: bool
) -> tuple[float, str]:
    """Microseconds of the division in use, or of the fastest with `tune`, and its name then."""
    if not tune:
        return run(tiles[0]), ""
    found = []
    for tile in tiles:
        try:
            found.append((run(tile), str(tile)))
        except Exception as error:
            print(f"{tile}: {type(error).__name__}", flush=True)
    best = min(found)
    return best[0], f" {best[1]}, in use {found[0][0]:.1f}"


def measure_experts(only: str, with_peer: bool, tune: bool) -> None:
    print(
        "| rank | tokens | experts touched | SGLang BF16 us | weight-only us | ratio | weights TB/s "
        "| DeepGEMM us | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for rank in RANKS:
        if only not in f"experts {rank.name}":
            continue
        weights = [experts_weights(rank) for _ in range(2)]
        size = sum(w.nbytes for w in weights[0].values())
        stock = stock_experts(rank) if with_peer else None
        many = [grouped(w) for w in weights] if with_peer else None
        if many:
            given = Routing.random(512, rank)
            exact = run_experts(given, weights[0]).float()
            error = float((many[0](given, True).float() - exact).norm() / exact.norm())
            print(f"(FP8 activations change the layer's output by {error:.4f} of its norm)")
        for tokens in TOKENS:
            given = [Routing.random(tokens, rank) for _ in range(6)]
            touched = sum(g.touched for g in given) / len(given)
            expected = tokens * TOPK * rank.experts // EXPERTS
            ours, tile = fastest(
                lambda tile: time_us(lambda i: run_experts(given[i], weights[i % 2], tile), 6, 9),  # noqa: B023
                experts_tiles(expected, rank.experts),
                tune,
            )
            rate = size * touched / rank.experts / ours / 1e6
            theirs = fast = float("nan")
            if stock and many:
                theirs = time_us(lambda i: stock(given[i]), len(given))  # noqa: B023
                graph = tokens < EAGER_TOKENS
                fast = time_us(lambda i: many[i % 2](given[i], graph), len(given), graph=graph)  # noqa: B023
            print(
                f"| {rank.name} | {tokens:,} | {touched:.1f} | {theirs:.1f} | {ours:.1f} "
                f"| {theirs / ours:.2f} | {rate:.2f} | {fast:.1f} | {theirs / fast:.2f} |{tile}",
                flush=True,
            )


def measure_linears(only: str, tune: bool) -> None:
    print("| weight | rows x columns | tokens | cuBLAS BF16 us | ours us | ratio | weights TB/s |")
    print("|---|---|---|---|---|---|---|")
    for name, (rows, columns) in LINEARS.items():
        if only not in f"linear {name}":
            continue
        count = max(4, CYCLED_BYTES // (rows * columns))
        ours_layers = [random_mxfp8(rows, columns) for _ in range(count)]
        their_layers = [torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
        for tokens in (1, 8, 32, 64, 1024, 8192):
            x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
            ours, tile = fastest(
                lambda tile: time_us(lambda i: mxfp8_linear(x, *ours_layers[i], tile=tile), count, 9),  # noqa: B023
                linear_tiles(tokens, rows, columns),
                tune,
            )
            theirs = time_us(lambda i: torch.mm(x, their_layers[i].T), count)  # noqa: B023
            rate = rows * columns * 33 / 32 / ours / 1e6
            print(
                f"| {name} | {rows:,} x {columns:,} | {tokens:,} | {theirs:.2f} | {ours:.2f} "
                f"| {theirs / ours:.2f} | {rate:.2f} |{tile}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of 'experts EP8', 'linear o', ...")
    parser.add_argument("--tune", action="store_true", help="try other divisions and show the fastest")
    parser.add_argument("--compile", action="store_true", help="only compile what --tune tries")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.compile:
        compile_all()
        return
    with_peer = importlib.util.find_spec("sglang") is not None
    if with_peer:
        prepare_sglang()
    measure_experts(arguments.only, with_peer, arguments.tune)
    measure_linears(arguments.only, arguments.tune)


if __name__ == "__main__":
    main()
