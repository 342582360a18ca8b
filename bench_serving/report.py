"""A comparison's Markdown: tables of what `points.jsonl` holds, and how it was measured."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_serving.store import Store, current, outputs_of, probes_of
from bench_serving.summary import (
    Difference,
    NotCompared,
    Row,
    Value,
    base_variant,
    differences,
    in_order,
    ratio,
    rows,
)

REPORT = "README.md"
NOTES = "notes.md"
"""What a person has to say about the numbers, in the folder; the report begins with it."""

EXPLANATION = """\
- Medians over the repeats of a load; ± is (largest - smallest) / median over them, nothing for a single
  one. Ratios are against {base}, above 1 is better.
- *first token* and *per token* are medians over the requests of a run (time to first token; time per output
  token after it), *gap* is the time between tokens, all in milliseconds, seen by the client.
- *overlap* is the part of the prompts' tokens that an earlier request or the warmed prefix holds too, in
  whole pages; *cached* is what the server took from its cache; *pages saved* is the part of index page
  loads that sharing made unnecessary.
- A failed request is counted in *failed* and in nothing else. Greedy requests, end-of-sequence ignored."""

MEMORY = """\
SGLang gives its cache what is free at the start, up to a share, so peaks are alike; what a variant saves
is in its tokens of cache."""


WORK = """\
Recorded without CUDA graphs by another start of the variant, after everything above was measured: one session
per slot, eight at most, with short answers. By layer, least / median / most: blocks other than its own that
some query token chose, and experts that some token took, in all and on average in a step of up to eight.
SGLang without the plugin cannot say: -."""


def write(store: Store, *, title: str, command: str, plots: Sequence[str] = ()) -> Path:
    """Write the report beside the points and return its path. Of the points those of now (`store.current`).

    Raises:
        FileNotFoundError: there are no points.
    """
    now = current(store.points())
    points = now.points
    if not points:
        raise FileNotFoundError(f"no points in {store.folder}; measure first")
    table = rows(points)
    base = base_variant(points)
    lines = [f"# {title}", "", *notes_of(store.folder)]
    lines += [*_context(points, command), *_left_out(now.left_out), ""]
    lines += [EXPLANATION.format(base=f"**{base}**"), ""]
    lines += [line for plot in plots for line in (f"![{Path(plot).stem.replace('-', ' ')}]({plot})", "")]
    variants = list(_by_variant(points))
    for load in dict.fromkeys(map(_load_of, table)):
        lines += _load_table([row for row in table if _load_of(row) == load], load, variants)
    lines += _generator_line(table)
    lines += _memory_table(points, table, base)
    lines += _work_table(points, probes_of(points, store.probes()))
    lines += _difference_tables(*differences(points, outputs_of(points, store.outputs())))
    lines += _errors(points)
    path = store.folder / REPORT
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def notes_of(folder: Path) -> list[str]:
    """The folder's notes, as lines to begin a report with."""
    notes = folder / NOTES
    return [notes.read_text(encoding="utf-8").strip(), ""] if notes.is_file() else []


def _load_of(row: Row) -> tuple[str, int, float, str]:
    return tuple(row.load[name] for name in ("workload", "prefix_tokens", "shared_share", "digest"))


def _context(points: list[dict[str, Any]], command: str) -> list[str]:
    first = min(point["time"] for point in points)
    lines = [
        f"- Machine: {points[0]['machine']}.",
        f"- Date: {time.strftime('%Y-%m-%d', time.gmtime(first))}. Command: `{command}`",
        f"- Code measured: {points[0]['code']} (digest of `sglang_m3` and `kernels`).",
    ]
    lines += [f"- {note}" for note in dict.fromkeys(point["model_note"] for point in points) if note]
    for variant, point in _by_variant(points).items():
        environment = " ".join(f"{name}={value}" for name, value in point["environment"].items())
        lines.append(f"- **{variant}**: `{environment} {shlex.join(point['flags'])}`".replace("` ", "`"))
    return lines


