"""A profile reports what it has, and for what it lacks it says what is missing."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_serving import measure, profile, server
from bench_serving.__main__ import main
from bench_serving.breakdown import StepTime
from bench_serving.profile import NoSuchStepError, wanted_steps
from bench_serving.server import Variant
from tests.bench_serving.fake_server import FakeServer
from tests.bench_serving.test_breakdown import decode_step, event, extend_step

REQUESTS = 8


def decodes(count: int, requests: int = REQUESTS, begin: float = 0.0) -> list[dict]:
    """So many decode steps in a trace, each followed by sampling."""
    events = []
    for place in range(count):
        at, first = begin + 1000 * place, 20 * place
        events += decode_step(at, first, requests=requests)
        events.append(event("cuda_runtime", "cudaLaunchKernel", at + 150, 5, first + 9))
        events.append(event("kernel", "void at::native::reduce_kernel<ArgMaxOps>", at + 600, 7, first + 9))
        events.append(event("kernel", "a_kernel_nobody_knows", at + 511, 3, first + 1))
    return events


def traces() -> Iterator[Written]:
    """Names and events of an extend's and a decode's trace, as SGLang names the files."""
    yield {"1-TP-0": [event for place in range(3) for event in extend_step(3000 * place, 20 * place)]}
    yield {"2-TP-0": decodes(5)}


Written = dict[str, list[dict]]
"""Traces by their names' beginnings."""


class Profiled(FakeServer):
    """A fake server that writes traces when its profile is stopped, one of `written` each time, unless
    `refuse` says otherwise."""

    def __init__(self, written: Iterator[Written], refuse: str = "", **fake: Any) -> None:
        super().__init__(**fake)
        self.written, self.refuse, self.folder = written, refuse, Path()

    def post(self, url: str, path: str, body: dict, until: float) -> None:
        if path == self.refuse:
            raise RuntimeError(f"the server answered {path} with HTTP 400: profiling is in progress")
        if path == "/start_profile":
            self.folder = Path(body["output_dir"])
        else:
            for name, events in next(self.written, {}).items():
                write_trace(self.folder / f"{name}.trace.json.gz", events)


def write_trace(path: Path, events: list[dict]) -> None:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


@pytest.fixture
def profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Profiled]], tuple[int, dict, str]]:
    """Profiles fakes in servers' place; returns the exit status, `breakdown.json` and the report."""
    monkeypatch.setattr(measure, "WARM_PASSES", 1)
    monkeypatch.setattr(profile, "TRACE_LIMIT_SECONDS", 0.3)

    def run(fakes: dict[str, Profiled], *more: str) -> tuple[int, dict, str]:
        @contextlib.contextmanager
        def started(variant: Variant, log: Path, start_limit: float) -> Iterator[str]:
            log.touch()
            with fakes[variant.name] as fake:
                monkeypatch.setattr(profile, "_post", fake.post)
                yield fake.url

        monkeypatch.setattr(server, "started", started)
        variants = [word for name in fakes for word in ("--variant", name)]
        sizes = ["--prefix-tokens", "128", "--new-tokens", "9", "--steps", "3", "--prompts", "random"]
        command = ["profile", *variants, *sizes, "--vocab", "500", "--concurrency", str(REQUESTS)]
        status = main([*command, *more, "--out", str(tmp_path), "--", "--model-path", "m"])
        found = json.loads((tmp_path / "breakdown.json").read_text())["found"]
        return status, found, (tmp_path / "README.md").read_text()

    return run


