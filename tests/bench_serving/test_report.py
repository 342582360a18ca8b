"""The report and the plots show what was measured, failures included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_serving import plots, report
from bench_serving.store import OUTPUTS, POINTS, Store
from tests.bench_serving.points import failed, output, point


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
        "| stock | ours | 1 | 1 | 0 |",
    ):
        assert shown in text, text
    header, *rows = [line for line in text.splitlines() if line.startswith(("| at once", "| 8 |"))]
    assert {line.count("|") for line in rows} == {header.count("|")}


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
