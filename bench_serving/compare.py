"""Starts variants of a server on this machine and measures the same load on each."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from bench_serving import probe, server
from bench_serving.corpus import Corpus
from bench_serving.measure import Load, measure, warm_prefixes, warm_up
from bench_serving.server import Variant
from bench_serving.store import PointKey, Store, current, key
from bench_serving.workload import Workload


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Attributes:
        variants: at least one.
        workloads: with the concurrencies to measure.
        repeats: measurements of each point on one server, each with private text of its own.
        rounds: how often each variant is started; every other round goes through them backwards, so that a
            drift of the machine meets all alike.
        together: start all variants at once and alternate between them at every point instead. For
            machines that hold them all.
        stop_after_seconds: start no further point after this; what is missing is measured by the next call.
        start_limit_seconds: a server that is not healthy by then broke.
    """

    variants: tuple[Variant, ...]
    workloads: tuple[Workload, ...]
    repeats: int
    rounds: int
    seed: int
    together: bool = False
    stop_after_seconds: float = float("inf")
    start_limit_seconds: float = server.START_LIMIT_SECONDS


@dataclass(frozen=True)
class Result:
    """How a comparison went.

    Attributes:
        missing: points that are not measured, as "variant: workload at concurrency".
        failed: requests that failed in what is measured, by variant.
        broken: why a variant has points missing, by its name: it did not start, or did not serve.
    """

    missing: tuple[str, ...]
    failed: dict[str, int]
    broken: dict[str, str]


def run(comparison: Comparison, corpus: Corpus, store: Store) -> Result:
    """Measure what `store` does not hold yet. A variant that breaks leaves the others to be measured."""
    begin = time.monotonic()
    broken: dict[str, str] = {}
    loads = _loads(comparison, corpus)
    for number in range(comparison.rounds):
        order = comparison.variants[:: 1 if number % 2 == 0 else -1]
        groups = [order] if comparison.together else [(variant,) for variant in order]
        for group in groups:
            missing = {variant: _missing(comparison, loads, variant, number, store) for variant in group}
            if not any(missing.values()):
                continue
            if time.monotonic() - begin > comparison.stop_after_seconds:
                break
            name = ", ".join(variant.name for variant in group)
            try:
                with _started(group, number, store.folder, comparison.start_limit_seconds) as urls:
                    for load in loads:
                        if not _measure_load(comparison, load, urls, missing, number, store, begin):
                            break
            except server.FAILURES as error:
                logs = [_log(store.folder, variant, number) for variant in group]
                broken[name] = server.why(error, *logs)
                print(f"{name} broke: {broken[name]}", flush=True)
    return _result(comparison, loads, store, broken)


def note_work(comparison: Comparison, corpus: Corpus, store: Store, begin: float) -> dict[str, str]:
    """Start measured variants that can say what the work was once more, and note it where it is not known.

    `begin`: of the comparison, on `time.monotonic`'s clock. Returns what broke, and why.
    """
    broken: dict[str, str] = {}
    loads = _loads(comparison, corpus)
    measured = {point["variant"] for point in store.points()}
    for variant in filter(probe.wanted, comparison.variants):
        unknown = [load for load in loads if not store.probed(variant, load.workload)]
        if variant.name not in measured or not unknown:
            continue
        if time.monotonic() - begin > comparison.stop_after_seconds:
            break
        log = store.folder / f"{variant.name}-probe.log"
        try:
            for load, use in probe.probe(variant, unknown, log, comparison.start_limit_seconds):
                store.append_probe(variant, load.workload, use)
        except server.FAILURES as error:
            reason = server.why(error, log)
            broken[f"probe of {variant.name}"] = reason
            print(f"probe of {variant.name} broke: {reason}", flush=True)
    return broken


def _loads(comparison: Comparison, corpus: Corpus) -> list[Load]:
    return [
        Load.of(variation, corpus, comparison.seed)
        for workload in comparison.workloads
        for variation in workload.variations()
    ]


