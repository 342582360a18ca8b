"""Check and time divisions of the MXFP8 products: `python -m bench_serving.operators_mxfp8 --tune`.

Compiles on all cores, checks every division against float64, then times it. One JSON line for each result:

    {"check": ..., "error": relative to float64, "ok": ...}
    {"rank": ..., "tokens": ..., "how": "SGLang BF16" | "DeepGEMM" | "weight-only", "us": ..., "tile": ...}
    {"rank": ..., "tokens": ..., "best": ..., "in use": ..., "ratio": SGLang's time over the best}
    {"parts": {kernel: us for each call}, ...}
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace

import torch
import triton
from m3_kernels.reference.dequantize_mxfp8 import dequantize_mxfp8
from m3_kernels.triton import sm90_mxfp8_grouped
from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile, experts_tile
from m3_kernels.triton.sm90_mxfp8_experts_few import FewExpertsTile
from m3_kernels.triton.sm90_mxfp8_linear import HELD, mxfp8_linear
from m3_kernels.triton.sm90_mxfp8_linear_few import FEW_TOKENS, FewTile, few_tile
from m3_kernels.triton.sm90_mxfp8_linear_tiles import CHUNK, LinearTile
from torch import Tensor

from bench_serving.operators_mxfp8 import (
    CYCLED_BYTES,
    DEVICE,
    EXPERTS,
    LINEAR_TOKENS,
    LINEARS,
    RANKS,
    TOKENS,
    TOPK,
    Rank,
    Routing,
    block_weights,
    early_launches,
    experts_weights,
    prepare_sglang,
    random_mxfp8,
    run_experts,
    run_grouped,
    stock_experts,
    time_us,
)
from bench_serving.operators_mxfp8_check import EXACT, check_experts, relative, say
from bench_serving.operators_mxfp8_compile import Experts, Grouped, Linear, Work, compiling

MOST_TILED = 256
"""Tokens up to which tiles that hold the weight in registers are tried."""

ROOM = (1 << 17, 1 << 16)
"""Rows of the masked layout to try, the number in use first."""


def experts_tiles(rank: Rank, tokens: int) -> list[ExpertsTile | FewExpertsTile]:
    """Divisions to try; the one in use is the first."""
    pairs = tokens * TOPK * rank.experts // EXPERTS
    base = experts_tile(pairs, rank.experts, rank.width)
    if isinstance(base, ExpertsTile):
        shapes = ((128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3))
        tried = [ExpertsTile(r, p, c, base.walks, w, s) for r, p, c, w, s in shapes]
    else:
        shapes = ((16, 1, 4, 3), (16, 1, 8, 2), (16, 2, 4, 2), (16, 4, 2, 2), (32, 1, 4, 2))
        ups = [FewTile(r, rw, cw, base.up.tokens, steps) for r, rw, cw, steps in shapes]
        tried = [replace(base, up=up) for up in ups]
        tried += [replace(base, walks=3 - base.walks), ExpertsTile(128, 16, 64, base.walks, 4, 4)]
    return [base, *(tile for tile in tried if tile != base)]


def linear_tiles(tokens: int, rows: int, columns: int) -> list[LinearTile | FewTile | None]:
    """Likewise for a linear; None is the way that the operator takes by itself."""
    if tokens > MOST_TILED:
        return [None]
    tried: list[LinearTile | FewTile | None] = [None]
    if tokens <= FEW_TOKENS:
        few = few_tile(columns)
        tried += [replace(few, row_warps=2 * few.row_warps)]
        tried.append(replace(few, column_warps=max(1, few.column_warps // 2)))
    chunks = triton.cdiv(columns, CHUNK)
    held = {triton.cdiv(chunks, splits) for splits in range(1, chunks + 1)}
    for tile_rows, tile_tokens, steps in itertools.product((64, 128), (16, 32, 64), sorted(held)):
        programs = triton.cdiv(rows, tile_rows) * triton.cdiv(chunks, steps)
        tiles = triton.cdiv(tokens, tile_tokens)
        fits = tokens <= 4 * tile_tokens and tile_tokens <= max(16, triton.next_power_of_2(tokens))
        if not fits or not (2 < steps <= HELD[1] and 48 <= programs <= 480):
            continue
        for walks in sorted({1, tiles} if programs < 300 else {1}):
            tried.append(LinearTile(tile_rows, tile_tokens, 1, steps, walks))
        if steps == 4 and tile_tokens <= 32:
            tried.append(LinearTile(tile_rows, tile_tokens, 64 // tile_tokens, tile_tokens // 16, 1))
    return list(dict.fromkeys(tried))


@contextmanager
def masked_rows(rows: int) -> Iterator[None]:
    """DeepGEMM's masked layout with so many rows at most."""
    before = sm90_mxfp8_grouped.masked_rows
    sm90_mxfp8_grouped.masked_rows = lambda device: rows
    try:
        yield
    finally:
        sm90_mxfp8_grouped.masked_rows = before


