"""Where a step's time goes, by variant: traces a decode and an extend step and splits them."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
import urllib.error
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_serving import breakdown, client, server
from bench_serving.breakdown import Breakdown, StepTime, TraceError
from bench_serving.corpus import Corpus
from bench_serving.measure import Load, warm_prefixes, warm_up
from bench_serving.profile_report import Found, draw, report
from bench_serving.server import Variant
from bench_serving.store import model_note
from bench_serving.workload import PrefixLevel, Traffic, Workload

TRACE_LIMIT_SECONDS = 300
SETTLING_STEPS = 2
PLOT = "step-parts.png"
TRACES = "*.trace.json.gz"


@dataclass(frozen=True)
class Subject:
    """A server to profile: a name, its model folder, and what has it up while it is profiled."""

    variant: Variant
    serve: Callable[[], AbstractContextManager[str]]


def started(variants: Sequence[Variant], folder: Path, start_limit: float) -> list[Subject]:
    """Variants, each started for its turn; their logs go to `folder`."""
    return [
        Subject(
            variant, functools.partial(server.started, variant, folder / f"{variant.name}.log", start_limit)
        )
        for variant in variants
    ]


def running(url: str) -> list[Subject]:
    """A server that is up and stays up."""
    variant = Variant("server", (), ("--model-path", server.info(url)["model_path"]))
    return [Subject(variant, functools.partial(nullcontext, url))]


def main(chosen: argparse.Namespace, subjects: Sequence[Subject], corpus_of: Callable[[str], Corpus]) -> int:
    """Profile every server and write `breakdown.json`, `README.md` and, with matplotlib, the plot.

    What cannot be profiled is said, and leaves the rest; the exit status is 1 then.
    """
    chosen.out.mkdir(parents=True, exist_ok=True)
    corpus = corpus_of(subjects[0].variant.flag("--model-path"))
    found: Found = {}
    lacking: list[str] = []
    for subject in subjects:
        name = subject.variant.name
        try:
            with subject.serve() as url:
                found[name], reasons = _profile(url, chosen, corpus, chosen.out / f"traces-{name}")
            lacking += [f"{name}: {reason}" for reason in reasons]
        except (RuntimeError, urllib.error.URLError) as error:
            lacking.append(f"{name}: {error}")
    found = {name: stages for name, stages in found.items() if stages}
    raw = {name: {stage: asdict(one) for stage, one in stages.items()} for name, stages in found.items()}
    (chosen.out / "breakdown.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    plotted = bool(found) and draw(found, chosen.out / PLOT)
    notes = list(dict.fromkeys(filter(None, (model_note(subject.variant) for subject in subjects))))
    text = report(
        found, command=chosen.command_line, notes=notes, lacking=lacking, plot=PLOT if plotted else None
    )
    (chosen.out / "README.md").write_text(text, encoding="utf-8")
    print(text)
    for reason in lacking:
        print(f"error: not profiled: {reason}", file=sys.stderr)
    return 1 if lacking else 0


def _profile(
    url: str, chosen: argparse.Namespace, corpus: Corpus, folder: Path
) -> tuple[dict[str, Breakdown], list[str]]:
    """Extend steps of one request each, then decode steps of `chosen.concurrency` requests; and what is
    lacking, and why."""

    def load(output_tokens: int) -> Load:
        traffic = Traffic((chosen.new_tokens, chosen.new_tokens), (output_tokens, output_tokens))
        prefix = (PrefixLevel(chosen.prefix_tokens),)
        return Load.of(Workload("profile", "", (1,), (traffic,), prefix), corpus, chosen.seed)

    extend, decode = load(1), load(chosen.steps + 4 * SETTLING_STEPS)
    warm_prefixes(url, extend)
    warm_up(url, extend, 1)
    warm_up(url, decode, chosen.concurrency)
    made: dict[str, Breakdown] = {}
    lacking: list[str] = []
    for stage, one, concurrency, count in (
        ("EXTEND", extend, 1, chosen.steps),
        ("DECODE", decode, chosen.concurrency, chosen.concurrency),
    ):
        try:
            trace = _trace(url, one, concurrency, count, folder)
            taken = wanted_steps(
                breakdown.steps(breakdown.read(trace)), stage, concurrency, chosen.new_tokens
            )
            made[stage] = breakdown.summarise(taken, back_to_back=stage == "DECODE")
        except (RuntimeError, TraceError) as error:
            lacking.append(f"{stage.lower()} step: {error}")
    return made, lacking


def wanted_steps(taken: Sequence[StepTime], stage: str, requests: int, new_tokens: int) -> Sequence[StepTime]:
    """The steps of a trace that are alike: extends of about `new_tokens`, or decodes of all `requests`.

    Raises:
        TraceError: there are none; says which there are.
    """
    if stage == "EXTEND":
        wanted = [step for step in taken if step.stage == stage and step.tokens >= new_tokens // 2]
    else:
        wanted = [step for step in taken if step.stage == stage and step.requests == requests]
        wanted = wanted[SETTLING_STEPS:]
    if not wanted:
        seen = sorted({(step.stage, step.requests, step.tokens) for step in taken})
        raise TraceError(
            f"no step of {requests} requests"
            + (f" and {new_tokens} new tokens" if stage == "EXTEND" else f" after {SETTLING_STEPS} to settle")
            + f" in the trace, only these (stage, requests, new tokens): {seen}"
        )
    return wanted


def _trace(url: str, load: Load, concurrency: int, count: int, folder: Path) -> Path:
    """Serve the load under SGLang's profiler and return the trace file of the first rank.

    Raises:
        RuntimeError: the profiler did not start, a request failed, or no trace was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob(TRACES))
    body = {"output_dir": str(folder.absolute()), "activities": ["CPU", "GPU"], "with_stack": False}
    _post(url, "/start_profile", body)
    try:
        driven = client.drive(url, load.sessions(concurrency, "profile", count=count), concurrency)
    finally:
        _post(url, "/stop_profile", {})
    failed = [exchange.output.error for exchange in driven.exchanges if not exchange.output.success]
    if failed:
        raise RuntimeError(f"a profiled request failed: {failed[0]}")
    begin = time.monotonic()
    while time.monotonic() - begin < TRACE_LIMIT_SECONDS:
        new = sorted(set(folder.glob(TRACES)) - before)
        if new and _complete(new[0]):
            return new[0]
        time.sleep(0.5)
    raise RuntimeError(
        f"the server wrote no {TRACES} into {folder} within {TRACE_LIMIT_SECONDS} s; is it on this machine?"
    )


def _post(url: str, path: str, body: dict[str, Any]) -> None:
    try:
        server.post(url, path, body)
    except urllib.error.HTTPError as error:
        answer = error.read().decode(errors="replace")[:500]
        raise RuntimeError(f"the server answered {path} with HTTP {error.code}: {answer}") from error


def _complete(path: Path) -> bool:
    """Whether the file has stopped growing."""
    size = path.stat().st_size
    time.sleep(1.0)
    return size > 0 and path.stat().st_size == size
