"""`python -m bench_serving.plan --gpu h200 --gpus 8 --weights mxfp8`: capacity of a node on paper.

Prints one rank's memory, the tokens and sessions that fit, the bytes of a decode step, the least time a
decode and an extend step can take (`bench_serving.cost_model`), an estimate of decode, and how far both are
from what was measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_serving import one_rank, options
from bench_serving.cost_model import GPUS, Gpu, Layout, Step, step_cost
from bench_serving.server import PLUGINS, Variant
from bench_serving.store import POINTS, Store, current
from sglang_m3.config import ConfigError, M3Config
from sglang_m3.doctor.machine import TAKEN_BEFORE_WEIGHTS
from sglang_m3.doctor.memory import (
    ELEMENT_BYTES,
    Parallel,
    StepSizes,
    WeightFormat,
    check_division,
    rank_memory,
)
from sglang_m3.doctor.published import NAMES, config_of

CHUNK_TOKENS = 8192
"""Rows of the largest step, which size the operators' workspaces (`--chunked-prefill-size`)."""


@dataclass(frozen=True)
class Measured:
    """A measured step of an emulated rank of 8 on one H200.

    Attributes:
        software: "stock" or "plugin".
        seconds: of a decode step (`new_tokens` 1), or until the first token of all requests.
        weights: the format it served them in.
    """

    software: str
    step: Step
    seconds: float
    source: str
    weights: WeightFormat = "bfloat16"

    @property
    def floor(self) -> float:
        """Seconds that the cost model gives."""
        return step_cost(emulated_rank(self.weights), self.step).seconds(GPUS["h200"], self.weights)


BATCH = "a batch of 60,928 cached tokens and 512 new each"
AGENTIC = "agentic-60k, median time per output token"
MEASURED = (
    *(
        Measured("stock", Step(requests, new, 60_928, 512, sharing=False), seconds, BATCH)
        for new, times in ((1, (0.0104, 0.0194, 0.0467)), (512, (0.168, 0.432, 1.504)))
        for requests, seconds in zip((1, 8, 32), times)
    ),
    *(
        Measured("plugin", Step(requests, 1, 59_904, private, sharing=True), seconds, AGENTIC, weights)
        for weights, times in (
            ("bfloat16", (0.00561, 0.01319, 0.01614, 0.02100)),
            ("mxfp8", (0.00499, 0.00912, 0.01171, 0.01482)),
        )
        for requests, private, seconds in zip((1, 6, 11, 22), (720, 835, 757, 764), times)
    ),
)
"""With SGLang 0.5.23 on 2026-11-30. A software's first decode step, of one request, is what its estimates
start from (`beyond_floor`)."""


def beyond_floor(software: str) -> float:
    """Seconds that a decode step of one request took beyond its floor: launches, norms, sampling."""
    first = next(one for one in MEASURED if one.software == software and one.step.new_tokens == 1)
    assert first.step.requests == 1, first
    return first.seconds - first.floor


def memory_table(layout: Layout, gpu: Gpu, static_fraction: float, session: Step, requests: int) -> list[str]:
    """Markdown lines: one rank's memory, and what fits; `requests` at most run at once."""
    held = rank_memory(
        layout.config,
        layout.parallel,
        weights=layout.weights,
        free_bytes=gpu.memory_bytes - TAKEN_BEFORE_WEIGHTS,
        static_fraction=static_fraction,
        kv_element_bytes=layout.kv_element_bytes,
        index_element_bytes=layout.index_element_bytes,
        step=StepSizes(CHUNK_TOKENS, requests, session.context + CHUNK_TOKENS),
    )
    parts = {name.replace("_", " "): size for name, size in asdict(held.weights).items()}
    lines = ["| one rank holds | GB |", "|---|---|"]
    lines += [f"| {name} | {size / 1e9:.2f} |" for name, size in parts.items() if size]
    lines += [
        f"| **weights** | **{held.weights.total / 1e9:.1f}** of {gpu.memory_bytes / 1e9:.1f} |",
        f"| operators' workspaces | {held.workspaces / 1e9:.2f} |",
        f"| keys and values of 1,000 tokens | {held.kv_per_token / 1e6:.4f} |",
        f"| index keys of 1,000 tokens | {held.index_per_token / 1e6:.4f} |",
        "",
    ]
    if not held.tokens:
        return [*lines, f"With a static fraction of {static_fraction:g} the weights leave room for no cache."]
    sessions = max(0, held.tokens - session.shared_tokens) // session.private_tokens
    return [
        *lines,
        f"With a static fraction of {static_fraction:g}: {held.tokens:,} tokens of cache, or one prefix of "
        f"{session.shared_tokens:,} tokens and {sessions:,} sessions of {session.private_tokens:,} private "
        "ones.",
    ]