def works(only: str) -> Iterator[Work]:
    """What is to be compiled."""
    for rank in RANKS:
        if only in f"experts {rank.name}":
            yield from (Grouped(rank, tokens) for tokens in TOKENS)
            yield from (Experts(rank, 4, tile) for tokens in TOKENS for tile in experts_tiles(rank, tokens))
    for name, (rows, columns) in LINEARS.items():
        if only in f"linear {name}":
            for tokens in LINEAR_TOKENS:
                for tile in linear_tiles(tokens, rows, columns):
                    yield Linear(rows, columns, tokens, tile)


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
    return {
        f"{number}: {event.key[:60]}": round(event.self_device_time_total / 5, 1)
        for number, event in enumerate(found)
    }


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
        if rank.experts * tokens > ROOM[1]:
            with masked_rows(ROOM[1]):
                more = time_us(lambda i: run_grouped(given[i], blocks[i % 2]), 6)  # noqa: B023
            say(**case, how="DeepGEMM with half the room", us=round(more, 1), ratio=round(theirs / more, 2))
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
            if time.monotonic() > until:
                break
            x = torch.randn(tokens, columns, device=DEVICE, dtype=torch.bfloat16)
            want = x.double() @ dequantize_mxfp8(*layers[0], torch.float64).T
            cublas = time_us(lambda i: torch.mm(x, theirs[i].T), count, 9)  # noqa: B023
            times = {}
            for tile in linear_tiles(tokens, rows, columns):
                error = relative(mxfp8_linear(x, *layers[0], tile=tile), want)
                if error > EXACT / 2:
                    say(check=name, tile=str(tile), error=error, ok=False)
                    continue
                times[tile] = time_us(lambda i: mxfp8_linear(x, *layers[i], tile=tile), count, 9)  # noqa: B023
            best = min(times, key=times.__getitem__)
            say(
                linear=name,
                tokens=tokens,
                cublas_us=round(cublas, 2),
                in_use=round(next(iter(times.values())), 2),
                best=round(times[best], 2),
                tile=str(best),
                ratio=round(cublas / times[best], 2),
                all={str(tile): round(us, 2) for tile, us in times.items()},
            )


def tune(only: str, seconds: float) -> None:
    """Everything, within about so many seconds."""
    begin = time.monotonic()
    until = begin + seconds
    ranks = [rank for rank in RANKS if only in f"experts {rank.name}"]
    stock: dict[str, Callable[[Routing], Tensor]] = {}
    with compiling(works(only)):
        if ranks and importlib.util.find_spec("sglang") is not None:
            prepare_sglang()
            for rank in ranks:
                stock[rank.name] = stock_experts(rank)
                for tokens in TOKENS:
                    stock[rank.name](Routing.random(tokens, rank))
    early_launches()
    for rank in ranks:
        tune_rank(rank, until, stock.pop(rank.name, None))
        torch.cuda.empty_cache()
    tune_linears(only, until)
    say(seconds=round(time.monotonic() - begin, 1))
