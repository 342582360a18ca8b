"""The knee is the highest concurrency that meets the target, found in few measurements."""

from __future__ import annotations

import math

import pytest

from bench_serving.knee import Target, probes


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100])
def test_bisection_finds_every_knee(most: int) -> None:
    for knee in range(most + 3):
        tried = list(probes(lambda concurrency, knee=knee: concurrency <= knee, most))
        met = [concurrency for concurrency, fits in tried if fits]
        assert max(met, default=0) == min(knee, most), (knee, tried)
        concurrencies = [concurrency for concurrency, _ in tried]
        assert len(set(concurrencies)) == len(concurrencies), tried
        assert max(concurrencies) <= most, tried
        assert len(concurrencies) <= 2 * math.log2(most) + 2, tried


RECORD = {
    "failed": 0,
    "median_tpot_ms": 20.0,
    "p95_tpot_ms": 21.0,
    "median_ttft_ms": 1000.0,
    "p95_ttft_ms": 1001.0,
}


@pytest.mark.parametrize(
    ("target", "changed", "met"),
    [
        (Target(50, 1), {}, True),
        (Target(50.1, 1), {}, False),
        (Target(50, 0.99), {}, False),
        (Target(50, 1, "p95"), {}, False),
        (Target(47, 1.1, "p95"), {}, True),
        (Target(1, 100), {"failed": 1}, False),
    ],
)
def test_a_target_is_met_by_both_times_and_no_failure(target: Target, changed: dict, met: bool) -> None:
    assert target.met(RECORD | changed) is met
