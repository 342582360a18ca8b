"""`python -m bench_serving.operators`: ours and SGLang's operators in one run, beside the floor.

Decode and extend steps of block selection and attention, the MoE and linear products of MXFP8 weights, and
the MoE of BF16 weights, on one grid; what this machine cannot run is listed with the reason. The families are
also commands of their own, with more cases: `operators_selection`, `operators_attention`, `operators_mxfp8`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from bench_serving.forked import run_forked
from bench_serving.machine import gpus, machine
from sglang_m3.hardware import target


@dataclass(frozen=True)
class Timing:
    """One case.

    Attributes:
        ours_us, sglang_us, floor_us: median microseconds of a call; None where there is nothing to time.
        note: why something is missing.
    """

    family: str
    case: str
    ours_us: float | None
    sglang_us: float | None
    floor_us: float | None
    note: str = ""

    def line(self) -> str:
        """A row of the table."""

        def shown(value: float | None) -> str:
            return "" if value is None else f"{value:,.1f}"

        ratio = f"{self.sglang_us / self.ours_us:.2f}x" if self.sglang_us and self.ours_us else ""
        reached = f"{self.floor_us / self.ours_us:.0%}" if self.floor_us and self.ours_us else ""
        cells = (self.family, self.case, *map(shown, (self.sglang_us, self.ours_us)), ratio)
        return f"| {' | '.join((*cells, shown(self.floor_us), reached, self.note))} |"


HEADER = """\
| operator | case | SGLang us | ours us | ratio | floor us | of floor | |
|---|---|---|---|---|---|---|---|"""
FLOPS_PER_US = 790e6
"""An 8192-cubed bfloat16 product on an H200; ours multiplies in bfloat16, too."""
PEER_MISSING = "SGLang is not installed"


@dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
        name: unique in its family.
        time: times it.
        compile: what runs its kernels once with little memory, so that they are compiled; cases that need the
            same share the same callable.
    """

    name: str
    time: Callable[[], Timing]
    compile: tuple[Callable[[], object], ...] = ()


def selection() -> Iterator[Case]:
    """Scores and top-16, its share of the prefix plan included."""
    from bench_serving import operators_selection as family

    cases = list(family.cases())
    needed: dict[Any, list[Callable[[], object]]] = {case: [] for case in cases}
    for job in family.compile_jobs(cases, importlib.util.find_spec("sglang") is not None):
        for case in job.needed_by:
            needed[case].append(job.run)
    for case in cases:
        name = f"{case.name}; {case.heads} index heads, {case.batch} x {case.new} rows of {case.context:,}"
        yield Case(name, functools.partial(_selection, family, case, name), tuple(needed[case]))


def _selection(family: ModuleType, case: Any, name: str) -> Timing:
    with_peer = importlib.util.find_spec("sglang") is not None
    # The family measures a row of its own table: five cells of the step, SGLang's, ours, plan, floor.
    cells = [cell.strip() for cell in family.measure(case, with_peer).strip("|").split("|")]
    theirs, ours, _, floor = cells[5:9]
    return Timing(
        "choose blocks",
        name,
        float(ours),
        float(theirs) if with_peer else None,
        float(floor),
        "" if with_peer else PEER_MISSING,
    )


def attention() -> Iterator[Case]:
    """Attention over the chosen blocks."""
    from bench_serving import operators_attention as family

    for case in family.CASES:
        name = (
            f"{case.phase}; {case.q_heads} / {case.kv_heads} heads, {case.rows} rows of {case.context:,}, "
            f"{case.selection or 'dense'}{', shared pages' if case.shared else ''}"
            f", {'E4M3' if case.e4m3 else 'BF16'}"
        )
        compiled = (functools.partial(family.compile_kernels, case),)
        yield Case(name, functools.partial(_attention, family, case, name), compiled)


