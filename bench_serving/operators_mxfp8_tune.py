"""Check and time divisions of the MXFP8 products: `python -m bench_serving.operators_mxfp8 --tune`.

Compiles on all cores, checks every division against float64, then times it. One JSON line for each result:

    {"check": ..., "error": relative to float64, "ok": ...}
    {"rank": ..., "tokens": ..., "how": "SGLang BF16" | "DeepGEMM" | "weight-only", "us": ..., "tile": ...}
    {"rank": ..., "tokens": ..., "best": ..., "in use": ..., "ratio": SGLang's time over the best}
    {"parts": {kernel: us for each call}, ...}
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace

import torch
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.triton import sm90_mxfp8_grouped
from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile, experts_tile
from m3_kernels.triton.sm90_mxfp8_linear import LinearTile, linear_tile, mxfp8_linear
from torch import Tensor

from bench_serving.operators_mxfp8 import (
    CYCLED_BYTES,
    DEVICE,
    EXPERTS,
    HIDDEN,
    LINEARS,
    RANKS,
    TOKENS,
    TOPK,
    Rank,
    Routing,
    block_weights,
    experts_weights,
    prepare_sglang,
    random_mxfp8,
    run_experts,
    run_grouped,
    stock_experts,
    time_us,
)
from bench_serving.operators_mxfp8_check import EXACT, check_experts, relative, say

LINEAR_TOKENS = (1, 8, 32, 64, 2048)
PROCESSES = 14
ROOM = (1 << 16, 1 << 17)
"""Rows of the masked layout to try, the number in use first."""


def experts_tiles(rank: Rank, tokens: int) -> list[ExpertsTile]:
    """Divisions to try; the one in use is the first."""
    pairs = tokens * TOPK * rank.experts // EXPERTS
    base = experts_tile(pairs, rank.experts)
    if pairs > 8 * rank.experts:
        shapes = (
            (128, 32, 64, 4, 3),
            (128, 64, 128, 8, 3),
            (128, 128, 64, 8, 3),
            (128, 256, 64, 8, 3),
            (256, 128, 64, 8, 3),
        )
        tried = [ExpertsTile(r, p, c, base.walks, w, s) for r, p, c, w, s in shapes]
    else:
        shapes = ((64, 16, 128, 4, 3), (64, 16, 256, 4, 3), (128, 16, 64, 4, 4), (128, 16, 128, 8, 3))
        splits = ((1, 1),) if pairs > rank.experts else ((1, 1), (2, 1), (4, 2), (8, 4))
        tried = [
            ExpertsTile(r, p, c, base.walks, w, s, up, down if rank.width > 1024 else 1)
            for r, p, c, w, s in shapes
            for up, down in splits
        ]
    return [base, *(tile for tile in tried if tile != base)]


def linear_tiles(tokens: int, rows: int, columns: int) -> list[LinearTile]:
    """Likewise for a linear."""
    base = linear_tile(tokens, rows, columns, 132)
    if tokens > 64:
        wider = [replace(base, tokens=128, warps=8, splits=1), replace(base, tokens=256, warps=8, splits=1)]
        return list(dict.fromkeys([base, replace(base, splits=1), *wider]))
    tried = [
        replace(base, columns=256),
        replace(base, rows=128),
        replace(base, splits=max(1, base.splits // 2)),
        replace(base, splits=min(2 * base.splits, columns // 256)),
        replace(base, stages=4),
    ]
    return list(dict.fromkeys([base, *tried]))


@contextmanager
def masked_rows(rows: int) -> Iterator[None]:
    """DeepGEMM's masked layout with so many rows at most."""
    before = sm90_mxfp8_grouped.MASKED_ROWS
    sm90_mxfp8_grouped.MASKED_ROWS = rows
    try:
        yield
    finally:
        sm90_mxfp8_grouped.MASKED_ROWS = before


