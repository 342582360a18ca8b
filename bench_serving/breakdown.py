"""Splits the steps of a profiler trace into what takes their time.

SGLang puts every forward step into a span, `step[DECODE bs=8]` or `step[EXTEND bs=1 toks=512]`. A kernel
belongs to the step whose span holds the call that launched it, also when the call launched a whole CUDA
graph. What was launched outside of all spans, such as sampling, is counted between the steps. The span's own
length is the host's time for the step. Traces without a GPU are split by PyTorch's operators instead: their
self time, and the Python between.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_serving.step_parts import GAPS, GRAPH_GAPS, PART_NAMES, part_of

SPAN = re.compile(r"^step\[(?P<stage>[A-Z_]+) bs=(?P<requests>\d+)(?: toks=(?P<tokens>\d+))?")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"LaunchKernel|GraphLaunch|Memcpy|Memset")
SHOWN_NAMES = 5


class TraceError(ValueError):
    """A trace that cannot be split; says what it lacks."""


@dataclass(frozen=True)
class StepTime:
    """One forward step.

    Attributes:
        stage, requests, tokens: as its span says; `tokens` are an extend step's new tokens.
        microseconds: from its first kernel's start to its last kernel's end, what runs beside the step before
            left out.
        parts: microseconds by part; when no kernel ran, between two of one launch `GRAPH_GAPS`, else `GAPS`.
            Of kernels that overlap, the one that began first has the time.
        kernels: microseconds by kernel name, counted alike.
        begin: when it began, on the trace's clock.
        host_microseconds: the host's time in the step. A GPU that waits for the next launch makes gaps.
        launches: calls in which the host put kernels, copies or whole graphs on the GPU.
        ran: kernels and copies of the step, or PyTorch's operators.
        between_microseconds: until the next step began, if that is of the same stage and as many requests.
        between_kernels: microseconds by name of the kernels that ran meanwhile, counted like `kernels`.
    """

    stage: str
    requests: int
    tokens: int
    microseconds: float
    parts: dict[str, float]
    kernels: dict[str, float]
    begin: float
    host_microseconds: float
    launches: int
    ran: int
    between_microseconds: float | None = None
    between_kernels: dict[str, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.begin + self.microseconds


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, gzipped or not.

    Raises:
        TraceError: it is none, or was not written to its end.
    """
    raw = path.read_bytes()
    try:
        return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    except (ValueError, KeyError, EOFError, OSError) as error:
        raise TraceError(f"{path} is no whole trace: {error!r}") from error