def _attention(family: ModuleType, case: Any, name: str) -> Timing:
    inputs = family.make_inputs(case)
    run, _ = family.ours(inputs)
    peer = family.sglang_operator(case, inputs)
    layers = family.cycle(case, inputs)
    timing = Timing(
        "attend blocks",
        name,
        family.time_us(run, layers),
        None if peer is None else family.time_us(peer, layers),
        family.floor_us(case, inputs),
        "" if peer is not None else "SGLang has none for it, or is not installed",
    )
    del inputs, run, peer, layers
    torch.cuda.empty_cache()
    return timing


def experts() -> Iterator[Case]:
    """Routed experts of an expert-parallel rank with BF16 weights: SGLang's kernels, two configurations."""
    from bench_serving import operators_experts as family

    for case in family.cases():
        compiled = (functools.partial(_bf16_experts_once, family, case),)
        yield Case(case.name, functools.partial(_bf16_experts, family, case), compiled)


def _bf16_experts_once(family: ModuleType, case: Any) -> None:
    from bench_serving.operators_mxfp8 import prepare_sglang

    if importlib.util.find_spec("sglang") is not None:
        prepare_sglang()
        family.compile_kernels(case)


def _bf16_experts(family: ModuleType, case: Any) -> Timing:
    from bench_serving.operators_mxfp8 import prepare_sglang

    if importlib.util.find_spec("sglang") is None:
        return Timing("BF16 experts", case.name, None, None, None, PEER_MISSING)
    prepare_sglang()
    times = family.measure(case)
    note = "SGLang's kernels, its configuration and the plugin's"
    return Timing("BF16 experts", case.name, times.ours_us, times.sglang_us, times.floor_us, note)


DECODE_TOKENS = 256
"""Steps of up to so many rows are called decode here, larger ones extend."""


def mxfp8() -> Iterator[Case]:
    """Routed experts and linear layers of one rank of eight with MXFP8 weights, beside BF16 ones."""
    from bench_serving import operators_mxfp8 as family

    for rank, tokens in itertools.product(family.RANKS, family.TOKENS):
        name = f"{_phase(tokens)}; MoE {rank.name}, {tokens:,} tokens"
        compiled = (functools.partial(_experts_once, rank, tokens),)
        yield Case(name, functools.partial(_experts, family, rank, tokens, name), compiled)
    for (layer, shape), tokens in itertools.product(family.LINEARS.items(), family.TOKENS):
        name = f"{_phase(tokens)}; linear {layer} ({shape[0]:,} x {shape[1]:,}), {tokens:,} tokens"
        compiled = (functools.partial(_linear_once, shape, tokens),)
        yield Case(name, functools.partial(_linear, family, shape, tokens, name), compiled)


def _experts_once(rank: Any, tokens: int) -> None:
    from bench_serving.operators_mxfp8_compile import Experts, Stock, run_once

    run_once(Experts(rank, tokens))
    if importlib.util.find_spec("sglang") is not None:
        torch.cuda.empty_cache()
        run_once(Stock(rank, (tokens,)))


def _linear_once(shape: tuple[int, int], tokens: int) -> None:
    from bench_serving.operators_mxfp8_compile import Linear, run_once

    run_once(Linear(*shape, tokens))


def _phase(tokens: int) -> str:
    return "decode" if tokens <= DECODE_TOKENS else "extend"


def _experts(family: ModuleType, rank: Any, tokens: int, name: str) -> Timing:
    given = [family.Routing.random(tokens, rank) for _ in range(8)]
    weights = [family.experts_weights(rank) for _ in range(2)]
    size = sum(tensor.nbytes for tensor in weights[0].values())
    touched = sum(routing.touched for routing in given) / len(given)
    ours = family.time_us(lambda i: family.run_experts(given[i], weights[i % 2]), len(given))
    theirs = None
    if importlib.util.find_spec("sglang") is not None:
        family.prepare_sglang()
        stock = family.stock_experts(rank)
        theirs = family.time_us(lambda i: stock(given[i]), len(given))
    # Every choice on this rank is three products of hidden x width.
    choices = sum(int((routing.ids >= 0).sum()) for routing in given) / len(given)
    products = 2 * choices * 3 * family.HIDDEN * rank.width
    floor = max(size * touched / rank.experts / family.BYTES_PER_US, products / FLOPS_PER_US)
    return Timing("experts", name, ours, theirs, floor, "SGLang's in BF16" if theirs else PEER_MISSING)


