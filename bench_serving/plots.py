"""A comparison's plots, readable without its text. Needs matplotlib; measuring does not."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_serving.store import Store, current
from bench_serving.summary import Row, rows

LATENCY = "latency-against-throughput.png"
FIRST_TOKEN = "first-token-against-prefix.png"
SHARING = "token-time-against-sharing.png"

NAMED = {
    "workload": lambda value: str(value),
    "prefix_tokens": lambda value: f"prefix {value:,} tokens",
    "shared_share": lambda value: f"{value:.0%} of the prefix shared",
    "max_concurrency": lambda value: f"{value} in flight",
    "digest": lambda value: f"load {value}",
}
"""What curves of one variant may differ in, in words."""
LINES, MARKERS = ("-", "--", ":", "-."), "os^Dv<>P"
INSIDE_LEGEND = 4
"""More curves get a legend beside the plot."""
CAPTION_CHARACTERS = 130


@dataclass(frozen=True)
class Axis:
    """What is drawn along an axis, in words and from a row."""

    name: str
    value: Callable[[Row], float]


THROUGHPUT = Axis(
    "output throughput (tokens/s; right is better)", lambda row: row.values["output_throughput"].median
)
TOKEN_TIME = Axis(
    "time per output token (ms, median; lower is better)", lambda row: row.values["median_tpot_ms"].median
)
TTFT = Axis(
    "time to first token (ms, median; lower is better)", lambda row: row.values["median_ttft_ms"].median
)
PREFIX = Axis("cached prefix (tokens)", lambda row: row.load["prefix_tokens"])
OVERLAP = Axis("prompt tokens shared with other requests (%)", lambda row: 100 * row.values["overlap"].median)


@dataclass(frozen=True)
class Plot:
    """A plot of a sweep.

    Attributes:
        along: the field of the load that changes along a curve; a curve needs two values of it.
        apart: fields of the load that make curves of their own, besides the variant.
        marked: whether points say their value of `along`.
    """

    file: str
    title: str
    x: Axis
    y: Axis
    along: str
    apart: tuple[str, ...]
    marked: bool = False


PLOTS = (
    Plot(
        LATENCY,
        "Latency against throughput; numbers at points: sessions in flight",
        THROUGHPUT,
        TOKEN_TIME,
        "max_concurrency",
        ("workload", "prefix_tokens", "shared_share", "digest"),
        marked=True,
    ),
    Plot(
        FIRST_TOKEN,
        "Time to first token against the length of the cached prefix",
        PREFIX,
        TTFT,
        "prefix_tokens",
        ("workload", "max_concurrency", "shared_share"),
    ),
    Plot(
        SHARING,
        "Time per output token against how much of the prompts is shared",
        OVERLAP,
        TOKEN_TIME,
        "shared_share",
        ("workload", "max_concurrency", "prefix_tokens"),
    ),
)


def write(store: Store) -> list[str]:
    """Draw every plot that the points of now (`store.current`) have a sweep for; returns the file names."""
    import matplotlib

    matplotlib.use("Agg")
    points = current(store.points()).points
    table = [row for row in rows(points) if row.values]
    return [plot.file for plot in PLOTS if _draw(plot, table, store.folder / plot.file, caption(points))]


def caption(points: Sequence[dict[str, Any]]) -> str:
    """Machine, date, and what is particular about the model."""
    if not points:
        return ""
    date = time.strftime("%Y-%m-%d", time.gmtime(min(point["time"] for point in points)))
    notes = dict.fromkeys(point["model_note"] for point in points if point["model_note"])
    text = " ".join([f"{points[0]['machine']}. {date}.", *notes])
    return "\n".join(textwrap.wrap(text, CAPTION_CHARACTERS))


def _draw(plot: Plot, table: Sequence[Row], path: Path, caption: str) -> bool:
    """Draw the curves, if there are any: one colour per variant, one line and marker per load."""
    curves = _curves(plot, table)
    if not curves:
        return False
    from matplotlib import pyplot

    loads = list(dict.fromkeys(load for _, load in curves))
    variants = list(dict.fromkeys(variant for variant, _ in curves))
    common = _common(plot.apart, loads)
    crowded = len(curves) > INSIDE_LEGEND
    figure, axes = pyplot.subplots(figsize=(11.5 if crowded else 8, 5.4), layout="constrained")
    for (variant, load), members in curves.items():
        place = loads.index(load)
        differs = [
            NAMED[field](value) for field, value in zip(plot.apart, load, strict=True) if field not in common
        ]
        colour = f"C{variants.index(variant)}"
        x, y = ([axis.value(row) for row in members] for axis in (plot.x, plot.y))
        style = LINES[place % len(LINES)] + MARKERS[place % len(MARKERS)]
        axes.plot(x, y, style, color=colour, label=", ".join([variant, *differs]))
        if plot.marked:
            for row, left, up in zip(members, x, y):
                # Below the curve: above it is where other variants' curves tend to be.
                axes.annotate(
                    str(row.load[plot.along]),
                    (left, up),
                    textcoords="offset points",
                    xytext=(4, -12),
                    color=colour,
                )
    shared = dict(zip(plot.apart, loads[0], strict=True))
    subject = ", ".join(
        NAMED[field](shared[field]) for field in common if _worth_saying(field, shared[field])
    )
    axes.set(title=f"{plot.title}\n{subject}", xlabel=plot.x.name, ylabel=plot.y.name)
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if crowded:
        figure.legend(loc="outside right upper", fontsize=8)
    else:
        axes.legend()
    figure.supxlabel(caption, fontsize=7, color="dimgray", x=0.01, ha="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _common(fields: Sequence[str], loads: Sequence[tuple[Any, ...]]) -> list[str]:
    """Fields in which the loads do not differ, and the digest where the others tell them apart."""
    common = [field for place, field in enumerate(fields) if len({load[place] for load in loads}) == 1]
    if "digest" in fields and "digest" not in common:
        place = fields.index("digest")
        if len({(*load[:place], *load[place + 1 :]) for load in loads}) == len(loads):
            common.append("digest")
    return common


def _worth_saying(field: str, value: Any) -> bool:
    """Whether what all curves share belongs into the title; a wholly shared prefix is the usual one."""
    return field != "digest" and (field, value) != ("shared_share", 1.0)


def _curves(plot: Plot, table: Sequence[Row]) -> dict[tuple[str, tuple[Any, ...]], list[Row]]:
    """Rows by variant and load, ordered along the curve; curves of one point are none."""
    found: dict[tuple[str, tuple[Any, ...]], list[Row]] = {}
    for row in table:
        load = tuple(row.load[field] for field in plot.apart)
        found.setdefault((row.variant, load), []).append(row)
    return {
        key: sorted(members, key=lambda row: row.load[plot.along])
        for key, members in found.items()
        if len({row.load[plot.along] for row in members}) > 1
    }