def steps(events: Iterable[dict[str, Any]]) -> list[StepTime]:
    """The forward steps of a trace, in time order; those in which nothing ran are left out.

    Raises:
        TraceError: there is no step, or nothing that ran in one.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    notes = [event for event in complete if event.get("cat") == "user_annotation"]
    spans = sorted((note for note in notes if SPAN.match(note["name"])), key=lambda event: event["ts"])
    if not spans:
        seen = sorted({note["name"] for note in notes})[:SHOWN_NAMES]
        raise TraceError(
            "the trace holds no span 'step[...]', into which SGLang 0.5.23 puts every forward step: nothing "
            f"was served while it was taken, or this SGLang names them otherwise; it holds {seen}"
        )
    calls = [event for event in complete if event.get("cat") in CALLS]
    outside: list[dict[str, Any]] = []
    if calls:
        work, outside = _kernels_by_span(complete, calls, spans)
    else:
        work = _operators_by_span(complete, spans)
        if not any(work):
            raise TraceError("the trace holds neither launches nor operators within its steps")
    launches = Counter(_span_at(spans, call["ts"]) for call in calls if LAUNCH.search(call["name"]))
    found: list[StepTime] = []
    reached = float("-inf")
    for place, (span, ran) in enumerate(zip(spans, work)):
        end = max((event["ts"] + event["dur"] for event in ran), default=reached)
        if end > reached:
            found.append(_step(span, ran, reached, launches[place]))
            reached = end
    return _with_what_ran_between(found, outside)


@dataclass(frozen=True)
class Breakdown:
    """The median step of many.

    Attributes:
        microseconds: median of the steps' times; `parts` and `kernels` are means scaled to it.
        between_microseconds: median from one step's end to the next one's start, for steps back to back.
        between_kernels: microseconds by name of what ran meanwhile, means scaled alike.
        host_microseconds: median of the host's times.
        launches, ran: medians of their numbers.
    """

    stage: str
    requests: int
    tokens: int
    steps: int
    microseconds: float
    between_microseconds: float | None
    parts: dict[str, float]
    kernels: dict[str, float]
    host_microseconds: float
    launches: float
    ran: float
    between_kernels: dict[str, float] = field(default_factory=dict)

    @property
    def launch_bound_share(self) -> float:
        """Part of the step in which the GPU waited for a launch: what faster launching gains at most."""
        return self.parts.get(GAPS, 0.0) / self.microseconds


def summarise(taken: Sequence[StepTime], *, back_to_back: bool) -> Breakdown:
    """Of steps that did the same work. Raises TraceError for none."""
    if not taken:
        raise TraceError("the trace holds no such step")
    parts: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for step in taken:
        parts.update(step.parts)
        kernels.update(step.kernels)
    median, scale = _median_and_scale([step.microseconds for step in taken])
    pauses = [step for step in taken if back_to_back and step.between_microseconds is not None]
    meanwhile: Counter[str] = Counter()
    for step in pauses:
        meanwhile.update(step.between_kernels)
    between, between_scale = _median_and_scale([step.between_microseconds for step in pauses])
    return Breakdown(
        taken[0].stage,
        taken[0].requests,
        taken[0].tokens,
        len(taken),
        median,
        between if pauses else None,
        {name: parts[name] * scale for name in PART_NAMES if parts[name]},
        {name: value * scale for name, value in kernels.most_common()},
        statistics.median(step.host_microseconds for step in taken),
        statistics.median(step.launches for step in taken),
        statistics.median(step.ran for step in taken),
        {name: value * between_scale for name, value in meanwhile.most_common()},
    )


def _median_and_scale(lengths: Sequence[float]) -> tuple[float, float]:
    """The median, and what sums over all of them are to be multiplied by to be its shares."""
    total = sum(lengths)
    median = statistics.median(lengths) if lengths else 0.0
    return median, median / total if total else 0.0


def _kernels_by_span(
    complete: Sequence[dict[str, Any]], calls: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]]
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Kernels and copies by the span in which their launch lies; the launch has the same correlation id. And
    those that were launched in none.

    Raises:
        TraceError: there are none, or none was launched in a span.
    """
    launched = {_correlation(call): call["ts"] for call in calls if _correlation(call) is not None}
    ran = [event for event in complete if event.get("cat") in KERNELS]
    if not ran:
        raise TraceError(
            f"the trace holds {len(calls)} CUDA calls and not one kernel: CUPTI recorded none. Another "
            "profiler is attached to the server, its driver keeps tracing from users "
            "(NVreg_RestrictProfilingToAdminUsers), or the GPU was not among the profile's activities"
        )
    found: list[list[dict[str, Any]]] = [[] for _ in spans]
    outside: list[dict[str, Any]] = []
    for event in ran:
        begin = launched.get(_correlation(event))
        place = None if begin is None else _span_at(spans, begin)
        (outside if place is None else found[place]).append(event)
    if not any(found):
        raise TraceError(
            f"none of the trace's {len(ran)} kernels was launched within one of its {len(spans)} steps: "
            "their launches are missing, or have no correlation ids"
        )
    return found, outside


def _correlation(event: dict[str, Any]) -> int | None:
    return event.get("args", {}).get("correlation")


