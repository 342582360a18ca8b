"""Tune SGLang's BF16 experts for M3's shapes on this GPU: `python -m bench_serving.tune_experts --out DIR`.

Writes configuration files in SGLang's format and with its names, `DIR/configs/triton_*/E=*,N=*.json` and
`*_down.json`, as `SGLANG_MOE_CONFIG_DIR=DIR` reads them; the plugin ships such files.

Divisions of the two products are compiled on all cores, compared with float64, and timed apart, because they
share nothing but the height of a block. The best pairs are then timed as a layer, from routing to the sum,
beside SGLang's defaults, and the fastest is kept. Tokens are those of a step over all ranks, as in SGLang's
files; every step has at least one choice on this rank. JSON lines on standard output, one for each step:

    {"tokens": ..., "default_us": ..., "tuned_us": ..., "floor_us": ..., "up": entry, "down": entry, ...}
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import operator
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from bench_serving.experts_layer import Layer, configured, relative
from bench_serving.experts_product import (
    Division,
    Experts,
    Kernel,
    compile_kernel,
    divisions,
    expected_product,
    kernel_of,
)
from bench_serving.graph_time import time_us
from bench_serving.operators_mxfp8 import prepare_sglang

TOKENS = (64, 32, 8, 1, 16, 256, 8192, 1024, 128, 2048, 512, 4096, 4, 48, 96, 24, 2)
"""Tuned in this order, until the time is over."""
PROCESSES = 14
ERROR = 6e-3
"""Largest relative error of a product whose result is rounded to bfloat16."""


def say(**result: object) -> None:
    print(json.dumps(result), flush=True)


def candidates(experts: Experts, tokens: Iterable[int]) -> list[Kernel]:
    """Kernels to compile, those of the first tokens first."""
    found: dict[Kernel, None] = {}
    for count in tokens:
        for division in divisions(experts, count):
            found[kernel_of(experts, "up", division, count, False)] = None
            found[kernel_of(experts, "down", division, count, division.descriptor)] = None
    return list(found)


class Search:
    """The kernels that are right, and their times."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.right: set[Kernel] = set()

    def check(self, kernels: list[Kernel]) -> None:
        """Keep the kernels whose product equals float64's within the rounding of the result."""
        layer, wanted = self.layer, {}
        for kernel in kernels:
            tokens = 2 if not kernel.aligned else 40 if kernel.early else 600
            case = (kernel.product, tokens)
            routing = layer.routing(tokens, 7)
            torch.manual_seed(11)
            run, blocks, given = layer.product(kernel, routing)
            if case not in wanted:
                wanted[case] = expected_product(
                    kernel, blocks, given, layer.weights[kernel.product], layer.experts.choices
                )
            want = wanted[case]
            try:
                out = run()
                torch.cuda.synchronize()
            except Exception as error:
                say(check=str(kernel), failed=f"{type(error).__name__}: {error}"[:200])
                continue
            error = relative(out, want)
            if error < ERROR:
                self.right.add(kernel)
            else:
                say(check=str(kernel), error=error)

    def best(
        self, tokens: int, product: str, rows: int, descriptor: bool | None
    ) -> tuple[float, Division] | None:
        """The fastest division of a product, among those with blocks of so many rows."""
        experts = self.layer.experts
        routings = self.layer.routings(tokens)
        found: tuple[float, Division] | None = None
        for division in divisions(experts, tokens):
            ordered = product == "down" and division.descriptor
            kernel = kernel_of(experts, product, division, tokens, ordered)
            wanted = division.rows == rows and descriptor in (None, division.descriptor)
            if not wanted or kernel not in self.right:
                continue
            runs = [self.layer.product(kernel, routing)[0] for routing in routings]
            enough = float("inf") if found is None else 1.15 * found[0]
            us = time_us(operator.call, runs, 3, enough=enough)
            if found is None or us < found[0]:
                found = us, division
        return found


