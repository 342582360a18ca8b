"""Where a step's time goes, by variant: traces a decode and an extend step and splits them."""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
import urllib.error
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serving import breakdown, client, profile_report, server
from bench_serving.breakdown import Breakdown, StepTime, TraceError
from bench_serving.corpus import Corpus
from bench_serving.machine import machine
from bench_serving.measure import Load, warm_prefixes, warm_up
from bench_serving.profile_report import Found, Profile
from bench_serving.server import Variant
from bench_serving.store import model_note
from bench_serving.workload import PrefixLevel, Traffic, Workload

TRACE_LIMIT_SECONDS = 120
"""From the answer to `/stop_profile`, which SGLang gives when every rank has written its trace."""
LEAST_POST_SECONDS = 30
SETTLING_STEPS = 2
MARGINS = (8, 40, 160)
"""Decode steps beyond those wanted, one try after the other: in them, requests that arrived apart are not yet
all in the batch. Few at first, since each makes the trace longer."""
TRACES = "*.trace.json.gz"
FAILURES = (*server.FAILURES, TraceError)
RANK = re.compile(r"-(TP|DP|PP|EP)-(\d+)")


@dataclass(frozen=True)
class Subject:
    """A server to profile: its name and model folder, what has it up meanwhile, and its logs where known."""

    variant: Variant
    serve: Callable[[], AbstractContextManager[str]]
    logs: tuple[Path, ...] = ()


def started(variants: Sequence[Variant], folder: Path, start_limit: float) -> list[Subject]:
    """Variants, each started for its turn; their logs go to `folder`."""
    logs = [folder / f"{variant.name}.log" for variant in variants]
    return [
        Subject(variant, functools.partial(server.started, variant, log, start_limit), (log,))
        for variant, log in zip(variants, logs, strict=True)
    ]


def running(url: str) -> list[Subject]:
    """A server that is up and stays up."""
    variant = Variant("server", (), ("--model-path", server.info(url)["model_path"]))
    return [Subject(variant, functools.partial(nullcontext, url))]


def main(chosen: argparse.Namespace, subjects: Sequence[Subject], corpus_of: Callable[[str], Corpus]) -> int:
    """Profile every server and write `breakdown.json`, `README.md` and, with matplotlib, the plot, anew after
    each of them.

    What cannot be profiled is said, and leaves the rest; the exit status is 1 then.
    """
    chosen.out.mkdir(parents=True, exist_ok=True)
    corpus = corpus_of(subjects[0].variant.flag("--model-path"))
    notes = tuple(dict.fromkeys(filter(None, (model_note(subject.variant) for subject in subjects))))
    date = time.strftime("%Y-%m-%d", time.gmtime())
    found: Found = {}
    lacking: list[str] = []
    for subject in subjects:
        name = subject.variant.name
        try:
            with subject.serve() as url:
                found[name], reasons = _profile(url, chosen, corpus, chosen.out / f"traces-{name}")
            lacking += [f"{name}: {reason}" for reason in reasons]
        except FAILURES as error:
            lacking.append(f"{name}: {server.why(error, *subject.logs)}")
        known = {name: stages for name, stages in found.items() if stages}
        # A server's log, which a reason may end with, belongs on the terminal.
        reasons = tuple(reason.partition("\n")[0].removesuffix(", ends with:") for reason in lacking)
        Profile(machine(), date, chosen.command_line, notes, reasons, known).save(chosen.out)
        text = profile_report.write(chosen.out)
    print(text)
    for reason in lacking:
        print(f"error: not profiled: {reason}", file=sys.stderr)
    return 1 if lacking else 0


def _profile(
    url: str, chosen: argparse.Namespace, corpus: Corpus, folder: Path
) -> tuple[dict[str, Breakdown], list[str]]:
    """Extend steps of one request each, then decode steps of `chosen.concurrency` requests; and what is
    lacking, and why."""
    until = time.monotonic() + chosen.limit_s

    def load(output_tokens: int) -> Load:
        traffic = Traffic((chosen.new_tokens, chosen.new_tokens), (output_tokens, output_tokens))
        prefix = (PrefixLevel(chosen.prefix_tokens),)
        return Load.of(
            Workload("profile", "", (1,), (traffic,), prefix, requests_per_slot=1, least_sessions=1),
            corpus,
            chosen.seed,
        )

    extend = load(1)
    decodes = [load(chosen.steps + SETTLING_STEPS + margin) for margin in MARGINS]
    # An earlier profile of this server with the same seed left its private text in the cache.
    server.flush_cache(url)
    warm_prefixes(url, extend, until)
    warm_up(url, extend, 1, until=until)
    warm_up(url, decodes[0], chosen.concurrency, until=until)
    made: dict[str, Breakdown] = {}
    lacking: list[str] = []
    for stage, tries, concurrency, count in (
        ("EXTEND", [extend], 1, chosen.steps),
        ("DECODE", decodes, chosen.concurrency, chosen.concurrency),
    ):
        wanted: Sequence[StepTime] = ()
        for one in tries:
            try:
                taken = breakdown.steps(_trace(url, one, concurrency, count, folder, until))
                more = wanted_steps(taken, stage, concurrency, chosen.new_tokens)
            except FAILURES as error:
                reason = f"{stage.lower()} step: {error}"
                if not isinstance(error, NoSuchStepError):
                    break
            else:
                wanted = max(wanted, more, key=len)
                if len(wanted) >= chosen.steps:
                    break
        if wanted:
            made[stage] = breakdown.summarise(wanted[: chosen.steps], back_to_back=stage == "DECODE")
        else:
            lacking.append(reason)
    return made, lacking