def test_both_stages_of_every_variant_are_in_the_table_and_the_plot(profiled, tmp_path: Path) -> None:
    status, found, text = profiled({name: Profiled(traces()) for name in ("stock", "ours")})
    assert status == 0, text
    assert found["ours"].keys() == {"EXTEND", "DECODE"}
    assert found["ours"]["EXTEND"]["microseconds"] == 605 and found["ours"]["EXTEND"]["steps"] == 3
    assert found["ours"]["EXTEND"]["parts"]["launch gaps"] == pytest.approx(380)
    # Two of the five decode steps are left out: the batch fills up in them.
    decode = found["ours"]["DECODE"]
    assert decode["microseconds"] == 75 and decode["steps"] == 3 and decode["ran"] == 5
    assert decode["between_kernels"] == {"void at::native::reduce_kernel<ArgMaxOps>": 7}
    for shown in (
        "## extend step, 512 new tokens",
        "| ms | stock | ours |",
        "| attention | 0.015 | 0.015 |",
        "| **step** | **0.605** | **0.605** |\n| speed against stock |  | 1.00x |",
        "| host | 1.000 | 1.000 |",
        "| kernels and copies | 8 | 8 |",
        "| launches | 4 | 4 |",
        "| gaps inside graphs | 0.005 | 0.005 |",
        "| launch-bound share | 63% | 63% |",
        "## decode step, 8 requests",
        "| between steps | 0.925 | 0.925 |",
        "| of it kernels ran | 0.007 | 0.007 |",
        "ours, *other*: `a_kernel_nobody_knows` 0.003.",
        "ours, *between steps*: `at::native::reduce_kernel<ArgMaxOps>` 0.007.",
        "![parts of a step by variant](step-parts.png)",
    ):
        assert shown in text, text
    assert (tmp_path / "step-parts.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_of_a_profile_is_made_again_elsewhere_with_what_is_known_of_names_there(
    profiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, text = profiled({name: Profiled(traces()) for name in ("stock", "ours")})
    for name in ("README.md", "step-parts.png"):
        (tmp_path / name).unlink()
    monkeypatch.setattr(profile, "machine", lambda: "another machine")
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == text
    assert (tmp_path / "step-parts.png").read_bytes().startswith(b"\x89PNG")
    path = tmp_path / "breakdown.json"
    path.write_text(path.read_text().replace("a_kernel_nobody_knows", "nvjet_new"))
    (tmp_path / "notes.md").write_text("What it means.\n")
    assert main(["report", "--out", str(tmp_path)]) == 0
    again = (tmp_path / "README.md").read_text()
    assert "| linears | 0.030 | 0.030 |" in text and "| linears | 0.033 | 0.033 |" in again, again
    assert "*other*:" in text and "*other*:" not in again
    assert again.startswith("# Where a step's time goes\n\nWhat it means.\n\n- Machine: "), again


def test_what_cannot_be_profiled_leaves_the_rest_and_says_why(
    profiled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (extend, _) = traces()
    no_kernels = [event for event in decode_step(0, 1) if event["cat"] != "kernel"]
    status, found, text = profiled(
        {
            "stock": Profiled(traces()),
            "blind": Profiled(iter([extend, {"2-TP-0": no_kernels}])),
            "silent": Profiled(iter([])),
            "busy": Profiled(traces(), refuse="/start_profile"),
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
    return StepTime(stage, requests, tokens, 1.0, {}, {}, 0.0, 1.0, 1, 1)


def test_few_steps_of_all_requests_are_tried_again_with_more_tokens(profiled) -> None:
    (extend, _) = traces()
    apart = [*decodes(9, requests=5), *decodes(3, begin=20_000)]
    fake = Profiled(iter([extend, {"2-TP-0": apart}, {"3-TP-0": decodes(7)}]))
    status, found, _ = profiled({"ours": fake})
    assert status == 0 and found["ours"]["DECODE"]["steps"] == 3
    # Another text each time, or the second try would find the first one's in the cache.
    assert len({tuple(prompt) for prompt in fake.prompts}) == len(fake.prompts)


def test_steps_of_one_try_are_kept_when_later_ones_give_fewer(profiled) -> None:
    (extend, _) = traces()
    few = [{f"{number}-TP-0": decodes(count)} for number, count in ((2, 2), (3, 4), (4, 3))]
    status, found, _ = profiled({"ours": Profiled(iter([extend, *few]))})
    assert status == 0 and found["ours"]["DECODE"]["steps"] == 2


def test_of_several_ranks_the_first_one_s_trace_is_read(profiled) -> None:
    names = ("-TP-{}-EP-{}".format(*pair) for pair in ((10, 10), (2, 2), (0, 0), (1, 1)))
    others = [event for place in range(3) for event in extend_step(3000 * place, 20 * place, tokens=77)]
    right, _ = traces()
    extend = {f"1{name}": right["1-TP-0"] if "TP-0" in name else others for name in names}
    status, found, text = profiled({"ours": Profiled(iter([extend, {"2-TP-0-EP-0": decodes(5)}]))})
    assert status == 0, text
    assert found["ours"]["EXTEND"]["tokens"] == 512


def test_a_trace_is_read_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "TRACE_LIMIT_SECONDS", 20)
    path, old = tmp_path / "2-TP-0.trace.json.gz", tmp_path / "1-TP-0.trace.json.gz"
    write_trace(old, [])
    write_trace(path, decodes(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    writer = threading.Timer(0.3, path.write_bytes, [whole])
    writer.start()
    assert profile._read_when_written(tmp_path, {old}) == decodes(1)
    writer.join()


def test_a_trace_that_stays_half_or_is_another_rank_s_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "TRACE_LIMIT_SECONDS", 0.3)
    (tmp_path / "1-TP-0.trace.json.gz").write_bytes(b"half")
    with pytest.raises(RuntimeError, match=r"1-TP-0\.trace\.json\.gz is no whole trace"):
        profile._read_when_written(tmp_path, set())
    write_trace(tmp_path / "2-TP-3.trace.json.gz", decodes(1))
    with pytest.raises(RuntimeError, match=r"no whole trace of the first rank.*2-TP-3\.trace"):
        profile._read_when_written(tmp_path, {tmp_path / "1-TP-0.trace.json.gz"})


def test_a_server_that_does_not_answer_is_given_up(profiled) -> None:
    status, found, text = profiled({"hung": Profiled(traces(), token_seconds=2.0)}, "--limit-s", "0.3")
    assert status == 1 and found == {}
    assert "hung: 1 of 1 warm-up requests failed: TimeoutError: no answer within 0 s (log: " in text, text


def test_a_failed_request_says_why_though_the_profile_cannot_be_stopped_either(profiled) -> None:
    # The prefix, warm-up passes of 1 and of 8 requests; the next one is profiled.
    fake = Profiled(traces(), refuse="/stop_profile", fault=lambda number: "http" if number >= 10 else None)
    status, _, text = profiled({"ours": fake})
    assert status == 1
    assert "ours: extend step: a profiled request failed: HTTP 400" in text, text


def test_a_trace_without_the_wanted_step_says_which_it_holds() -> None:
    taken = [step("EXTEND", 1, 5), step("DECODE", 8), step("DECODE", 7), step("DECODE", 8)]
    with pytest.raises(NoSuchStepError, match=r"no step of 8 requests after 2 to settle.*'DECODE', 7, 0"):
        wanted_steps(taken, "DECODE", 8, 512)
    with pytest.raises(NoSuchStepError, match=r"no step of 1 requests and 512 new tokens.*'EXTEND', 1, 5"):
        wanted_steps(taken, "EXTEND", 1, 512)
    assert wanted_steps([*taken, step("DECODE", 8)], "DECODE", 8, 512) == [step("DECODE", 8)]