def _linear(family: ModuleType, shape: tuple[int, int], tokens: int, name: str) -> Timing:
    rows, columns = shape
    count = max(4, family.CYCLED_BYTES // (rows * columns))
    weights = [family.random_mxfp8(rows, columns) for _ in range(count)]
    plain = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    moved = rows * columns * 33 / 32 + 2 * tokens * (rows + columns)
    return Timing(
        "linear",
        name,
        family.time_us(lambda i: family.mxfp8_linear(x, *weights[i]), count),
        family.time_us(lambda i: torch.mm(x, plain[i].T), count),
        max(moved / family.BYTES_PER_US, 2 * tokens * rows * columns / FLOPS_PER_US),
        "cuBLAS in BF16, as SGLang calls it",
    )


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "selection": selection,
    "attention": attention,
    "mxfp8": mxfp8,
    "experts": experts,
}


def is_here(family: str) -> bool:
    """Whether this checkout has the family; unlike `unavailable`, leaves the GPU alone."""
    return importlib.util.find_spec(f"bench_serving.operators_{family}") is not None


def unavailable(family: str) -> str | None:
    """Why this machine cannot run a family; None if it can."""
    if target() != "sm90":
        return "needs an sm90 GPU, this machine has " + machine().split(";")[0]
    if not is_here(family):
        return f"bench_serving/operators_{family}.py is not in this checkout"
    return None


def compile_ahead(families: list[str], only: str, processes: int, seconds: float) -> dict[str, str]:
    """Compile the cases' kernels in forked processes, side by side.

    This process must not have used its GPU yet.

    Returns:
        By case, why it cannot be timed; cases that can are not in it.
    """
    needed_by: dict[Callable[[], object], list[str]] = {}
    for family in families:
        for case in FAMILIES[family]():
            for job in case.compile if only in case.name else ():
                needed_by.setdefault(job, []).append(case.name)
    outcomes = run_forked(list(needed_by), processes, seconds)
    failed = zip(needed_by.values(), outcomes, strict=True)
    return {name: reason for names, reason in failed if reason for name in names}


def run(
    families: list[str], only: str, left_out: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Timing]:
    """Timings of the cases whose names contain `only`. A family that cannot run is one row that says why, and
    so is a case in `left_out`, by its name."""
    for family in families:
        reason = unavailable(family)
        if reason is not None:
            yield Timing(family, "all cases", None, None, None, f"skipped: {reason}")
            continue
        for case in FAMILIES[family]():
            if case.name in left_out:
                yield Timing(family, case.name, None, None, None, f"skipped: {left_out[case.name]}")
            elif only in case.name:
                yield case.time()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_serving.operators",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--only", default="", help="cases whose name contains this, such as 'decode'")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compile kernels")
    parser.add_argument("--compile-seconds", type=float, default=300, help="the limit for that")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so many")
    chosen = parser.parse_args(arguments)
    begin = time.monotonic()
    left_out = {}
    if gpus():
        limit = min(chosen.compile_seconds, chosen.seconds)
        here = [family for family in chosen.families if is_here(family)]
        left_out = compile_ahead(here, chosen.only, chosen.processes, limit)
    torch.manual_seed(0)
    print(f"Machine: {machine()}.\n\n{HEADER}", flush=True)
    for timing in run(chosen.families, chosen.only, left_out):
        print(timing.line(), flush=True)
        if chosen.out is not None:
            with chosen.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"machine": machine(), **asdict(timing)}) + "\n")
        if time.monotonic() - begin > chosen.seconds:
            print(f"out of time after {timing.case}")
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