def empty_mxfp8(*shape: int) -> tuple[Tensor, Tensor]:
    value = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    return value, torch.empty(*shape[:-1], shape[-1] // 32, dtype=torch.uint8, device=DEVICE)


def compile_one(task: tuple) -> str | None:
    """Run once, so that the caches on disk have the kernels; returns what went wrong."""
    begin = time.monotonic()
    try:
        if isinstance(task[0], LinearTile):
            tile, rows, columns = task
            for tokens in (1, 64):
                x = torch.empty(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
                mxfp8_linear(x, *empty_mxfp8(rows, columns), tile=tile)
        else:
            rank, work = task
            w13, w13_scale = empty_mxfp8(rank.experts, 2 * rank.width, HIDDEN)
            w2, w2_scale = empty_mxfp8(rank.experts, HIDDEN, rank.width)
            if isinstance(work, ExpertsTile):
                given = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
                run_experts(Routing.random(4, rank), given, work)
            else:
                scales = [
                    torch.empty(
                        *(size // 128 if at else size for at, size in enumerate(w.shape)), device=DEVICE
                    )
                    for w in (w13, w2)
                ]
                for rows in ROOM:
                    with masked_rows(rows):
                        run_grouped(Routing.random(work, rank), [(w13, scales[0]), (w2, scales[1])])
        torch.cuda.synchronize()
    except Exception as error:
        return f"{task}: {type(error).__name__}: {str(error)[:300]}"
    seconds = time.monotonic() - begin
    return f"{task} took {seconds:.0f} s" if seconds > 25 else None


def compile_tasks(only: str) -> Iterator[tuple]:
    for rank in RANKS:
        if only in f"experts {rank.name}":
            yield from ((rank, tokens) for tokens in TOKENS)
    for rank in RANKS:
        if only in f"experts {rank.name}":
            tiles = {replace(tile, walks=1) for tokens in TOKENS for tile in experts_tiles(rank, tokens)}
            yield from ((rank, tile) for tile in tiles)
    tiles = set()
    for name, (rows, columns) in LINEARS.items():
        if only in f"linear {name}":
            for tokens in LINEAR_TOKENS:
                for tile in linear_tiles(tokens, rows, columns):
                    key = replace(tile, splits=min(tile.splits, 2))
                    if (key, columns % key.columns == 0) not in tiles:
                        tiles.add((key, columns % key.columns == 0))
                        yield key, rows, columns


def parts_us(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel in one call."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    found.sort(key=lambda event: -event.self_device_time_total)
    return {event.key[:60]: round(event.self_device_time_total / 5, 1) for event in found}


def tune_rank(rank: Rank, until: float, stock: Callable[[Routing], Tensor] | None) -> None:
    weights = [experts_weights(rank) for _ in range(2)]
    blocks = [block_weights(w) for w in weights]
    size = sum(w.nbytes for w in weights[0].values())
    tiles = dict.fromkeys(tile for tokens in TOKENS for tile in experts_tiles(rank, tokens))
    right = check_experts(rank, weights[0], blocks[0], tiles)
    for tokens in TOKENS:
        if time.monotonic() > until:
            say(rank=rank.name, tokens=tokens, skipped="out of time")
            continue
        given = [Routing.random(tokens, rank) for _ in range(6)]
        touched = sum(g.touched for g in given) / len(given)
        case = {"rank": rank.name, "tokens": tokens, "touched": round(touched, 1)}
        theirs = float("nan")
        if stock:
            theirs = time_us(lambda i: stock(given[i]), 6)  # noqa: B023
            say(**case, how="SGLang BF16", us=round(theirs, 1))
        rate = size * touched / rank.experts / 1e6
        if rank.experts * tokens > ROOM[0]:
            with masked_rows(ROOM[1]):
                more = time_us(lambda i: run_grouped(given[i], blocks[i % 2]), 6)  # noqa: B023
            say(**case, how="DeepGEMM with twice the room", us=round(more, 1), ratio=round(theirs / more, 2))
        fast = time_us(lambda i: run_grouped(given[i], blocks[i % 2]), 6)  # noqa: B023
        say(
            **case,
            how="DeepGEMM",
            us=round(fast, 1),
            ratio=round(theirs / fast, 2),
            tbs=round(rate / fast, 2),
        )
        times = {}
        for tile in experts_tiles(rank, tokens):
            if tile in right:
                times[tile] = time_us(lambda i: run_experts(given[i], weights[i % 2], tile), 6, 9)  # noqa: B023
                say(**case, how="weight-only", us=round(times[tile], 1), tile=astuple(tile))
        best = min(times, key=times.__getitem__)
        used = times.get(experts_tiles(rank, tokens)[0])
        say(
            **case,
            best=round(times[best], 1),
            tile=astuple(best),
            in_use=used and round(used, 1),
            ratio=round(theirs / times[best], 2),
            tbs=round(rate / times[best], 2),
        )
    for tokens in (1, 64, 8192):
        if time.monotonic() > until:
            break
        given = Routing.random(tokens, rank)
        case = {"rank": rank.name, "tokens": tokens, "touched": given.touched}
        say(**case, how="weight-only", parts=parts_us(lambda: run_experts(given, weights[0])))  # noqa: B023
        say(**case, how="DeepGEMM", parts=parts_us(lambda: run_grouped(given, blocks[0])))  # noqa: B023


def tune_linears(only: str, until: float) -> None:
    for name, (rows, columns) in LINEARS.items():
        if only not in f"linear {name}" or time.monotonic() > until:
            continue
        count = max(4, CYCLED_BYTES // (rows * columns))
        layers = [random_mxfp8(rows, columns) for _ in range(count)]
        theirs = [torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) for _ in range(count)]
        for tokens in LINEAR_TOKENS:
            x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
            want = x.double() @ dequantize_mxfp8(*layers[0], torch.float64).T
            cublas = time_us(lambda i: torch.mm(x, theirs[i].T), count, 9)  # noqa: B023
            times = {}
            for tile in linear_tiles(tokens, rows, columns):
                error = relative(mxfp8_linear(x, *layers[0], tile=tile), want)
                if error > EXACT / 2:
                    say(check=name, tile=astuple(tile), error=error, ok=False)
                    continue
                times[tile] = time_us(lambda i: mxfp8_linear(x, *layers[i], tile=tile), count, 9)  # noqa: B023
            best = min(times, key=times.__getitem__)
            say(
                linear=name,
                tokens=tokens,
                cublas_us=round(cublas, 2),
                in_use=round(next(iter(times.values())), 2),
                best=round(times[best], 2),
                tile=astuple(best),
                ratio=round(cublas / times[best], 2),
                all={str(astuple(tile)): round(us, 2) for tile, us in times.items()},
            )


def tune(only: str, seconds: float) -> None:
    """Everything, within about so many seconds."""
    begin = time.monotonic()
    until = begin + seconds
    context = multiprocessing.get_context("spawn")
    ranks = [rank for rank in RANKS if only in f"experts {rank.name}"]
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        compiling = [pool.submit(compile_one, task) for task in compile_tasks(only)]
        stock: dict[str, Callable[[Routing], Tensor]] = {}
        if ranks and importlib.util.find_spec("sglang") is not None:
            prepare_sglang()
            for rank in ranks:
                stock[rank.name] = stock_experts(rank)
                for tokens in TOKENS:
                    stock[rank.name](Routing.random(tokens, rank))
        for task in compiling:
            if task.result():
                say(compiling=task.result())
    say(compiled_in=round(time.monotonic() - begin, 1), kernels=len(compiling))
    for rank in ranks:
        tune_rank(rank, until, stock.pop(rank.name, None))
        torch.cuda.empty_cache()
    tune_linears(only, until)
    say(seconds=round(time.monotonic() - begin, 1))
