"""A profile reports what it has, and for what it lacks it says what is missing."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench_serving import measure, profile, server
from bench_serving.__main__ import main
from bench_serving.breakdown import StepTime, TraceError
from bench_serving.profile import wanted_steps
from bench_serving.server import Variant
from tests.bench_serving.fake_server import FakeServer
from tests.bench_serving.test_breakdown import decode_step, extend_step

REQUESTS = 8


def traces(folder: Path) -> Iterator[tuple[str, list[dict]]]:
    """Names and events of an extend's and a decode's trace, as SGLang names the files."""
    yield "1-TP-0", [event for place in range(3) for event in extend_step(3000 * place, 20 * place)]
    yield "2-TP-0", [event for place in range(5) for event in decode_step(1000 * place, 20 * place)]


class Profiled(FakeServer):
    """A fake server that writes a trace when its profile is stopped, unless `answer` says otherwise."""

    def __init__(self, written: Iterator[tuple[str, list[dict]]], refuse: str = "") -> None:
        super().__init__()
        self.written, self.refuse, self.folder = written, refuse, Path()

    def post(self, url: str, path: str, body: dict) -> None:
        if path == self.refuse:
            raise RuntimeError(f"the server answered {path} with HTTP 400: profiling is in progress")
        if path == "/start_profile":
            self.folder = Path(body["output_dir"])
        elif (trace := next(self.written, None)) is not None:
            name, events = trace
            text = json.dumps({"traceEvents": events}).encode()
            (self.folder / f"{name}.trace.json.gz").write_bytes(gzip.compress(text))


@pytest.fixture
def profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Profiled]], tuple[int, dict, str]]:
    """Profiles fakes in servers' place; returns the exit status, `breakdown.json` and the report."""
    monkeypatch.setattr(measure, "WARM_PASSES", 1)
    monkeypatch.setattr(profile, "TRACE_LIMIT_SECONDS", 0.3)
    monkeypatch.setattr(profile, "_complete", lambda path: True)

    def run(fakes: dict[str, Profiled]) -> tuple[int, dict, str]:
        @contextlib.contextmanager
        def started(variant: Variant, log: Path, start_limit: float) -> Iterator[str]:
            with fakes[variant.name] as fake:
                monkeypatch.setattr(profile, "_post", fake.post)
                yield fake.url

        monkeypatch.setattr(server, "started", started)
        variants = [word for name in fakes for word in ("--variant", name)]
        sizes = ["--prefix-tokens", "128", "--new-tokens", "9", "--steps", "3", "--prompts", "random"]
        command = ["profile", *variants, *sizes, "--vocab", "500", "--concurrency", str(REQUESTS)]
        status = main([*command, "--out", str(tmp_path), "--", "--model-path", "m"])
        found = json.loads((tmp_path / "breakdown.json").read_text())
        return status, found, (tmp_path / "README.md").read_text()

    return run


def test_both_stages_of_every_variant_are_in_the_table_and_the_plot(profiled, tmp_path: Path) -> None:
    status, found, text = profiled({name: Profiled(traces(tmp_path)) for name in ("stock", "ours")})
    assert status == 0, text
    assert found["ours"].keys() == {"EXTEND", "DECODE"}
    assert found["ours"]["EXTEND"]["microseconds"] == 605 and found["ours"]["EXTEND"]["steps"] == 3
    assert found["ours"]["EXTEND"]["parts"]["launch gaps"] == pytest.approx(385)
    # Two of the five decode steps are left out: the batch fills up in them.
    assert found["ours"]["DECODE"]["microseconds"] == 75 and found["ours"]["DECODE"]["steps"] == 3
    for shown in (
        "## extend step, 512 new tokens",
        "| ms | stock | ours |",
        "| attention | 0.01 | 0.01 |",
        "| host | 1.00 | 1.00 |",
        "| launches | 4 | 4 |",
        "| launch-bound share | 64% | 64% |",
        "## decode step, 8 requests",
        "| between steps | 0.93 | 0.93 |",
        "![parts of a step by variant](step-parts.png)",
    ):
        assert shown in text, text
    assert (tmp_path / "step-parts.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_profiled_leaves_the_rest_and_says_why(
    profiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (extend, _) = traces(tmp_path)
    no_kernels = [event for event in decode_step(0, 1) if event["cat"] != "kernel"]
    status, found, text = profiled(
        {
            "stock": Profiled(traces(tmp_path)),
            "blind": Profiled(iter([extend, ("2-TP-0", no_kernels)])),
            "silent": Profiled(iter([])),
            "busy": Profiled(traces(tmp_path), refuse="/start_profile"),
        }
    )
    assert status == 1
    assert {name: list(stages) for name, stages in found.items()} == {
        "stock": ["EXTEND", "DECODE"], "blind": ["EXTEND"],
    }  # fmt: skip
    errors = capsys.readouterr().err
    for shown in (
        "blind: decode step: the trace holds 2 CUDA calls and not one kernel",
        "silent: extend step: the server wrote no *.trace.json.gz into",
        "busy: extend step: the server answered /start_profile with HTTP 400: profiling is in progress",
    ):
        assert f"**Not profiled**: {shown}" in text, text
        assert f"not profiled: {shown}" in errors, errors
    assert "| ms | stock | blind |" in text and "| ms | stock |\n" in text


def step(stage: str, requests: int, tokens: int = 0) -> StepTime:
    return StepTime(stage, requests, tokens, 1.0, {}, {}, 0.0, 1.0, 1)


def test_a_trace_without_the_wanted_step_says_which_it_holds() -> None:
    taken = [step("EXTEND", 1, 5), step("DECODE", 8), step("DECODE", 7), step("DECODE", 8)]
    with pytest.raises(TraceError, match=r"no step of 8 requests after 2 to settle.*'DECODE', 7, 0"):
        wanted_steps(taken, "DECODE", 8, 512)
    with pytest.raises(TraceError, match=r"no step of 1 requests and 512 new tokens.*'EXTEND', 1, 5"):
        wanted_steps(taken, "EXTEND", 1, 512)
    assert wanted_steps([*taken, step("DECODE", 8)], "DECODE", 8, 512) == [step("DECODE", 8)]
