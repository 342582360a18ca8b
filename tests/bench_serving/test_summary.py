"""Medians, spreads, ratios and differences are what they are called."""

from __future__ import annotations

import pytest

from bench_serving.summary import Value, differences, ratio, rows
from tests.bench_serving.points import failed, output, point


def test_repeats_and_rounds_become_a_median_and_a_spread() -> None:
    table = rows(
        [
            point(output_throughput=value, repeat=repeat, round=number)
            for (repeat, number), value in {(0, 0): 90.0, (1, 0): 100.0, (0, 1): 120.0}.items()
        ]
    )
    (row,) = table
    assert row.values["output_throughput"] == Value(100.0, 0.3)
    assert row.requests == 96 and row.pages_saved_share == 0.75


def test_a_single_measurement_has_no_spread() -> None:
    assert rows([point()])[0].values["median_ttft_ms"] == Value(50.0, None)


def test_a_point_measured_again_counts_once() -> None:
    (row,) = rows([point(median_ttft_ms=1000.0), point(median_ttft_ms=40.0)])
    assert row.values["median_ttft_ms"] == Value(40.0, None) and row.requests == 32


def test_failed_requests_are_counted_and_in_no_median() -> None:
    (row,) = rows([point(), failed("ours", repeat=1)])
    assert (row.requests, row.failed) == (64, 32)
    assert row.values["median_tpot_ms"] == Value(10.0, None)
    (row,) = rows([failed("ours")])
    assert row.values == {} and row.failed == 32


def test_different_loads_and_variants_are_different_rows() -> None:
    points = [
        point(),
        point("stock"),
        point(max_concurrency=16),
        point(prefix_tokens=1000),
        point(digest="b"),
    ]
    assert len(rows(points)) == 5


@pytest.mark.parametrize(
    ("measure", "more_is_better", "wanted"),
    [("output_throughput", True, 2.0), ("median_ttft_ms", False, 4.0)],
)
def test_a_ratio_above_one_is_better(measure: str, more_is_better: bool, wanted: float) -> None:
    base, ours = rows([point("stock"), point("ours", output_throughput=200.0, median_ttft_ms=12.5)])
    assert ratio(ours, base, measure, more_is_better=more_is_better) == wanted


def test_a_ratio_needs_both_sides() -> None:
    base, ours = rows([failed("stock"), point("ours")])
    assert ratio(ours, base, "output_throughput", more_is_better=True) is None


IDS = {"0.0.0": [1, 2, 3], "1.0.0": [4, 5, 6]}


def test_outputs_are_compared_between_equal_weights() -> None:
    points = [point("stock"), point("ours")]
    outputs = [output("stock", IDS), output("ours", IDS | {"1.0.0": [4, 5, 7]})]
    (found,) = differences(points, outputs)
    assert (found.left, found.right) == ("stock", "ours")
    assert (found.compared, found.different, found.first_token) == (2, 1, 2)


def test_other_weights_other_repeats_and_missing_requests_are_not_compared() -> None:
    outputs = [output("stock", IDS), output("ours", IDS)]
    assert differences([point("stock"), point("ours", weights=["--quantization=mxfp8"])], outputs) == []
    other = [output("stock", IDS), output("ours", {"2.0.0": [1]}), output("ours", {"0.0.0": [9]}, repeat=1)]
    (found,) = differences([point("stock"), point("ours")], other)
    assert (found.compared, found.different, found.first_token) == (0, 0, None)


def test_a_variant_is_compared_with_itself_in_another_round() -> None:
    outputs = [output("ours", IDS), output("ours", IDS | {"0.0.0": [9, 2, 3]}, round=1)]
    (found,) = differences([point("ours")], outputs)
    assert (found.left, found.right) == ("ours", "ours, another round")
    assert (found.compared, found.different, found.first_token) == (2, 1, 0)
