"""A profile's file, and the Markdown and the plot that are made from it."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench_serving.breakdown import Breakdown
from bench_serving.report import notes_of
from bench_serving.step_parts import (
    ANONYMOUS,
    GAPS,
    GRAPH_GAPS,
    OTHER,
    PART_NAMES,
    part_of,
    without_parameters,
)

FILE = "breakdown.json"
REPORT = "README.md"
PLOT = "step-parts.png"
STAGES = ("EXTEND", "DECODE")
SHOWN_KERNELS = 20
LISTED_KERNELS = 30
SHOWN_CHARACTERS = 90

Found = dict[str, dict[str, Breakdown]]
"""Variant -> stage (`STAGES`) -> its median step."""


@dataclass(frozen=True)
class Profile:
    """What was profiled.

    Attributes:
        machine: hardware and versions, in one line.
        date: of the profile, as YYYY-MM-DD.
        notes: what must be said about the model.
        lacking: what could not be profiled, and why.
        found: all else.
    """

    machine: str
    date: str
    command: str
    notes: tuple[str, ...]
    lacking: tuple[str, ...]
    found: Found

    def save(self, folder: Path) -> None:
        """Write `FILE` into `folder`."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Profile:
        """Read what `save` wrote. Kernels are told apart as now, whatever was known of their names then."""
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found = {
            name: {stage: _sorted_again(Breakdown(**one)) for stage, one in stages.items()}
            for name, stages in content.pop("found").items()
        }
        notes, lacking = (tuple(content.pop(name)) for name in ("notes", "lacking"))
        return cls(**content, notes=notes, lacking=lacking, found=found)


def _sorted_again(one: Breakdown) -> Breakdown:
    parts = Counter({name: one.parts[name] for name in (GRAPH_GAPS, GAPS) if name in one.parts})
    for kernel, microseconds in one.kernels.items():
        parts[part_of(kernel)] += microseconds
    return replace(one, parts={name: parts[name] for name in PART_NAMES if parts[name]})


def write(folder: Path) -> str:
    """Write the Markdown and, with matplotlib, the plot of a folder's `FILE`; returns the Markdown."""
    profile = Profile.load(folder)
    plotted = bool(profile.found) and draw(profile, folder / PLOT)
    text = report(profile, begin=notes_of(folder), plot=PLOT if plotted else None)
    (folder / REPORT).write_text(text, encoding="utf-8")
    return text


