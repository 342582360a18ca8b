"""Which variants of the Triton kernels steps need, without a GPU: launches are written down instead of made.

    python -m tests.attention.kernel_variants

Triton compiles a kernel anew for other constants, other data types, and for integers that are 1 or a multiple
of 16 where they were not. Needs `TRITON_INTERPRET` to be unset. Prints, as JSON, how many variants a warm-up
launches and what random steps launch beyond them.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import m3_kernels
import torch
from triton.runtime.jit import JITFunction

from sglang_m3.attention import warmup
from sglang_m3.attention.parameters import SelectionParameters
from sglang_m3.attention.pool import LayerPages
from sglang_m3.attention.step import table_sizes
from sglang_m3.attention.workspace import StepShape, Workspaces, bytes_needed

OPERATORS = ("plan_prefix", "choose_blocks", "attend_blocks", "store_tokens")
ONE_OF_EIGHT_RANKS = StepShape(
    rows=1100,
    requests=21,
    blocks=1024,
    pages=5,
    q_heads=8,
    kv_heads=1,
    index_heads=1,
    head_dim=128,
    topk=16,
)
ONE_RANK = replace(
    ONE_OF_EIGHT_RANKS, rows=300, requests=9, blocks=600, q_heads=64, kv_heads=4, index_heads=4
)
STEPS = 40


def variant_of(value: Any, specialized: bool) -> Hashable:
    """What of an argument Triton compiles for."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        wide = not -(1 << 31) <= value < 1 << 31
        return (wide, value == 1, value % 16 == 0) if specialized else wide
    if hasattr(value, "block_shape"):
        return str(value.base.dtype), tuple(value.block_shape)
    return repr(value)


def record(launched: set[Hashable]) -> None:
    """Let every launch from now on be added to `launched`, and not be made."""

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        bound = dict(zip((parameter.name for parameter in kernel.params), args)) | named
        key: list[Hashable] = [kernel.fn.__name__]
        for parameter in kernel.params:
            if parameter.name in bound:
                value = bound.pop(parameter.name)
                constant = parameter.is_constexpr
                key.append(repr(value) if constant else variant_of(value, not parameter.do_not_specialize))
        launched.add((*key, *sorted((name, repr(value)) for name, value in bound.items())))

    JITFunction.run = run


def missing(shape: StepShape, launched: set[Hashable]) -> tuple[int, list[str]]:
    """How many variants the warm-up launches, and what steps up to `shape` launch beyond them."""
    parameters = SelectionParameters(topk=shape.topk, init_blocks=0, local_blocks=1, sparse_layers=(1,))
    heads = (shape.kv_heads, shape.kv_heads, 1)
    pages = LayerPages(
        *(torch.zeros(shape.pages, 128, count, shape.head_dim, dtype=torch.bfloat16) for count in heads)
    )
    workspaces = Workspaces(*(torch.empty(size, dtype=torch.uint8) for size in bytes_needed(shape)))
    launched.clear()
    warmup.warm_up(shape, parameters, pages, workspaces, torch.bfloat16)
    known, beyond, draw = set(launched), [], random.Random(0)
    for _ in range(STEPS):
        blocks = draw.choice(table_sizes(shape.blocks * 128)) // 128
        requests = draw.randint(1, shape.requests)
        most = draw.choice([shape.rows, min(shape.rows, 40 * requests)])
        rows = draw.randint(requests, most)
        launched.clear()
        warmup._run(shape, parameters, pages, workspaces, torch.bfloat16, requests, rows, blocks)
        beyond += [f"{requests} requests, {rows} rows, {blocks} blocks: {key}" for key in launched - known]
    return len(known), beyond


def main() -> None:
    for name in OPERATORS:
        setattr(m3_kernels, name, getattr(importlib.import_module(f"m3_kernels.triton.sm90_{name}"), name))
    torch.cuda.synchronize = lambda device=None: None
    launched: set[Hashable] = set()
    record(launched)
    full = [missing(shape, launched) for shape in (ONE_OF_EIGHT_RANKS, ONE_RANK)]
    # One step warms up too little, and that must show.
    warmup.step_sizes = lambda shape: [(1, 16, shape.blocks)]
    too_little = missing(ONE_OF_EIGHT_RANKS, launched)
    print(json.dumps({"full": full, "too_little": too_little}))


if __name__ == "__main__":
    main()
