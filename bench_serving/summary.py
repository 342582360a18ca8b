"""Medians, spreads, ratios and output differences of measured points."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_serving.server import Variant

LOAD = ("workload", "digest", "prefix_tokens", "shared_share", "max_concurrency")
MEASURES = (
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "p50_itl_ms",
    "p95_itl_ms",
    "p99_itl_ms",
    "cached_share",
    "overlap",
    "peak_memory_bytes",
    "client_core_share",
    "client_cpu_us_per_request",
    "client_cpu_us_per_event",
)


@dataclass(frozen=True)
class Value:
    """A measure over the repeats and rounds of a load.

    Attributes:
        median: of all of them.
        spread: (largest - smallest) / median; None for a single measurement.
    """

    median: float
    spread: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Value:
        median = statistics.median(values)
        spread = (max(values) - min(values)) / median if len(values) > 1 and median else None
        return cls(median, spread)


@dataclass(frozen=True)
class Row:
    """One variant at one load.

    Attributes:
        load: values of `LOAD`, by name.
        values: measures by name, those that all its points have; none if every request failed.
        requests, failed: over all repeats and rounds.
        pages_saved_share: index pages saved / (scored + saved); None where nothing was counted.
    """

    variant: str
    load: Mapping[str, Any]
    values: Mapping[str, Value]
    requests: int
    failed: int
    pages_saved_share: float | None
    measurements: int


def in_order(points: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points by their variant's place in the command that measured them, else as they are."""
    return sorted(points, key=lambda point: point.get("place", 0))


def base_variant(points: Iterable[dict[str, Any]]) -> str:
    """The variant that ratios refer to: the command's first. Raises IndexError for no points."""
    return in_order(points)[0]["variant"]


def rows(points: Iterable[dict[str, Any]]) -> list[Row]:
    """One row per load and variant of points that may stand side by side (`store.current`).

    In the order of measuring, and at equal loads in that of the command's variants.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for point in in_order(points):
        groups.setdefault((point["variant"], *(point[name] for name in LOAD)), []).append(point)
    made = []
    for (variant, *load), group in groups.items():
        served = [point for point in group if "median_ttft_ms" in point]
        known = [name for name in MEASURES if served and all(point.get(name) is not None for point in served)]
        values = {name: Value.of([point[name] for point in served]) for name in known}
        scored = sum(point["index_pages_scored"] for point in group)
        saved = sum(point["index_pages_saved"] for point in group)
        made.append(
            Row(
                variant,
                dict(zip(LOAD, load)),
                values,
                sum(point["requests"] for point in group),
                sum(point["failed"] for point in group),
                saved / (scored + saved) if scored else None,
                len(group),
            )
        )
    return made


def ratio(row: Row, base: Row, measure: str, *, more_is_better: bool) -> float | None:
    """How many times better `row` is than `base`; None where either has no value."""
    if measure not in row.values or measure not in base.values:
        return None
    ours, theirs = row.values[measure].median, base.values[measure].median
    if not ours or not theirs:
        return None
    return ours / theirs if more_is_better else theirs / ours


@dataclass(frozen=True)
class Difference:
    """Greedy outputs of two runs of the same requests.

    Attributes:
        compared: requests that both answered.
        different: those whose tokens differ.
        first_token: median index of the first differing token; None if none differs.
    """

    left: str
    right: str
    compared: int
    different: int
    first_token: float | None


@dataclass(frozen=True)
class NotCompared:
    """Two variants whose outputs say nothing about each other, and why."""

    left: str
    right: str
    reason: str


def differences(
    points: list[dict[str, Any]], outputs: list[dict[str, Any]]
) -> tuple[list[Difference], list[NotCompared]]:
    """Differences between variants with the same weights, and of each variant from itself in another round.

    A variant's difference from itself is the noise to read the others against: matrix products choose their
    kernels by the shape of the batch, so scheduling alone can turn a token. `outputs` are those of `points`.
    """
    weights = {
        point["variant"]: Variant(
            point["variant"], tuple(point["environment"].items()), tuple(point["flags"])
        ).weights
        for point in points
    }
    by_run: dict[str, dict[tuple[Any, ...], Mapping[str, list[int]]]] = {}
    for output in outputs:
        load = tuple(output[name] for name in (*LOAD, "repeat", "seed"))
        by_run.setdefault(output["variant"], {})[(*load, output["round"])] = output["ids"]
    found, apart = [], []
    for variant, runs in by_run.items():
        pairs = [
            (runs[left], runs[right])
            for left, right in itertools.combinations(runs, 2)
            if left[:-1] == right[:-1]
        ]
        if pairs:
            found.append(_difference(variant, f"{variant}, another round", pairs))
    for left, right in itertools.combinations(by_run, 2):
        if weights[left] != weights[right]:
            apart.append(NotCompared(left, right, _other_weights(weights[left], weights[right])))
            continue
        pairs = [(ids, by_run[right][load]) for load, ids in by_run[left].items() if load in by_run[right]]
        found.append(_difference(left, right, pairs))
    return found, apart


def _other_weights(left: Sequence[str], right: Sequence[str]) -> str:
    ours, theirs = (
        ", ".join(sorted(set(one) - set(other))) or "not given"
        for one, other in ((left, right), (right, left))
    )
    return f"other weights: {ours} / {theirs}"


def _difference(
    left: str, right: str, pairs: Iterable[tuple[Mapping[str, list[int]], Mapping[str, list[int]]]]
) -> Difference:
    compared, firsts = 0, []
    for ours, theirs in pairs:
        for request in ours.keys() & theirs.keys():
            compared += 1
            if ours[request] != theirs[request]:
                same = itertools.takewhile(
                    lambda pair: pair[0] == pair[1], zip(ours[request], theirs[request])
                )
                firsts.append(len(list(same)))
    return Difference(left, right, compared, len(firsts), statistics.median(firsts) if firsts else None)