class NoSuchStepError(TraceError):
    """A trace that holds other steps than the wanted ones."""


def wanted_steps(taken: Sequence[StepTime], stage: str, requests: int, new_tokens: int) -> Sequence[StepTime]:
    """The steps of a trace that are alike: extends of about `new_tokens`, or decodes of all `requests`.

    Raises:
        NoSuchStepError: there are none; says which there are.
    """
    if stage == "EXTEND":
        wanted = [step for step in taken if step.stage == stage and step.tokens >= new_tokens // 2]
    else:
        wanted = [step for step in taken if step.stage == stage and step.requests == requests]
        wanted = wanted[SETTLING_STEPS:]
    if not wanted:
        seen = sorted({(step.stage, step.requests, step.tokens) for step in taken})
        raise NoSuchStepError(
            f"no step of {requests} requests"
            + (f" and {new_tokens} new tokens" if stage == "EXTEND" else f" after {SETTLING_STEPS} to settle")
            + f" in the trace, only these (stage, requests, new tokens): {seen}"
        )
    return wanted


def _trace(
    url: str, load: Load, concurrency: int, count: int, folder: Path, until: float
) -> list[dict[str, Any]]:
    """Serve the load under SGLang's profiler and return the events of the first rank's trace.

    Raises:
        RuntimeError: the profiler did not start, a request failed, or no whole trace was written.
        OSError: the server did not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob(TRACES))
    body = {
        "output_dir": str(folder.absolute()),
        "activities": ["CPU", "GPU"],
        # Both lengthen the host's time by more than the spans do.
        "with_stack": False,
        "record_shapes": False,
    }
    _post(url, "/start_profile", body, until)
    failed: list[str] = []
    try:
        driven = client.drive(
            url, load.sessions(concurrency, "profile", count=count), concurrency, until=until
        )
        failed = [exchange.output.error for exchange in driven.exchanges if not exchange.output.success]
    finally:
        try:
            _post(url, "/stop_profile", {}, until)
        except FAILURES:
            # Of a server that died under a request, the request's failure says more.
            if not failed:
                raise
    if failed:
        raise RuntimeError(f"a profiled request failed: {failed[0]}")
    return _read_when_written(folder, before)


def _read_when_written(folder: Path, before: set[Path]) -> list[dict[str, Any]]:
    """The events of the first rank's trace among those in `folder` that were not there `before`."""
    begin = time.monotonic()
    unread = ""
    new: list[Path] = []
    while time.monotonic() - begin < TRACE_LIMIT_SECONDS:
        new = sorted(set(folder.glob(TRACES)) - before, key=rank)
        if new and not any(rank(new[0])):
            try:
                events = breakdown.read(new[0])
            except TraceError as error:
                unread = f": {error}"
            else:
                print(f"read {new[0]}, the first of {len(new)} ranks'", flush=True)
                return events
        time.sleep(0.5)
    if new:
        ranks = ", ".join(path.name for path in new)
        raise RuntimeError(
            f"no whole trace of the first rank within {TRACE_LIMIT_SECONDS} s, {ranks}{unread}"
        )
    raise RuntimeError(
        f"the server wrote no {TRACES} into {folder} within {TRACE_LIMIT_SECONDS} s; is it on this machine?"
    )


def rank(trace: Path) -> tuple[int, ...]:
    """Which rank wrote a trace, by its name; all zero for the first one."""
    return tuple(int(number) for _, number in RANK.findall(trace.name))


def _post(url: str, path: str, body: dict[str, Any], until: float) -> None:
    limit = max(LEAST_POST_SECONDS, until - time.monotonic())
    try:
        server.post(url, path, body, limit)
    except urllib.error.HTTPError as error:
        answer = error.read().decode(errors="replace")[:500]
        raise RuntimeError(
            f"the server answered {path} with HTTP {error.code}: {answer.strip()}; its log says why"
        ) from error
    except TimeoutError as error:
        raise RuntimeError(f"the server did not answer {path} within {limit:.0f} s") from error
