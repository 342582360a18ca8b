"""Medians, spreads, ratios and differences are what they are called."""

from __future__ import annotations

import pytest

from bench_serving.summary import Value, base_variant, differences, ratio, rows
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
    points = [point("stock", environment={"SGLANG_PLUGINS": "none"}), point("ours")]
    outputs = [output("stock", IDS), output("ours", IDS | {"1.0.0": [4, 5, 7]})]
    (found,), apart = differences(points, outputs)
    assert apart == []
    assert (found.left, found.right) == ("stock", "ours")
    assert (found.compared, found.different, found.first_token) == (2, 1, 2)


def test_other_weights_other_repeats_and_missing_requests_are_not_compared() -> None:
    outputs = [output("stock", IDS), output("ours", IDS)]
    quantised = point("ours", flags=["--model-path", "m", "--quantization", "mxfp8"])
    found, (apart,) = differences([point("stock"), quantised], outputs)
    assert found == []
    assert apart.reason == "other weights: not given / --quantization=mxfp8"
    other = [output("stock", IDS), output("ours", {"2.0.0": [1]}), output("ours", {"0.0.0": [9]}, repeat=1)]
    (found,), _ = differences([point("stock"), point("ours")], other)
    assert (found.compared, found.different, found.first_token) == (0, 0, None)


def test_a_variant_is_compared_with_itself_in_another_round() -> None:
    outputs = [output("ours", IDS), output("ours", IDS | {"0.0.0": [9, 2, 3]}, round=1)]
    (found,), _ = differences([point("ours")], outputs)
    assert (found.left, found.right) == ("ours", "ours, another round")
    assert (found.compared, found.different, found.first_token) == (2, 1, 0)


def test_dummy_weights_of_another_loader_are_other_weights() -> None:
    dummy = ["--model-path", "m", "--load-format", "dummy"]
    points = [
        point("stock", flags=dummy, environment={"SGLANG_PLUGINS": "none"}),
        point("ours", flags=dummy),
        point("uncached", flags=[*dummy, "--disable-radix-cache"]),
        point("halved", flags=[*dummy, "--tp-size", "2"]),
    ]
    outputs = [output(each["variant"], IDS) for each in points]
    found, apart = differences(points, outputs)
    assert [(one.left, one.right) for one in found] == [("ours", "uncached")]
    reasons = {(one.left, one.right): one.reason for one in apart}
    assert reasons["stock", "ours"] == (
        "other weights: dummy weights with SGLANG_PLUGINS=none / dummy weights with SGLANG_PLUGINS="
    )
    assert reasons["ours", "halved"] == "other weights: not given / --tp-size=2"


def test_what_not_all_points_know_is_no_measure() -> None:
    (row,) = rows([point(), point(repeat=1, peak_memory_bytes=None)])
    assert "peak_memory_bytes" not in row.values and row.values["median_ttft_ms"] == Value(50.0, 0.0)


def test_ratios_refer_to_the_command_s_first_variant_whatever_was_measured_first() -> None:
    points = [point("ours", place=1), point("stock", place=0)]
    assert base_variant(points) == "stock"
    assert [row.variant for row in rows(points)] == ["stock", "ours"]
