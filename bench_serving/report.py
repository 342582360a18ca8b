"""A comparison's Markdown: tables of what `points.jsonl` holds, and how it was measured."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_serving.store import Store, latest
from bench_serving.summary import Difference, Row, Value, differences, ratio, rows

REPORT = "README.md"

EXPLANATION = """\
- Medians over the repeats of a load; ± is (largest - smallest) / median over them, nothing for a single
  one. Ratios are against the first variant, above 1 is better.
- *first token* and *per token* are medians over the requests of a run (time to first token; time per output
  token after it), *gap* is the time between tokens, all in milliseconds, seen by the client.
- *overlap* is the part of the prompts' tokens that an earlier request or the warmed prefix holds too, in
  whole pages; *cached* is what the server took from its cache; *pages saved* is the part of index page
  loads that sharing made unnecessary.
- A failed request is counted in *failed* and in nothing else. Greedy requests, end-of-sequence ignored."""


def write(store: Store, *, title: str, command: str, plots: Sequence[str] = ()) -> Path:
    """Write the report beside the points and return its path.

    Raises:
        FileNotFoundError: there are no points.
    """
    points = latest(store.points())
    if not points:
        raise FileNotFoundError(f"no points in {store.folder}; measure first")
    table = rows(points)
    lines = [f"# {title}", "", *_context(points, command), "", EXPLANATION, ""]
    lines += [line for plot in plots for line in (f"![{Path(plot).stem.replace('-', ' ')}]({plot})", "")]
    loads = dict.fromkeys(
        (row.load["workload"], row.load["prefix_tokens"], row.load["shared_share"]) for row in table
    )
    for load in loads:
        lines += _load_table([row for row in table if _load_name(row) == load], load)
    lines += _difference_table(differences(points, store.outputs()))
    lines += _errors(points)
    path = store.folder / REPORT
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return path


def _load_name(row: Row) -> tuple[str, int, float]:
    return row.load["workload"], row.load["prefix_tokens"], row.load["shared_share"]


def _context(points: list[dict[str, Any]], command: str) -> list[str]:
    first = min(point["time"] for point in points)
    lines = [f"- Machine: {machine}." for machine in dict.fromkeys(point["machine"] for point in points)]
    lines += [f"- Date: {time.strftime('%Y-%m-%d', time.gmtime(first))}. Command: `{command}`"]
    lines += [
        f"- Code measured: {code} (digest of `sglang_m3` and `kernels`)."
        for code in dict.fromkeys(point["code"] for point in points)
    ]
    lines += [f"- {note}" for note in dict.fromkeys(point["model_note"] for point in points) if note]
    for variant in dict.fromkeys(point["variant"] for point in points):
        point = next(point for point in points if point["variant"] == variant)
        environment = " ".join(f"{name}={value}" for name, value in point["environment"].items())
        flags = shlex.join(point["flags"])
        memory = point.get("server_memory_gb") or {}
        names = {"weight": "weights", "kvcache": "cache"}
        held = ", ".join(f"{name} {memory[part]} GB" for part, name in names.items() if part in memory)
        tokens = f"{point.get('max_total_num_tokens')} tokens of cache"
        how = f"{environment} {flags}".strip()
        lines.append(f"- **{variant}**: `{how}`; {tokens}" + (f" ({held})" if held else ""))
    return lines


def _load_table(table: list[Row], load: tuple[str, int, float]) -> list[str]:
    name, prefix_tokens, shared_share = load
    lines = [
        f"## {name}, prefix {prefix_tokens:,} tokens"
        + (f", {shared_share:.0%} of it shared" if shared_share < 1 else "")
    ]
    lines += [
        "",
        "| at once | variant | requests (failed) | tokens/s | ratio | first token ms | ratio |"
        " per token ms | ratio | gap p50 / p95 / p99 ms | overlap | cached | pages saved | peak GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for concurrency in sorted({row.load["max_concurrency"] for row in table}):
        group = [row for row in table if row.load["max_concurrency"] == concurrency]
        lines += [_row_line(row, group[0]) for row in group]
    worst = max(
        (row.values["client_cpu_percent_per_100_requests_per_s"].median for row in table if row.values),
        default=0,
    )
    return [*lines, "", f"The load generator used up to {worst:.0f}% of a core per 100 requests/s.", ""]


def _row_line(row: Row, base: Row) -> str:
    failed = f" (**{row.failed}**)" if row.failed else " (0)"
    start = f"| {row.load['max_concurrency']} | {row.variant} | {row.requests}{failed} "
    if not row.values:
        return start + "| every request failed" + " |" * 11

    def compared(measure: str, digits: int, more_is_better: bool = False) -> str:
        times = ratio(row, base, measure, more_is_better=more_is_better)
        shown = "" if row is base or times is None else f"{times:.2f}x"
        return f"| {_value(row.values[measure], digits)} | {shown} "

    gaps = " / ".join(f"{row.values[name].median:.1f}" for name in ("p50_itl_ms", "p95_itl_ms", "p99_itl_ms"))
    saved = "" if row.pages_saved_share is None else f"{row.pages_saved_share:.0%}"
    return (
        start
        + compared("output_throughput", 1, more_is_better=True)
        + compared("median_ttft_ms", 1)
        + compared("median_tpot_ms", 2)
        + f"| {gaps} | {row.values['overlap'].median:.0%} | {row.values['cached_share'].median:.0%} "
        + f"| {saved} "
        + f"| {row.values['peak_memory_bytes'].median / 1e9:.1f} |"
    )


def _value(value: Value, digits: int) -> str:
    return f"{value.median:,.{digits}f}" + (f" ±{value.spread:.0%}" if value.spread is not None else "")


def _difference_table(found: list[Difference]) -> list[str]:
    if not found:
        return ["No two runs hold the same weights and requests, so no outputs are compared.", ""]
    lines = [
        "## Greedy outputs",
        "",
        "| | against | requests compared | different | first different token (median) |",
        "|---|---|---|---|---|",
    ]
    for item in found:
        first = "" if item.first_token is None else f"{item.first_token:.0f}"
        lines.append(f"| {item.left} | {item.right} | {item.compared} | {item.different} | {first} |")
    return [*lines, ""]


def _errors(points: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"- {point['variant']}, {point['workload']} at {point['max_concurrency']}: {count} x `{error}`"
        for point in points
        for error, count in point["errors"].items()
    ]
    return ["## Failures", "", *lines, ""] if lines else []