def _by_variant(points: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A point of each variant, in the order of the command."""
    found: dict[str, dict[str, Any]] = {}
    for point in in_order(points):
        found.setdefault(point["variant"], point)
    return found


def _left_out(reasons: dict[str, int]) -> list[str]:
    return [f"- Not shown: {count} points of this folder, {reason}." for reason, count in reasons.items()]


def _load_table(table: list[Row], load: tuple[str, int, float, str], variants: list[str]) -> list[str]:
    name, prefix_tokens, shared_share, _ = load
    lines = [
        f"## {name}, "
        + (f"prefix {prefix_tokens:,} tokens" if prefix_tokens else "no prefix")
        + (f", {shared_share:.0%} of it shared" if shared_share < 1 else "")
    ]
    lines += [
        "",
        "| at once | variant | requests (failed) | tokens/s | ratio | first token ms | ratio |"
        " per token ms | ratio | gap p50 / p95 / p99 ms | overlap | cached | pages saved | peak GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for concurrency in sorted({row.load["max_concurrency"] for row in table}):
        group = {row.variant: row for row in table if row.load["max_concurrency"] == concurrency}
        base = group.get(variants[0])
        for variant in variants:
            if variant in group:
                lines.append(_row_line(group[variant], base))
            else:
                lines.append(f"| {concurrency} | {variant} | not measured" + " |" * 12)
    return [*lines, ""]


def _generator_line(table: list[Row]) -> list[str]:
    """What the client itself took, at its worst."""

    known = [row for row in table if "client_core_share" in row.values]
    if not known:
        return []

    def most(measure: str) -> float:
        return max(row.values[measure].median for row in known)

    return [
        f"The load generator used at most {most('client_core_share'):.1%} of a core while it measured: "
        f"{most('client_cpu_us_per_event'):.0f} us of CPU per streamed token, or "
        f"{most('client_cpu_us_per_request'):,.0f} us per request with all its tokens "
        f"({most('client_cpu_us_per_request') / 1e4:.0%} of a core per 100 requests/s).",
        "",
    ]


def _memory_table(points: list[dict[str, Any]], table: list[Row], base: str) -> list[str]:
    variants = _by_variant(points)
    lines = [
        "## Memory",
        "",
        MEMORY,
        "",
        "| variant | weights GB | cache GB | tokens of cache | ratio | CUDA graphs GB | peak GB |",
        "|---|---|---|---|---|---|---|",
    ]
    first = variants[base].get("max_total_num_tokens")
    for variant, point in variants.items():
        held, tokens = point.get("server_memory_gb") or {}, point.get("max_total_num_tokens")
        graphs = sum((held.get("graph") or {}).values())
        peaks = [
            row.values["peak_memory_bytes"].median
            for row in table
            if row.variant == variant and "peak_memory_bytes" in row.values
        ]
        cells = [
            variant,
            _number(held.get("weight"), 2),
            _number(held.get("kvcache"), 2),
            _number(tokens, 0),
            f"{tokens / first:.2f}x" if tokens and first and variant != base else "",
            _number(graphs, 2),
            _number(max(peaks) / 1e9, 1) if peaks else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _work_table(points: list[dict[str, Any]], probes: list[dict[str, Any]]) -> list[str]:
    """What the layers did, where a variant could say."""
    if not probes:
        return []
    lines = [
        "## What the work was",
        "",
        WORK,
        "",
        "| variant | workload | prefix tokens | query tokens recorded | distinct blocks chosen | of visible "
        "| experts touched | in a decode step | of |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    known = {(probe["variant"], probe["digest"]): probe for probe in probes}
    loads = {(point["workload"], point["prefix_tokens"], point["digest"]) for point in points}
    for variant in _by_variant(points):
        for workload, prefix, digest in sorted(loads):
            probe = known.get((variant, digest))
            cells = [variant, workload, f"{prefix:,}"]
            if probe is None:
                cells += ["-"] * 6
            else:
                cells += [
                    f"{probe['tokens']:,}",
                    _spread(probe["distinct_blocks"]),
                    f"{probe['visible_blocks']:,}",
                    _spread(probe["experts_touched"]),
                    _spread(probe["experts_each_step"], 1),
                    str(probe["experts"]),
                ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _spread(spread: dict[str, float] | None, digits: int = 0) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{spread[name]:,.{digits}f}" for name in ("least", "median", "most"))


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _row_line(row: Row, base: Row | None) -> str:
    failed = f" (**{row.failed}**)" if row.failed else " (0)"
    start = f"| {row.load['max_concurrency']} | {row.variant} | {row.requests}{failed} "
    if not row.values:
        return start + "| every request failed" + " |" * 11

    def compared(measure: str, digits: int, more_is_better: bool = False) -> str:
        times = None
        if base is not None and row is not base:
            times = ratio(row, base, measure, more_is_better=more_is_better)
        shown = "" if times is None else f"{times:.2f}x"
        return f"| {_value(row.values[measure], digits)} | {shown} "

    gaps = " / ".join(f"{row.values[name].median:.1f}" for name in ("p50_itl_ms", "p95_itl_ms", "p99_itl_ms"))
    saved = "" if row.pages_saved_share is None else f"{row.pages_saved_share:.0%}"
    peak = row.values.get("peak_memory_bytes")
    return (
        start
        + compared("output_throughput", 1, more_is_better=True)
        + compared("median_ttft_ms", 1)
        + compared("median_tpot_ms", 2)
        + f"| {gaps} | {row.values['overlap'].median:.0%} | {row.values['cached_share'].median:.0%} "
        + f"| {saved} "
        + f"| {_number(peak and peak.median / 1e9, 1)} |"
    )


def _value(value: Value, digits: int) -> str:
    return f"{value.median:,.{digits}f}" + (f" ±{value.spread:.0%}" if value.spread is not None else "")


def _difference_tables(found: list[Difference], apart: list[NotCompared]) -> list[str]:
    if not found and not apart:
        return []
    lines = ["## Greedy outputs", ""]
    if found:
        lines += [
            "| | against | requests compared | different | first different token (median) |",
            "|---|---|---|---|---|",
        ]
    for item in found:
        first = "" if item.first_token is None else f"{item.first_token:.0f}"
        lines.append(f"| {item.left} | {item.right} | {item.compared} | {item.different} | {first} |")
    if found and apart:
        lines.append("")
    lines += [f"- {item.left} and {item.right} are not compared, {item.reason}." for item in apart]
    if any("dummy weights" in item.reason for item in apart):
        lines.append("- Dummy weights are drawn by the loader: SGLang's and the plugin's are not the same.")
    return [*lines, ""]


def _errors(points: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"- {point['variant']}, {point['workload']} at {point['max_concurrency']}: {count} x `{error}`"
        for point in points
        for error, count in point["errors"].items()
    ]
    return ["## Failures", "", *lines, ""] if lines else []
