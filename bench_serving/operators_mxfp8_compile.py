"""Compile the MXFP8 operators' kernels on all cores, before `operators_mxfp8` times them."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from m3_kernels.triton.sm90_mxfp8_experts import ExpertsTile
from m3_kernels.triton.sm90_mxfp8_experts_few import FewExpertsTile
from m3_kernels.triton.sm90_mxfp8_linear import mxfp8_linear
from m3_kernels.triton.sm90_mxfp8_linear_few import FewTile
from m3_kernels.triton.sm90_mxfp8_linear_tiles import LinearTile
from torch import Tensor

from bench_serving.operators_mxfp8 import (
    DEVICE,
    HIDDEN,
    Rank,
    Routing,
    multiply_fast,
    one_jit_cache,
    prepare_sglang,
    run_experts,
    run_grouped,
    run_stock,
)
from bench_serving.operators_mxfp8_check import say

PROCESSES = 14


@dataclass(frozen=True)
class Experts:
    """A rank's experts with so many tokens: weight-only in a division, or by the operator's own choice."""

    rank: Rank
    tokens: int
    tile: ExpertsTile | FewExpertsTile | None = None


@dataclass(frozen=True)
class Grouped:
    """A rank's experts through DeepGEMM."""

    rank: Rank
    tokens: int


@dataclass(frozen=True)
class Linear:
    """A linear of so many rows and columns, likewise."""

    rows: int
    columns: int
    tokens: int
    tile: LinearTile | FewTile | None = None


@dataclass(frozen=True)
class Dense:
    """A linear through DeepGEMM."""

    rows: int
    columns: int
    tokens: int


@dataclass(frozen=True)
class Stock:
    """SGLang's BF16 experts of a rank with so many tokens each."""

    rank: Rank
    tokens: tuple[int, ...]


Work = Experts | Grouped | Linear | Dense | Stock


def empty_mxfp8(*shape: int) -> tuple[Tensor, Tensor]:
    value = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    return value, torch.empty(*shape[:-1], shape[-1] // 32, dtype=torch.uint8, device=DEVICE)


def empty_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    *outer, rows, columns = shape
    value = torch.empty(shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    return value, torch.empty(*outer, rows // 128, columns // 128, device=DEVICE)


def run_once(work: Work) -> None:
    """Run it once, so that the caches on disk have its kernels."""
    one_jit_cache()
    if isinstance(work, Stock):
        prepare_sglang()
        run_stock(work.rank, work.tokens)
    elif isinstance(work, Linear | Dense):
        x = torch.empty(work.tokens, work.columns, device=DEVICE, dtype=torch.bfloat16)
        if isinstance(work, Dense):
            multiply_fast(x, empty_blocks(work.rows, work.columns))
        else:
            mxfp8_linear(x, *empty_mxfp8(work.rows, work.columns), tile=work.tile)
    else:
        rank = work.rank
        shapes = ((rank.experts, 2 * rank.width, HIDDEN), (rank.experts, HIDDEN, rank.width))
        given = Routing.random(work.tokens, rank)
        if isinstance(work, Grouped):
            run_grouped(given, [empty_blocks(*shape) for shape in shapes])
        else:
            (w13, w13_scale), (w2, w2_scale) = (empty_mxfp8(*shape) for shape in shapes)
            weights = {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
            run_experts(given, weights, work.tile)
    torch.cuda.synchronize()


def compile_one(work: Work) -> str | None:
    """`run_once`; returns what went wrong or took long."""
    begin = time.monotonic()
    try:
        run_once(work)
    except Exception as error:
        return f"{work}: {type(error).__name__}: {str(error)[:300]}"
    seconds = time.monotonic() - begin
    return f"{work} took {seconds:.0f} s" if seconds > 25 else None


@contextmanager
def compiling(works: Iterable[Work]) -> Iterator[None]:
    """Compile in other processes while the block runs, and wait for them at its end."""
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        tasks = [pool.submit(compile_one, work) for work in dict.fromkeys(works)]
        yield
        for task in tasks:
            if task.result():
                say(compiling=task.result())
    say(compiled_in=round(time.monotonic() - begin, 1), works=len(tasks))
