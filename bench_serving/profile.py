"""Where a step's time goes, by variant: traces a decode and an extend step and splits them."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_serving import breakdown, client, server
from bench_serving.breakdown import Breakdown
from bench_serving.corpus import Corpus
from bench_serving.machine import machine
from bench_serving.measure import Load, warm_prefixes, warm_up
from bench_serving.server import Variant
from bench_serving.store import model_note
from bench_serving.workload import PrefixLevel, Traffic, Workload

TRACE_LIMIT_SECONDS = 300
SETTLING_STEPS = 2
SHOWN_KERNELS = 15
PLOT = "step-parts.png"


@dataclass(frozen=True)
class Subject:
    """A server to profile: a name, its model folder, and what has it up while it is profiled."""

    variant: Variant
    serve: Callable[[], AbstractContextManager[str]]


def started(variants: Sequence[Variant], folder: Path) -> list[Subject]:
    """Variants, each started for its turn; their logs go to `folder`."""
    return [
        Subject(variant, functools.partial(server.started, variant, folder / f"{variant.name}.log"))
        for variant in variants
    ]


def running(url: str) -> list[Subject]:
    """A server that is up and stays up."""
    variant = Variant("server", (), ("--model-path", server.info(url)["model_path"]))
    return [Subject(variant, functools.partial(nullcontext, url))]


def main(chosen: argparse.Namespace, subjects: Sequence[Subject], corpus_of: Callable[[str], Corpus]) -> int:
    """Profile every server and write `breakdown.json`, `README.md` and, with matplotlib, the plot."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    corpus = corpus_of(subjects[0].variant.flag("--model-path"))
    found: dict[str, list[Breakdown]] = {}
    for subject in subjects:
        name = subject.variant.name
        with subject.serve() as url:
            found[name] = _profile(url, chosen, corpus, chosen.out / f"traces-{name}")
    raw = {name: [asdict(stage) for stage in stages] for name, stages in found.items()}
    (chosen.out / "breakdown.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    plotted = _plot(found, chosen.out / PLOT)
    notes = list(dict.fromkeys(filter(None, (model_note(subject.variant) for subject in subjects))))
    text = report(found, command=chosen.command_line, notes=notes, plot=PLOT if plotted else None)
    (chosen.out / "README.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _profile(url: str, chosen: argparse.Namespace, corpus: Corpus, folder: Path) -> list[Breakdown]:
    """Extend steps of one request each, then decode steps of `chosen.concurrency` requests."""

    def load(output_tokens: int) -> Load:
        traffic = Traffic((chosen.new_tokens, chosen.new_tokens), (output_tokens, output_tokens))
        prefix = (PrefixLevel(chosen.prefix_tokens),)
        return Load.of(Workload("profile", "", (1,), (traffic,), prefix), corpus, chosen.seed)

    extend, decode = load(1), load(chosen.steps + 4 * SETTLING_STEPS)
    warm_prefixes(url, extend)
    warm_up(url, extend, 1)
    warm_up(url, decode, chosen.concurrency)
    made = []
    for one, concurrency, count in (
        (extend, 1, chosen.steps),
        (decode, chosen.concurrency, chosen.concurrency),
    ):
        trace = _trace(url, one, concurrency, count, folder)
        taken = breakdown.steps(breakdown.read(trace))
        if one is extend:
            wanted = [
                step for step in taken if step.stage == "EXTEND" and step.tokens >= chosen.new_tokens // 2
            ]
        else:
            wanted = [step for step in taken if step.stage == "DECODE" and step.requests == concurrency]
            wanted = wanted[SETTLING_STEPS:]
        if not wanted:
            seen = sorted({(step.stage, step.requests, step.tokens) for step in taken})
            raise RuntimeError(f"{trace} holds no step of the wanted kind, only {seen}")
        made.append(breakdown.summarise(wanted, back_to_back=one is decode))
    return made


def _trace(url: str, load: Load, concurrency: int, count: int, folder: Path) -> Path:
    """Serve the load under SGLang's profiler and return the trace file of the first rank."""
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.glob("*.trace.json.gz"))
    body = {"output_dir": str(folder.absolute()), "activities": ["CPU", "GPU"], "with_stack": False}
    server.post(url, "/start_profile", body)
    driven = client.drive(url, load.sessions(concurrency, "profile", count=count), concurrency)
    server.post(url, "/stop_profile")
    failed = [exchange.output.error for exchange in driven.exchanges if not exchange.output.success]
    if failed:
        raise RuntimeError(f"a profiled request failed: {failed[0]}")
    begin = time.monotonic()
    while time.monotonic() - begin < TRACE_LIMIT_SECONDS:
        new = sorted(set(folder.glob("*.trace.json.gz")) - before)
        if new and _complete(new[0]):
            return new[0]
        time.sleep(0.5)
    raise RuntimeError(f"the server wrote no trace into {folder} within {TRACE_LIMIT_SECONDS} s")


def _complete(path: Path) -> bool:
    """Whether the file has stopped growing."""
    size = path.stat().st_size
    time.sleep(1.0)
    return size > 0 and path.stat().st_size == size


def report(
    found: dict[str, list[Breakdown]], *, command: str, notes: Sequence[str] = (), plot: str | None = None
) -> str:
    """The Markdown of a profile: a table of parts for each stage, and the longest kernels."""
    lines = [
        "# Where a step's time goes",
        "",
        f"- Machine: {machine()}.",
        f"- Date: {time.strftime('%Y-%m-%d', time.gmtime())}. Command: `{command}`",
        *(f"- {note}" for note in notes),
        "- From PyTorch's profiler, whose own cost per launch lengthens gaps outside CUDA graphs.",
        f"- *{breakdown.GAPS}*: between a step's first and last kernel, when none ran. *between steps*: from "
        "a decode step's last kernel to the next one's first: sampling, scheduling.",
        "",
    ]
    if plot:
        lines += [f"![parts of a step by variant]({plot})", ""]
    stages = list(zip(*found.values()))
    for stage in stages:
        first = stage[0]
        what = f"{first.tokens} new tokens" if first.tokens else f"{first.requests} requests"
        lines += [
            f"## {first.stage.lower()}, {what}",
            "",
            f"| ms | {' | '.join(found)} |",
            "|---|" + "---|" * len(found),
        ]
        for part in breakdown.PART_NAMES:
            if any(part in one.parts for one in stage):
                cells = " | ".join(f"{one.parts.get(part, 0.0) / 1e3:.2f}" for one in stage)
                lines.append(f"| {part} | {cells} |")
        lines.append(
            "| **step** | " + " | ".join(f"**{one.microseconds / 1e3:.2f}**" for one in stage) + " |"
        )
        if any(one.between_microseconds is not None for one in stage):
            cells = " | ".join(f"{(one.between_microseconds or 0.0) / 1e3:.2f}" for one in stage)
            lines.append(f"| between steps | {cells} |")
        lines.append("")
        for name, one in zip(found, stage):
            lines += [
                f"{name}, longest of {one.steps} steps' kernels:",
                "",
                "| ms | part | kernel |",
                "|---|---|---|",
            ]
            for kernel, microseconds in list(one.kernels.items())[:SHOWN_KERNELS]:
                shown = kernel.replace("|", "/")[:80]
                lines.append(f"| {microseconds / 1e3:.3f} | {breakdown.part_of(kernel)} | `{shown}` |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _plot(found: dict[str, list[Breakdown]], path: Path) -> bool:
    """Stacked bars, one per variant and stage; False without matplotlib."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = list(zip(*found.values()))
    figure, panels = pyplot.subplots(
        1, len(stages), figsize=(5 * len(stages), 5), layout="constrained", squeeze=False
    )
    colours = {part: f"C{index}" for index, part in enumerate(breakdown.PART_NAMES[:-1])} | {
        breakdown.GAPS: "lightgray"
    }
    for axes, stage in zip(panels[0], stages):
        bottom = [0.0] * len(stage)
        for part in breakdown.PART_NAMES:
            heights = [one.parts.get(part, 0.0) / 1e3 for one in stage]
            if any(heights):
                axes.bar(list(found), heights, bottom=bottom, label=part, color=colours[part])
                bottom = [low + height for low, height in zip(bottom, heights)]
        what = f"{stage[0].tokens} new tokens" if stage[0].tokens else f"{stage[0].requests} requests"
        axes.set(title=f"{stage[0].stage.lower()} step, {what}", ylabel="ms")
        for place, total in enumerate(bottom):
            axes.annotate(f"{total:.1f}", (place, total), ha="center", va="bottom")
    legend = {part: patch for axes in panels[0] for patch, part in zip(*axes.get_legend_handles_labels())}
    figure.legend(legend.values(), legend.keys(), loc="outside right upper", fontsize=8)
    figure.text(0.01, -0.02, machine(), fontsize=7, color="dimgray")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return True