def step_table(layout: Layout, gpu: Gpu, session: Step, concurrencies: Iterable[int], new: int) -> list[str]:
    """Markdown lines: what a decode step reads, its floor and estimate, and the floors of extend steps."""
    lines = [
        "| at once | read per decode step, GB | of it index keys, GB (unshared) | decode floor, ms"
        f" (unshared) | decode estimate, ms | tokens/s by estimate | extend of {new} each, floor, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for requests in concurrencies:
        costs = {}
        for sharing in (True, False):
            step = Step(requests, 1, session.shared_tokens, session.private_tokens, sharing)
            costs[sharing] = step_cost(layout, step)
        shared, unshared = (costs[sharing].seconds(gpu, layout.weights) for sharing in (True, False))
        estimate = shared + beyond_floor("plugin")
        extend = step_cost(layout, Step(requests, new, session.shared_tokens, new, sharing=True))
        keys = [costs[sharing].bytes["index keys"] / 1e9 for sharing in (True, False)]
        lines.append(
            f"| {requests} | {sum(costs[True].bytes.values()) / 1e9:.1f} | {keys[0]:.2f} ({keys[1]:.2f}) "
            f"| {shared * 1e3:.2f} ({unshared * 1e3:.2f}) | {estimate * 1e3:.1f} "
            f"| {requests / estimate:,.0f} | {extend.seconds(gpu, layout.weights) * 1e3:.1f} |"
        )
    return lines


def emulated_rank(weights: WeightFormat = "bfloat16") -> Layout:
    """`bench_serving.one_rank --of 8`."""
    return Layout(M3Config.read(one_rank.config(one_rank.Rank(of=8))), Parallel(), weights=weights)


def check_table(measured: Iterable[Measured] = MEASURED) -> list[str]:
    """Markdown lines: measured steps of the emulated rank beside their floors, and the estimates' errors."""
    lines = [
        "| | measured | step | floor ms | measured ms | measured / floor | estimate ms | its error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in measured:
        decode = point.step.new_tokens == 1
        kind = "decode" if decode else f"extend of {point.step.new_tokens}"
        estimate = point.floor + beyond_floor(point.software)
        shown = f"{estimate * 1e3:.1f} | {estimate / point.seconds - 1:+.0%}" if decode else " | "
        lines.append(
            f"| {point.software}, {point.weights} | {point.source} | {kind}, {point.step.requests} at once "
            f"| {point.floor * 1e3:.2f} | {point.seconds * 1e3:.1f} | {point.seconds / point.floor:.1f} "
            f"| {shown} |"
        )
    return lines


def check_text() -> list[str]:
    """How far the estimates and floors are from what was measured, in words."""
    decodes = [one for one in MEASURED if one.step.new_tokens == 1 and one.step.requests > 1]
    beyond = ", ".join(f"{name} {beyond_floor(name) * 1e3:.1f} ms" for name in ("stock", "plugin"))
    errors = [(one.floor + beyond_floor(one.software)) / one.seconds - 1 for one in decodes]
    ratios = [one.seconds / one.floor for one in MEASURED if one.step.new_tokens > 1]
    return [
        "A floor leaves out launches, collectives, norms and sampling. An estimate adds to a decode step's "
        f"floor what the same software's step of one request took beyond it, {beyond}; for the other decode "
        f"steps below it is off by {min(errors):+.0%} to {max(errors):+.0%}. Measured extend steps, all of "
        f"stock SGLang, took {min(ratios):.0f} to {max(ratios):.0f} times their floor, so for them there is "
        "none. All on one H200, one rank of eight emulated, without collectives:",
    ]


def measured_points(folder: Path) -> list[Measured]:
    """The decode steps of a comparison that measured the emulated rank of 8.

    The cost model takes the mean of the cached tokens as shared and of the rest as private, and as requests
    the mean of those in flight.

    Raises:
        ValueError: it measured something else, or nothing.
    """
    if not (folder / POINTS).is_file():
        raise ValueError(f"{folder} holds no {POINTS}")
    found = []
    for point in current(Store(folder).points()).points:
        if "median_tpot_ms" not in point:
            continue
        if not point["model_note"].startswith("The model is one rank of 8"):
            raise ValueError(f"{folder} holds points of another model than bench_serving.one_rank --of 8")
        served = point["requests"] - point["failed"]
        private = round((point["prompt_tokens"] - point["cached_tokens"]) / served)
        shared = round(point["cached_tokens"] / served)
        sharing = point["index_pages_saved"] > 0
        variant = Variant(point["variant"], tuple(point["environment"].items()), tuple(point["flags"]))
        found.append(
            Measured(
                "stock" if (PLUGINS, "none") in variant.environment else "plugin",
                Step(max(1, round(point["concurrency"])), 1, shared, private, sharing),
                point["median_tpot_ms"] / 1e3,
                f"{point['variant']}, {point['workload']}",
                "mxfp8" if variant.flag("--quantization") == "mxfp8" else "bfloat16",
            )
        )
    if not found:
        raise ValueError(f"{folder} holds no measured points")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench_serving.plan",
        description=__doc__,
        formatter_class=options.LaidOutHelp,
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200", help="kind of GPU")
    parser.add_argument("--weights", choices=("bfloat16", "mxfp8"), default="bfloat16", help="their format")
    parser.add_argument(
        "--kv-cache", choices=("bfloat16", "fp8_e4m3"), default="bfloat16", help="keys' and values' format"
    )
    for name, default, what in (
        ("--gpus", 8, "tensor and expert parallel size"),
        ("--prefix", 60_000, "shared tokens"),
        ("--private", 1_000, "private tokens per session"),
        ("--new", 512, "new tokens of an extend step, per request"),
    ):
        parser.add_argument(name, type=options.count, default=default, metavar="N", help=what)
    parser.add_argument(
        "--concurrency",
        type=options.numbers,
        default="1,8,16,32,64",
        metavar="N[,N]",
        help="requests of a step",
    )
    parser.add_argument(
        "--static-fraction",
        type=options.above_zero,
        default=0.8,
        metavar="PART",
        help="of memory, for weights and cache",
    )
    parser.add_argument(
        "--model-path",
        type=Path,
        metavar="FOLDER",
        help="with a config.json; default: the released model",
    )
    parser.add_argument(
        "--check", type=Path, metavar="FOLDER", help="also against the points of a comparison"
    )
    chosen = parser.parse_args(arguments)
    if chosen.static_fraction > 1:
        parser.error("--static-fraction is a part of the memory, at most 1")
    parallel = Parallel(tp=chosen.gpus, ep=chosen.gpus)
    try:
        content = config_of(NAMES[0])
        if chosen.model_path is not None:
            content = json.loads((chosen.model_path / "config.json").read_text(encoding="utf-8"))
        config = M3Config.read(content)
        checked = measured_points(chosen.check) if chosen.check else []
    except (ValueError, OSError, ConfigError) as error:
        parser.error(str(error))
    undivided = check_division(config, parallel)
    if undivided:
        parser.error("; ".join(undivided))
    gpu = GPUS[chosen.gpu]
    layout = Layout(
        config,
        parallel,
        weights=chosen.weights,
        kv_element_bytes=ELEMENT_BYTES[chosen.kv_cache],
    )
    session = Step(1, 1, chosen.prefix, chosen.private, sharing=True)
    print(f"# {chosen.gpus} x {gpu.name}, {chosen.weights} weights, {chosen.kv_cache} keys and values\n")
    print(f"Rates: {gpu.bytes_per_second / 1e12:.1f} TB/s, {gpu.flops / 1e12:.0f} TFLOP/s ({gpu.source}).\n")
    print("\n".join(memory_table(layout, gpu, chosen.static_fraction, session, max(chosen.concurrency))))
    print("\n" + "\n".join(step_table(layout, gpu, session, chosen.concurrency, chosen.new)))
    print("\n" + "\n".join(check_text()) + "\n")
    print("\n".join(check_table((*MEASURED, *checked))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