def _result(comparison: Comparison, loads: Sequence[Load], store: Store, broken: dict[str, str]) -> Result:
    names = {variant.name for variant in comparison.variants}
    failed: Counter[str] = Counter()
    answered: set[tuple[Any, ...]] = set()
    for point in current(store.points()).points:
        if point["variant"] in names and point["failed"]:
            failed[point["variant"]] += point["failed"]
            answered.add(tuple(point[name] for name in PointKey.__dataclass_fields__))
    missing: dict[str, None] = {}
    for number in range(comparison.rounds):
        for variant in comparison.variants:
            wanted = _missing(comparison, loads, variant, number, store)
            for point in sorted(wanted, key=lambda point: point.max_concurrency):
                if astuple(point) not in answered:
                    missing[f"{variant.name}: {point.workload} at {point.max_concurrency}"] = None
    return Result(tuple(missing), dict(failed), broken)


def _measure_load(
    comparison: Comparison,
    load: Load,
    urls: dict[Variant, str],
    missing: dict[Variant, set[PointKey]],
    number: int,
    store: Store,
    begin: float,
) -> bool:
    """All points of one load on the servers that are up; False when time ran out."""

    def keys(variant: Variant, concurrency: int) -> list[PointKey]:
        made = [
            key(variant.name, load.workload, concurrency, repeat=repeat, round=number, seed=comparison.seed)
            for repeat in range(comparison.repeats)
        ]
        return [point for point in made if point in missing[variant]]

    wanted = [variant for variant in urls if any(keys(variant, c) for c in load.workload.concurrency)]
    for variant in wanted:
        took = warm_prefixes(urls[variant], load)
        print(f"{variant.name}: prefixes of {load.workload.name} cached in {took:.1f} s", flush=True)
    for concurrency in load.workload.concurrency:
        warmed: set[Variant] = set()
        for repeat in range(comparison.repeats):
            for variant in wanted:
                points = [point for point in keys(variant, concurrency) if point.repeat == repeat]
                if not points:
                    continue
                if time.monotonic() - begin > comparison.stop_after_seconds:
                    return False
                # Later repeats have lengths of their own.
                passes = 1 if variant in warmed else None
                seconds = warm_up(urls[variant], load, concurrency, repeat=repeat, passes=passes)
                shown = ", ".join(f"{value:.2f}" for value in seconds)
                print(f"{variant.name}: warm-up at {concurrency}: {shown} s", flush=True)
                warmed.add(variant)
                title = f"{variant.name} {load.workload.name} at {concurrency}"
                record, driven = measure(urls[variant], load, concurrency, repeat=repeat, title=title)
                record |= server.capacity(urls[variant])
                record["place"] = comparison.variants.index(variant)
                store.append(points[0], variant, record, driven.exchanges)
                print(line(title, record), flush=True)
    return True


def _missing(
    comparison: Comparison, loads: Sequence[Load], variant: Variant, number: int, store: Store
) -> set[PointKey]:
    wanted = {
        key(variant.name, load.workload, concurrency, repeat=repeat, round=number, seed=comparison.seed)
        for load in loads
        for concurrency in load.workload.concurrency
        for repeat in range(comparison.repeats)
    }
    return wanted - store.measured(variant)


@contextlib.contextmanager
def _started(
    variants: Sequence[Variant], number: int, folder: Path, start_limit: float
) -> Iterator[dict[Variant, str]]:
    """Servers of one round; each round has logs of its own."""
    with contextlib.ExitStack() as stack:
        yield {
            variant: stack.enter_context(server.started(variant, _log(folder, variant, number), start_limit))
            for variant in variants
        }


def _log(folder: Path, variant: Variant, number: int) -> Path:
    return folder / f"{variant.name}{f'-round-{number + 1}' if number else ''}.log"


def line(title: str, record: dict[str, Any]) -> str:
    """A measured point for the terminal."""
    if "median_ttft_ms" not in record:
        return f"{title}: all {record['requests']} requests failed: {record['errors']}"
    failed = f", {record['failed']} FAILED" if record["failed"] else ""
    return (
        f"{title}: {record['output_throughput']:.1f} tokens/s, "
        f"first token {record['median_ttft_ms']:.1f} ms, per token {record['median_tpot_ms']:.2f} ms, "
        f"cached {record['cached_share']:.0%}{failed}"
    )