def report(profile: Profile, *, begin: Sequence[str] = (), plot: str | None = None) -> str:
    """The Markdown of a profile, from `begin` on: a table of parts per stage, and the longest kernels."""
    found = profile.found
    lines = [
        "# Where a step's time goes",
        "",
        *begin,
        f"- Machine: {profile.machine}.",
        f"- Date: {profile.date}. Command: `{profile.command}`",
        *(f"- {note}" for note in profile.notes),
        *(f"- **Not profiled**: {reason}" for reason in profile.lacking),
        "- From PyTorch's profiler, whose own cost per launch lengthens the host's time, and gaps outside "
        "CUDA graphs.",
        f"- *{GAPS}*: between a step's first and last kernel, when none ran: the GPU waited for the host. "
        f"*{GRAPH_GAPS}*: between kernels of one graph, where it waits for nobody. "
        "*host*: the host's time in the step. *between steps*: from a decode step's last kernel to the next "
        "one's first: sampling, scheduling. *launches*: kernels, copies and whole graphs that the host put "
        "on the GPU for a step.",
        "- A kernel's part is known by its name: a product of cuBLAS is one of *linears*, also a router's or "
        f"a shared expert's. What *{OTHER}* holds is listed.",
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
        row(part, lambda one, part=part: _milliseconds(one.parts.get(part, 0.0)))
        for part in PART_NAMES
        if any(part in one.parts for one in ones.values())
    ]
    lines.append(row("**step**", lambda one: f"**{_milliseconds(one.microseconds)}**"))
    first, base = next(iter(ones.items()))
    if len(ones) > 1:

        def ratio(one: Breakdown) -> str:
            return "" if one is base else f"{base.microseconds / one.microseconds:.2f}x"

        lines.append(row(f"speed against {first}", ratio))
    on_gpu = any(one.launches for one in ones.values())
    if any(one.between_microseconds is not None for one in ones.values()):
        lines.append(row("between steps", lambda one: _milliseconds(one.between_microseconds or 0.0)))
        if on_gpu:
            lines.append(
                row("of it kernels ran", lambda one: _milliseconds(sum(one.between_kernels.values())))
            )
    lines.append(row("host", lambda one: _milliseconds(one.host_microseconds)))
    if on_gpu:
        lines.append(row("kernels and copies", lambda one: f"{one.ran:g}"))
        lines.append(row("launches", lambda one: f"{one.launches:g}"))
    lines += [row("launch-bound share", lambda one: f"{one.launch_bound_share:.0%}"), ""]
    for name, one in ones.items():
        lines += [
            f"{name}, longest of {one.steps} steps' kernels:",
            "",
            "| ms | part | kernel |",
            "|---|---|---|",
        ]
        for (part, kernel), microseconds in list(_shown(one.kernels).items())[:SHOWN_KERNELS]:
            lines.append(f"| {_milliseconds(microseconds)} | {part} | {kernel} |")
        lines.append("")
        others = {kernel: value for kernel, value in one.kernels.items() if part_of(kernel) == OTHER}
        for title, listed in ((f"*{OTHER}*", others), ("*between steps*", one.between_kernels)):
            if listed:
                lines += [f"{name}, {title}: {_list(listed)}.", ""]
    return lines


def _milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3f}"


def _shown(kernels: dict[str, float]) -> dict[tuple[str, str], float]:
    """Parts and names in a table, longest first: without parameters and what makes tables end, and cut. Those
    that look alike then are one."""
    found: Counter[tuple[str, str]] = Counter()
    for kernel, microseconds in kernels.items():
        name = without_parameters(kernel).replace(f"{ANONYMOUS}::", "").replace("|", "/").replace("`", "'")
        found[part_of(kernel), f"`{name[:SHOWN_CHARACTERS]}`"] += microseconds
    return dict(found.most_common())


def _list(kernels: dict[str, float]) -> str:
    """Names with milliseconds, longest first; of very many the rest as one number."""
    every = list(_shown(kernels).items())
    shown = [f"{name} {_milliseconds(value)}" for (_, name), value in every[:LISTED_KERNELS]]
    rest = [value for _, value in every[LISTED_KERNELS:]]
    return ", ".join([*shown, *([f"{len(rest)} more {_milliseconds(sum(rest))}"] if rest else [])])


def _title(one: Breakdown) -> str:
    what = f"{one.tokens} new tokens" if one.tokens else f"{one.requests} requests"
    return f"{one.stage.lower()} step, {what}"


def draw(profile: Profile, path: Path) -> bool:
    """Stacked bars, one per variant and stage; False without matplotlib."""
    found = profile.found
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [stage for stage in STAGES if any(stage in stages for stages in found.values())]
    figure, panels = pyplot.subplots(
        1, len(shown), figsize=(2 + 4 * len(shown), 5), layout="constrained", squeeze=False
    )
    colours = {part: f"C{index}" for index, part in enumerate(PART_NAMES[:-2])}
    colours |= {GRAPH_GAPS: "#444444", GAPS: "lightgray"}
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
            axes.annotate(f"{total:.3g}", (place, total), ha="center", va="bottom")
    legend = {part: patch for axes in panels[0] for patch, part in zip(*axes.get_legend_handles_labels())}
    figure.suptitle("Where a forward step's time goes")
    # From the top, as they are stacked.
    shown_parts = [part for part in reversed(PART_NAMES) if part in legend]
    figure.legend(map(legend.get, shown_parts), shown_parts, loc="outside right upper", fontsize=8)
    figure.supxlabel(f"{profile.machine}. {profile.date}.", fontsize=7, color="dimgray", x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