def tune_tokens(
    search: Search, tokens: int, compile_all: Callable[[list[Kernel]], list[Kernel]]
) -> dict[str, object]:
    """The fastest divisions of a step of so many tokens."""
    layer, experts = search.layer, search.layer.experts
    routings = layer.routings(tokens)
    runs = [functools.partial(layer.run, routing) for routing in routings]
    pairs: list[tuple[Division | None, Division | None]] = [(None, None)]
    parts: dict[str, object] = {}
    for rows in sorted({division.rows for division in divisions(experts, tokens)}):
        up = search.best(tokens, "up", rows, None)
        for descriptor in (False, True):
            down = search.best(tokens, "down", rows, descriptor)
            if up is not None and down is not None:
                pairs.append((up[1], down[1]))
                parts[f"{rows}{' ordered' if descriptor else ''}"] = [round(up[0], 1), round(down[0], 1)]
    compile_all(
        [
            kernel_of(experts, "up", up, tokens, True)
            for up, down in pairs
            if down is not None and down.descriptor
        ]
    )
    times: dict[tuple[Division | None, Division | None], float] = {}
    want = layer.expected(routings[0])
    for pair in pairs:
        with configured(*pair):
            error = relative(layer.run(routings[0]), want)
            if not error < 2 * ERROR:
                say(tokens=tokens, pair=str(pair), error=error)
                continue
            times[pair] = time_us(operator.call, runs, 5)
    best = min(times, key=times.__getitem__)
    result = {
        "experts": experts.local,
        "tokens": tokens,
        "touched": round(sum(routing.touched for routing in routings) / len(routings), 1),
        "default_us": round(times[None, None], 1),
        "tuned_us": round(times[best], 1),
        "floor_us": round(layer.floor_us(routings), 1),
        "up": best[0] and best[0].entry(),
        "down": best[1] and best[1].entry(),
        "parts_us": parts,
        "pairs_us": [round(us, 1) for us in times.values()],
    }
    say(**result)
    return result


def write(out: Path, experts: Experts, results: list[dict[str, object]]) -> list[Path]:
    """The configuration files. A step that SGLang's default served best keeps it, written out."""
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import (
        get_config_file_name,
        get_default_config,
    )

    folder = out / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, down in (("up", False), ("down", True)):
        entries = {}
        for result in sorted(results, key=lambda result: result["tokens"]):
            tokens = result["tokens"]
            default = get_default_config(
                tokens, experts.local, experts.width, experts.hidden, experts.choices, None, False
            )
            entries[str(tokens)] = result[name] or default
        file = folder / get_config_file_name(experts.local, experts.width, None, down_moe=down)
        file.write_text(json.dumps(entries, indent=4) + "\n")
        files.append(file)
    return files


def tune(
    shapes: list[Experts], tokens: Sequence[int], out: Path, seconds: float, compiling: float
) -> list[Path]:
    """Tune one shape after the other within about so many seconds, of which `compiling` for the kernels.

    Steps that the time does not reach are left out of the files.
    """
    begin = time.monotonic()

    def passed() -> float:
        return round(time.monotonic() - begin, 1)

    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        kernels = list(dict.fromkeys(kernel for shape in shapes for kernel in candidates(shape, tokens)))
        tasks = {pool.submit(compile_kernel, shapes[0], kernel): kernel for kernel in kernels}
        prepare_sglang()
        layer = Layer(shapes[0])
        for count in sorted(tokens):
            layer.run(layer.routing(count, 0))  # SGLang compiles the activation meanwhile.
        say(prepared=passed())
        _, late = concurrent.futures.wait(tasks, max(10, compiling - passed()))
        for task in late:
            task.cancel()
        concurrent.futures.wait(tasks)
        done = {kernel: task.result() for task, kernel in tasks.items() if not task.cancelled()}
        for kernel, failure in done.items():
            if failure is not None:
                say(compiling=str(kernel), failed=failure)
        say(compiled=len(done), of=len(kernels), after=passed())
        ready = [kernel for kernel, failure in done.items() if failure is None]
        search = Search(layer)
        search.check(ready)
        say(right=len(search.right), after=passed())

        def compile_all(more: list[Kernel]) -> None:
            list(pool.map(functools.partial(compile_kernel, shapes[0]), more))

        written: dict[Experts, list[Path]] = {}
        for shape in shapes:
            if shape != layer.experts:
                layer.weights.clear()
                search.layer = layer = Layer(shape)
            results = []
            for count in tokens:
                if passed() > seconds:
                    say(experts=shape.local, tokens=count, skipped="out of time")
                    continue
                results.append(tune_tokens(search, count, compile_all))
                written[shape] = write(out, shape, results)
    files = [file for both in written.values() for file in both]
    say(seconds=passed(), files=[str(file) for file in files])
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--experts", type=int, nargs="+", default=[16], help="on a rank: 16 with --ep-size 8, 32 with 4"
    )
    parser.add_argument("--width", type=int, default=3072, help="of an expert on the rank")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="in a step")
    parser.add_argument("--seconds", type=float, default=600, help="after which no step begins any more")
    parser.add_argument("--compile-seconds", type=float, default=300, help="of these, for compilation")
    chosen = parser.parse_args(arguments)
    shapes = [Experts(local, chosen.width) for local in chosen.experts]
    tune(shapes, chosen.tokens, chosen.out, chosen.seconds, chosen.compile_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
