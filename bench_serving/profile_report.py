"""A profile's Markdown and plot."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_serving.breakdown import Breakdown
from bench_serving.machine import machine
from bench_serving.step_parts import GAPS, PART_NAMES, part_of

STAGES = ("EXTEND", "DECODE")
SHOWN_KERNELS = 15

Found = dict[str, dict[str, Breakdown]]
"""Variant -> stage (`STAGES`) -> its median step."""


def report(
    found: Found,
    *,
    command: str,
    notes: Sequence[str] = (),
    lacking: Sequence[str] = (),
    plot: str | None = None,
) -> str:
    """The Markdown of a profile: a table of parts for each stage, and the longest kernels."""
    lines = [
        "# Where a step's time goes",
        "",
        f"- Machine: {machine()}.",
        f"- Date: {time.strftime('%Y-%m-%d', time.gmtime())}. Command: `{command}`",
        *(f"- {note}" for note in notes),
        *(f"- **Not profiled**: {reason}" for reason in lacking),
        "- From PyTorch's profiler, whose own cost per launch lengthens the host's time, and gaps outside "
        "CUDA graphs.",
        f"- *{GAPS}*: between a step's first and last kernel, when none ran: the GPU waited for the host. "
        "*host*: the host's time in the step. *between steps*: from a decode step's last kernel to the next "
        "one's first: sampling, scheduling.",
        "",
    ]
    if plot:
        lines += [f"![parts of a step by variant]({plot})", ""]
    for stage in STAGES:
        ones = {name: stages[stage] for name, stages in found.items() if stage in stages}
        if ones:
            lines += _stage_lines(ones)
    return "\n".join(lines).rstrip() + "\n"


def _stage_lines(ones: dict[str, Breakdown]) -> list[str]:
    """One stage of every variant that has it."""

    def row(title: str, shown: Callable[[Breakdown], str]) -> str:
        return f"| {title} | {' | '.join(map(shown, ones.values()))} |"

    lines = [
        f"## {_title(next(iter(ones.values())))}",
        "",
        f"| ms | {' | '.join(ones)} |",
        "|---|" + "---|" * len(ones),
    ]
    lines += [
        row(part, lambda one, part=part: f"{one.parts.get(part, 0.0) / 1e3:.2f}")
        for part in PART_NAMES
        if any(part in one.parts for one in ones.values())
    ]
    lines.append(row("**step**", lambda one: f"**{one.microseconds / 1e3:.2f}**"))
    if any(one.between_microseconds is not None for one in ones.values()):
        lines.append(row("between steps", lambda one: f"{(one.between_microseconds or 0.0) / 1e3:.2f}"))
    lines += [
        row("host", lambda one: f"{one.host_microseconds / 1e3:.2f}"),
        row("launches", lambda one: f"{one.launches:g}"),
        row("launch-bound share", lambda one: f"{one.launch_bound_share:.0%}"),
        "",
    ]
    for name, one in ones.items():
        lines += [
            f"{name}, longest of {one.steps} steps' kernels:",
            "",
            "| ms | part | kernel |",
            "|---|---|---|",
        ]
        for kernel, microseconds in list(one.kernels.items())[:SHOWN_KERNELS]:
            shown = kernel.replace("|", "/")[:80]
            lines.append(f"| {microseconds / 1e3:.3f} | {part_of(kernel)} | `{shown}` |")
        lines.append("")
    return lines


def _title(one: Breakdown) -> str:
    what = f"{one.tokens} new tokens" if one.tokens else f"{one.requests} requests"
    return f"{one.stage.lower()} step, {what}"


def draw(found: Found, path: Path) -> bool:
    """Stacked bars, one per variant and stage; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [stage for stage in STAGES if any(stage in stages for stages in found.values())]
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(2 + 4 * len(shown), 5), layout="constrained", squeeze=False
    )
    colours = {part: f"C{index}" for index, part in enumerate(PART_NAMES[:-1])} | {GAPS: "lightgray"}
    for axes, stage in zip(panels[0], shown):
        ones = {name: stages[stage] for name, stages in found.items() if stage in stages}
        bottom = [0.0] * len(ones)
        for part in PART_NAMES:
            heights = [one.parts.get(part, 0.0) / 1e3 for one in ones.values()]
            if any(heights):
                axes.bar(list(ones), heights, bottom=bottom, label=part, color=colours[part])
                bottom = [low + height for low, height in zip(bottom, heights)]
        axes.set(title=_title(next(iter(ones.values()))), ylabel="ms on the GPU, or waiting for the host")
        for place, total in enumerate(bottom):
            axes.annotate(f"{total:.1f}", (place, total), ha="center", va="bottom")
    legend = {part: patch for axes in panels[0] for patch, part in zip(*axes.get_legend_handles_labels())}
    figure.suptitle("Where a forward step's time goes")
    # From the top, as they are stacked.
    shown_parts = [part for part in reversed(PART_NAMES) if part in legend]
    figure.legend(map(legend.get, shown_parts), shown_parts, loc="outside right upper", fontsize=8)
    figure.supxlabel(machine(), fontsize=7, color="dimgray", x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
