"""The operator bench says what it cannot run and why, and times only what it was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench_serving import operators
from bench_serving.operators import Case, Timing


def test_without_an_sm90_gpu_every_family_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "target", lambda: "cpu")
    assert operators.main(["--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["family"] for row in rows] == list(operators.FAMILIES)
    assert all(
        row["note"].startswith("skipped: needs an sm90 GPU") and row["ours_us"] is None for row in rows
    )
    assert capsys.readouterr().out.count("skipped:") == len(operators.FAMILIES)


def test_a_family_that_is_not_there_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "target", lambda: "sm90")
    monkeypatch.setitem(operators.FAMILIES, "later", lambda: iter(()))
    (row,) = operators.run(["later"], "")
    assert "operators_later.py is not in this checkout" in row.note


def test_only_the_cases_that_were_asked_for_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(name: str) -> Case:
        def time() -> Timing:
            assert "decode" in name, "timed although not asked for"
            return Timing("f", name, 10.0, 25.0, 4.0)

        return Case(name, time)

    monkeypatch.setattr(operators, "unavailable", lambda family: None)
    monkeypatch.setitem(operators.FAMILIES, "f", lambda: map(case, ("decode, 1", "extend", "decode, 8")))
    rows = list(operators.run(["f"], "decode"))
    assert [row.case for row in rows] == ["decode, 1", "decode, 8"]
    assert rows[0].line() == "| f | decode, 1 | 25.0 | 10.0 | 2.50x | 4.0 | 40% |  |"


def test_a_case_that_does_not_compile_is_a_row_with_the_reason_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def case(name: str) -> Case:
        def compile_kernels() -> None:
            if name == "broken":
                raise RuntimeError("out of registers")

        def time() -> Timing:
            return Timing("f", name, 10.0, 25.0, 4.0)

        return Case(name, time, (compile_kernels,))

    monkeypatch.setattr(operators, "unavailable", lambda family: None)
    monkeypatch.setitem(operators.FAMILIES, "f", lambda: map(case, ("decode", "broken", "extend")))
    left_out = operators.compile_ahead(["f"], "", processes=2, seconds=30)
    assert left_out == {"broken": "RuntimeError: out of registers"}
    rows = {row.case: row for row in operators.run(["f"], "", left_out)}
    assert rows["broken"].note == "skipped: RuntimeError: out of registers"
    assert rows["broken"].ours_us is None
    assert [rows[name].ours_us for name in ("decode", "extend")] == [10.0, 10.0]


def test_a_job_that_two_cases_need_runs_once_and_its_failure_is_told_for_both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_kernels() -> None:
        with (tmp_path / "runs").open("a") as file:
            file.write("x")
        raise ValueError("too wide")

    def time() -> Timing:
        raise AssertionError("timed")

    cases = [Case(name, time, (compile_kernels,)) for name in ("decode, 1", "decode, 8", "extend")]
    monkeypatch.setitem(operators.FAMILIES, "f", lambda: iter(cases))
    left_out = operators.compile_ahead(["f"], "decode", processes=2, seconds=30)
    assert left_out == dict.fromkeys(("decode, 1", "decode, 8"), "ValueError: too wide")
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize("family", sorted(operators.FAMILIES))
def test_every_case_of_a_family_compiles_its_kernels_ahead(family: str) -> None:
    without = [case.name for case in operators.FAMILIES[family]() if not case.compile]
    assert without == []


@pytest.mark.parametrize("family", sorted(operators.FAMILIES))
def test_a_family_lists_its_cases_without_a_gpu(family: str) -> None:
    names = [case.name for case in operators.FAMILIES[family]()]
    assert len(set(names)) == len(names) > 10
    assert any(name.startswith("decode") for name in names)
    assert any(name.startswith("extend") for name in names)


def test_listing_the_cases_leaves_the_gpu_to_the_processes_that_compile() -> None:
    code = (
        "import sys, torch\n"
        "from bench_serving.operators import FAMILIES\n"
        "assert all(list(family()) for family in FAMILIES.values())\n"
        "print('sglang' in sys.modules, torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"], "importing SGLang asks the GPU what it is"


def test_families_that_need_sglangs_groups_of_ranks_make_them_once_in_a_process() -> None:
    from bench_serving import operators_mxfp8, operators_mxfp8_compile

    assert operators_mxfp8.prepare_sglang.cache_info().maxsize is None
    assert operators_mxfp8_compile.prepare_sglang is operators_mxfp8.prepare_sglang
