"""The report and the plots show what was measured, failures included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_serving import plots, report
from bench_serving.store import OUTPUTS, POINTS, Store
from tests.bench_serving.points import NOW, failed, output, point


def store(folder: Path, points: list[dict], outputs: list[dict] | None = None) -> Store:
    for name, lines in ((POINTS, points), (OUTPUTS, outputs or [])):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Store(folder)


def test_the_report_has_ratios_context_and_failures(tmp_path: Path) -> None:
    points = [
        point("stock", environment={"SGLANG_PLUGINS": "none"}, index_pages_scored=0, index_pages_saved=0),
        point("ours", output_throughput=160.0, median_ttft_ms=25.0, failed=3, errors={"HTTP 500": 3}),
        failed("broken"),
    ]
    held = store(tmp_path, points, [output("stock", {"a": [1]}), output("ours", {"a": [2]})])
    text = report.write(held, title="A title", command="the command", plots=["latency.png"]).read_text()
    for shown in (
        "# A title",
        "`the command`",
        "a machine",
        "SGLANG_PLUGINS=none --model-path m",
        "![latency](latency.png)",
        "| 8 | stock | 32 (0) | 100.0 |  |",
        "| 8 | ours | 32 (**3**) | 160.0 | 1.60x | 25.0 | 2.00x | 10.00 | 1.00x | 9.0 / 12.0 / 20.0 "
        "| 95% | 90% | 75% |",
        "| 8 | broken | 32 (**32**) | every request failed |",
        "- ours, agentic-60k at 8: 3 x `HTTP 500`",
        "| ours | 1.00 | 2.00 | 4,096 | 1.00x | 0.75 | 2.0 |",
        "at most 0.6% of a core while it measured: 15 us of CPU per streamed token, or 2,500 us per request",
        "| stock | ours | 1 | 1 | 0 |",
    ):
        assert shown in text, text
    header, *rows = [line for line in text.splitlines() if line.startswith(("| at once", "| 8 |"))]
    assert {line.count("|") for line in rows} == {header.count("|")}


def test_the_notes_of_a_folder_stand_before_everything_measured(tmp_path: Path) -> None:
    held = store(tmp_path, [point("stock")])
    assert "missed" not in report.write(held, title="x", command="").read_text()
    (tmp_path / report.NOTES).write_text("The goal was missed.\n")
    text = report.write(held, title="x", command="").read_text()
    assert text.startswith("# x\n\nThe goal was missed.\n\n- Machine: "), text


def test_points_that_may_not_stand_side_by_side_are_counted_and_not_shown(tmp_path: Path) -> None:
    older = point("ours", time=NOW - 60, code="0ld", median_ttft_ms=77.7, max_concurrency=16)
    held = store(tmp_path, [older, point("stock"), point("ours")])
    text = report.write(held, title="x", command="").read_text()
    assert "- Not shown: 1 points of this folder, of another code: 0ld." in text, text
    assert "77.7" not in text and "| 16 |" not in text, text


def test_a_ratio_is_never_against_another_variant_than_the_first(tmp_path: Path) -> None:
    # The first variant has no point at 16, and was measured last at 8.
    points = [
        point("ours", place=1, max_concurrency=16),
        point("more", place=2, max_concurrency=16),
        point("ours", place=1, median_ttft_ms=25.0),
        point("stock", place=0),
    ]
    text = report.write(store(tmp_path, points), title="x", command="").read_text()
    assert "Ratios are against **stock**" in text, text
    rows = [line.split("|")[1:8] for line in text.splitlines() if line.startswith(("| 8 |", "| 16 |"))]
    assert [tuple(row[place].strip() for place in (0, 1, 2, 6)) for row in rows] == [
        ("8", "stock", "32 (0)", ""),
        ("8", "ours", "32 (0)", "2.00x"),
        ("8", "more", "not measured", ""),
        ("16", "stock", "not measured", ""),
        ("16", "ours", "32 (0)", ""),
        ("16", "more", "32 (0)", ""),
    ]


def test_variants_that_are_not_compared_say_why(tmp_path: Path) -> None:
    points = [point("stock"), point("ours", flags=["--model-path", "n"])]
    held = store(tmp_path, points, [output("stock", {"a": [1]}), output("ours", {"a": [2]})])
    text = report.write(held, title="x", command="").read_text()
    assert "- stock and ours are not compared, other weights: --model-path=m / --model-path=n." in text, text


def test_a_report_of_nothing_says_to_measure(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="measure first"):
        report.write(Store(tmp_path), title="x", command="")


SWEEPS = {
    plots.LATENCY: [point(variant, max_concurrency=c) for variant in ("a", "b") for c in (1, 8)],
    plots.FIRST_TOKEN: [point(prefix_tokens=tokens, digest=str(tokens)) for tokens in (1000, 2000)],
    plots.SHARING: [point(shared_share=share, overlap=share, digest=str(share)) for share in (0.0, 0.5)],
}


@pytest.mark.parametrize(("name", "points"), SWEEPS.items(), ids=SWEEPS)
def test_a_sweep_draws_its_plot_and_no_other(name: str, points: list[dict], tmp_path: Path) -> None:
    assert plots.write(store(tmp_path, points)) == [name]
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_points_without_a_sweep_or_an_answer_draw_nothing(tmp_path: Path) -> None:
    assert plots.write(store(tmp_path, [point(), failed("ours", max_concurrency=2)])) == []
