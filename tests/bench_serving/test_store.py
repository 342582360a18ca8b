"""A comparison is resumed with what is still true, and with nothing else."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench_serving import store as module
from bench_serving import workload
from bench_serving.server import Variant, parse_variant
from bench_serving.store import POINTS, Current, Store, current, key, outputs_of
from tests.bench_serving.points import NOW, output, point

LOAD = workload.load("agentic-60k")
VARIANT = Variant("ours", (("A", "1"),), ("--model-path", "m"))
POINT = key("ours", LOAD, 8, repeat=0, round=0, seed=0)


def measured(tmp_path: Path, **changed: object) -> Store:
    held = Store(tmp_path)
    held.append(POINT, VARIANT, {"failed": 0}, [])
    line = json.loads((tmp_path / POINTS).read_text()) | changed
    (tmp_path / POINTS).write_text(json.dumps(line) + "\n")
    return held


def test_a_fresh_point_is_not_measured_again(tmp_path: Path) -> None:
    assert measured(tmp_path).measured(VARIANT) == {POINT}


STALE = {
    "old": {"time": time.time() - 3700},
    "failed requests": {"failed": 1},
    "another machine": {"machine": "elsewhere"},
    "other code": {"code": "00000000"},
    "other flags": {"flags": ["--model-path", "n"]},
    "another environment": {"environment": {}},
    "another variant": {"variant": "theirs"},
}


@pytest.mark.parametrize("changed", STALE.values(), ids=STALE)
def test_a_point_that_may_have_changed_is_measured_again(changed: dict, tmp_path: Path) -> None:
    assert measured(tmp_path, **changed).measured(VARIANT) == set()


def test_a_note_of_the_model_folder_goes_into_every_point(tmp_path: Path) -> None:
    (tmp_path / module.NOTE).write_text("half a model\n")
    variant = Variant("ours", (), ("--model-path", str(tmp_path)))
    assert module.model_note(variant) == "half a model"
    assert module.model_note(VARIANT) == ""


def test_a_variant_is_read_from_its_name_environment_and_flags() -> None:
    common = ("--model-path", "m", "--dtype", "bfloat16")
    variant = parse_variant("quick SGLANG_PLUGINS=none A='b c' --dtype float32", common)
    assert variant.name == "quick"
    assert variant.environment == (("SGLANG_PLUGINS", "none"), ("A", "b c"))
    assert variant.flags == (*common, "--dtype", "float32")
    assert variant.flag("--dtype") == "float32" and variant.flag("--port") == ""
    # A feature switched off leaves the weights alone; another quantisation does not.
    assert parse_variant("a --disable-radix-cache", common).weights == parse_variant("b X=1", common).weights
    assert parse_variant("a --quantization=mxfp8", common).weights != parse_variant("b", common).weights


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "points.jsonl").write_text('{"a": 1}\nmerge conflict\n')
    with pytest.raises(ValueError, match=r"points\.jsonl, line 2, is no JSON"):
        Store(tmp_path).points()


@pytest.mark.parametrize("text", ["", "--flag", "A=1", "name word"])
def test_a_variant_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="variant"):
        parse_variant(text, ())


@pytest.mark.parametrize(
    ("older", "reason"),
    [
        (point(flags=["--model-path", "n"]), "of ours with other flags or environment variables"),
        (point(environment={"A": "1"}), "of ours with other flags or environment variables"),
        (point(code="00000000"), "of another code: 00000000"),
        (point("stock", machine="elsewhere"), "of another machine: elsewhere"),
        (point("stock", time=NOW - 3700), "older by 60 minutes than those that follow"),
    ],
    ids=["flags", "environment", "code", "machine", "old"],
)
def test_what_may_not_stand_beside_the_newest_point_is_left_out(older: dict, reason: str) -> None:
    older = {"max_concurrency": 16, **older}
    newest = point(time=NOW)
    found = current([{**older, "time": min(older["time"], NOW - 1)}, newest])
    assert found.points == [newest]
    assert found.left_out == {reason: 1}


def test_a_comparison_that_takes_hours_stays_together() -> None:
    points = [point(time=NOW - 3000 * step, max_concurrency=step) for step in (4, 3, 2, 1)]
    assert current(points) == Current(points, {})


def test_a_point_measured_again_counts_once_in_its_place() -> None:
    first, again, other = point(median_ttft_ms=1000.0), point(median_ttft_ms=40.0), point("stock")
    assert current([first, other, {**again, "time": first["time"]}]).points == [
        {**again, "time": first["time"]},
        other,
    ]


def test_outputs_are_those_of_the_points() -> None:
    now, before = point(time=NOW), point(time=NOW - 10)
    ids = [output("ours", {"0.0.0": [number]}, time=at) for number, at in ((1, NOW - 10), (2, NOW))]
    assert outputs_of([now], ids) == ids[1:]
    assert outputs_of([before], ids) == ids[:1]
    assert outputs_of([point("stock", time=NOW)], ids) == []
