"""Splits the steps of a profiler trace into what takes their time.

SGLang puts every forward step into a span, `step[DECODE bs=8]` or `step[EXTEND bs=1 toks=512]`. A kernel
belongs to the step whose span holds the call that launched it, also when the call launched a whole CUDA
graph. Traces without a GPU are split by PyTorch's operators instead: their self time, and the Python between.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPAN = re.compile(r"^step\[(?P<stage>[A-Z_]+) bs=(?P<requests>\d+)(?: toks=(?P<tokens>\d+))?")
GAPS = "launch gaps"
OTHER = "other"

PARTS = (
    ("collectives", r"nccl|all_?reduce|all_?gather|cross_device"),
    (
        "selection",
        r"score|topk_index|_select_kernel|_request_extent|_request_place|_order_kernel|_span_kernel"
        r"|merge_candidates|sort_ids|index_block|choose_blocks|select_blocks|plan_prefix",
    ),
    (
        "MoE",
        r"fused_moe|moe|expert|topk_?(gating|softmax|sigmoid)|act_and_mul|swiglu|silu|gate_topk"
        r"|m_?grouped|grouped_gemm|gelu_and_mul",
    ),
    (
        "attention",
        r"gqa_share_sparse|attend|attn|attention|flash|merge_pages|merge_splits|plan_unions|plan_dense"
        r"|_entry_page|(count|list)_entries|lay_out_pages|_fwd_kernel|_fwd_grouped|kernel_stage[12]|kv_indices"
        r"|num_kv_splits|merge_state|softmax",
    ),
    ("norms and rope", r"norm|rope|rotary"),
    (
        "linears",
        r"gemm|gemv|cublas|nvjet|cutlass|xmma|splitk|mxfp8_linear|linear|matmul|addmm|::b?mm\b|dot_kernel",
    ),
    ("cache writes", r"_store|store_|set_kv|reshape_and_cache|index_put"),
    ("embedding and sampling", r"embedding|argmax|sampl|multinomial|logits"),
    (
        "copies and elementwise",
        r"memcpy|memset|copy|elementwise|fill|cat_?array|vectorized|reduce_kernel|triton_poi",
    ),
)
"""Part of a step -> names of its kernels or operators; the first that matches."""

PART_NAMES = (*(name for name, _ in PARTS), OTHER, GAPS)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in PARTS)


def part_of(kernel: str) -> str:
    """The part that a kernel's or an operator's name belongs to."""
    return next((name for name, pattern in _PATTERNS if pattern.search(kernel)), OTHER)


@dataclass(frozen=True)
class StepTime:
    """One forward step.

    Attributes:
        stage, requests, tokens: as its span says; `tokens` are an extend step's new tokens.
        microseconds: from its first kernel's start to its last kernel's end.
        parts: microseconds by part, `GAPS` being when no kernel ran. Kernels that overlap share the time.
        kernels: microseconds by kernel name.
        begin: start of its first kernel, on the trace's clock.
    """

    stage: str
    requests: int
    tokens: int
    microseconds: float
    parts: dict[str, float]
    kernels: dict[str, float]
    begin: float


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace, gzipped or not."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]


def steps(events: Iterable[dict[str, Any]]) -> list[StepTime]:
    """The forward steps of a trace, in time order; those in which nothing ran are left out."""
    complete = [event for event in events if event.get("ph") == "X"]
    spans = sorted(
        (event for event in complete if event.get("cat") == "user_annotation" and SPAN.match(event["name"])),
        key=lambda event: event["ts"],
    )
    work = _kernels_by_span(complete, spans)
    if not any(work):
        work = _operators_by_span(complete, spans)
    return [_step(span, ran) for span, ran in zip(spans, work) if ran]


@dataclass(frozen=True)
class Breakdown:
    """The median step of many.

    Attributes:
        microseconds: median of the steps' times; `parts` and `kernels` are means scaled to it.
        between_microseconds: median from one step's end to the next one's start, for steps back to back.
    """

    stage: str
    requests: int
    tokens: int
    steps: int
    microseconds: float
    between_microseconds: float | None
    parts: dict[str, float]
    kernels: dict[str, float]


def summarise(taken: Sequence[StepTime], *, back_to_back: bool) -> Breakdown:
    """Of steps that did the same work. Raises ValueError for none."""
    if not taken:
        raise ValueError("the trace holds no such step")
    median = statistics.median(step.microseconds for step in taken)
    total = sum(step.microseconds for step in taken)
    parts: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for step in taken:
        parts.update(step.parts)
        kernels.update(step.kernels)
    between = [later.begin - (step.begin + step.microseconds) for step, later in itertools.pairwise(taken)]
    scale = median / total
    return Breakdown(
        taken[0].stage,
        taken[0].requests,
        taken[0].tokens,
        len(taken),
        median,
        statistics.median(between) if back_to_back and between else None,
        {name: parts[name] * scale for name in PART_NAMES if parts[name]},
        {name: value * scale for name, value in kernels.most_common()},
    )


def _kernels_by_span(
    complete: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Kernels and copies by the span in which their launch lies; the launch has the same correlation id."""
    launched: dict[int, float] = {
        event["args"]["correlation"]: event["ts"]
        for event in complete
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found: list[list[dict[str, Any]]] = [[] for _ in spans]
    for event in complete:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin = launched.get(event["args"].get("correlation"))
            place = None if begin is None else _span_at(spans, begin)
            if place is not None:
                found[place].append(event)
    return found


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


def _step(span: dict[str, Any], ran: Sequence[dict[str, Any]]) -> StepTime:
    fields = SPAN.match(span["name"]).groupdict()
    begin = min(event["ts"] for event in ran)
    end = max(event["ts"] + event["dur"] for event in ran)
    parts: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    reached = begin
    for event in sorted(ran, key=lambda event: event["ts"]):
        parts[GAPS] += max(0.0, event["ts"] - reached)
        own = max(0.0, event["ts"] + event["dur"] - max(reached, event["ts"]))
        parts[part_of(event["name"])] += own
        kernels[event["name"]] += own
        reached = max(reached, event["ts"] + event["dur"])
    return StepTime(
        fields["stage"],
        int(fields["requests"]),
        int(fields["tokens"] or 0),
        end - begin,
        dict(parts),
        dict(kernels),
        begin,
    )
