"""Jobs in forked processes: all run, failures are told apart, and nothing outlasts the limit."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

from bench_serving.forked import run_forked


def write(path: Path) -> None:
    path.write_text(str(os.getpid()))


def fail(reason: str) -> None:
    raise ValueError(reason)


def test_every_job_runs_once_in_another_process(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(7)]
    assert run_forked([functools.partial(write, path) for path in paths], 3, 60) == [""] * 7
    writers = {path.read_text() for path in paths}
    assert str(os.getpid()) not in writers and len(writers) <= 3


def test_a_job_that_fails_says_why_and_stops_no_other(tmp_path: Path) -> None:
    jobs = [functools.partial(fail, "no such\nkernel"), functools.partial(write, tmp_path / "later")]
    assert run_forked(jobs, 1, 60) == ["ValueError: no such kernel", ""]
    assert (tmp_path / "later").exists()


def test_a_reason_longer_than_a_pipe_takes_at_once_is_cut() -> None:
    (outcome,) = run_forked([functools.partial(fail, "x" * 100_000)], 1, 60)
    assert outcome.startswith("ValueError: xxx") and len(outcome) < 500


def test_a_job_that_hangs_is_killed_and_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    jobs = [functools.partial(time.sleep, 600), functools.partial(write, tmp_path / "done")]
    assert run_forked([*jobs, jobs[0], jobs[0]], 2, 1.5) == [
        "did not end in 1.5 s",
        "",
        "did not end in 1.5 s",
        "not begun in 1.5 s",
    ]
    assert time.monotonic() - begin < 30


def test_a_process_that_dies_takes_its_job_alone(tmp_path: Path) -> None:
    jobs = [lambda: os.kill(os.getpid(), signal.SIGKILL), functools.partial(write, tmp_path / "done")]
    outcomes = run_forked(jobs, 2, 5)
    assert outcomes[0] and outcomes[1] == "", outcomes


def test_no_jobs_are_no_trouble() -> None:
    assert run_forked([], 4, 5) == []