def _operators_by_span(
    complete: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Operators by span, cut down to the time in which none that they call runs."""
    found: list[list[dict[str, Any]]] = [[] for _ in spans]
    operators = sorted(
        (event for event in complete if event.get("cat") == "cpu_op"),
        key=lambda event: (event["ts"], -event["dur"]),
    )
    for event in operators:
        place = _span_at(spans, event["ts"])
        if place is not None and event["tid"] == spans[place]["tid"]:
            found[place].append(event)
    return [_leaves(events) for events in found]


def _leaves(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pieces of nested events in which the innermost one runs; `events` ordered by start, outer first."""
    pieces: list[dict[str, Any]] = []
    open_events: list[dict[str, Any]] = []
    now = 0.0

    def until(moment: float) -> None:
        nonlocal now
        if open_events and moment > now:
            pieces.append({"name": open_events[-1]["name"], "ts": now, "dur": moment - now})
        now = max(now, moment)

    for event in events:
        while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
            until(open_events[-1]["ts"] + open_events[-1]["dur"])
            open_events.pop()
        until(event["ts"])
        now = event["ts"]
        open_events.append(event)
    while open_events:
        until(open_events[-1]["ts"] + open_events[-1]["dur"])
        open_events.pop()
    return pieces


def _span_at(spans: Sequence[dict[str, Any]], moment: float) -> int | None:
    place = bisect.bisect_right(spans, moment, key=lambda span: span["ts"]) - 1
    if place < 0 or moment > spans[place]["ts"] + spans[place]["dur"]:
        return None
    return place


def _step(span: dict[str, Any], ran: Sequence[dict[str, Any]], not_before: float, launches: int) -> StepTime:
    """What `ran` for the step after `not_before`, when the step before it had ended."""
    fields = SPAN.match(span["name"]).groupdict()
    begin = max(not_before, min(event["ts"] for event in ran))
    end = max(event["ts"] + event["dur"] for event in ran)
    kernels, gaps = _one_at_a_time(ran, begin, end)
    parts: Counter[str] = Counter(gaps)
    for name, microseconds in kernels.items():
        parts[part_of(name)] += microseconds
    return StepTime(
        fields["stage"],
        int(fields["requests"]),
        int(fields["tokens"] or 0),
        end - begin,
        dict(parts),
        kernels,
        begin,
        span["dur"],
        launches,
        len(ran),
    )


def _one_at_a_time(
    ran: Iterable[dict[str, Any]], begin: float, end: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of `begin` to `end` by name, of events that overlap the earlier one's; and without any, by
    kind of gap."""
    own: Counter[str] = Counter()
    gaps: Counter[str] = Counter({GAPS: 0.0})
    reached, launch = begin, None
    for event in sorted(ran, key=lambda event: event["ts"]):
        if event["ts"] > reached:
            in_graph = launch is not None and launch == _correlation(event)
            gaps[GRAPH_GAPS if in_graph else GAPS] += event["ts"] - reached
        until = min(end, event["ts"] + event["dur"])
        own[event["name"]] += max(0.0, until - max(reached, event["ts"]))
        if until >= reached:
            reached, launch = until, _correlation(event)
    return dict(own), dict(gaps)


def _with_what_ran_between(found: Sequence[StepTime], outside: Iterable[dict[str, Any]]) -> list[StepTime]:
    """The steps, each with what ran until the next one like it began."""
    waiting = sorted(outside, key=lambda event: event["ts"])
    made = []
    for step, later in itertools.zip_longest(found, found[1:]):
        if later is None or (later.stage, later.requests) != (step.stage, step.requests):
            made.append(step)
            continue
        meanwhile = [
            event
            for event in waiting[: bisect.bisect_left(waiting, later.begin, key=lambda event: event["ts"])]
            if event["ts"] + event["dur"] > step.end
        ]
        ran, _ = _one_at_a_time(meanwhile, step.end, later.begin)
        made.append(replace(step, between_microseconds=later.begin - step.end, between_kernels=ran))
    return made
