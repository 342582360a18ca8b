"""A comparison's plots. Needs matplotlib; measuring does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_serving.store import Store, latest
from bench_serving.summary import Row, rows

LATENCY = "latency-against-throughput.png"
FIRST_TOKEN = "first-token-against-prefix.png"
SHARING = "token-time-against-sharing.png"


def write(store: Store) -> list[str]:
    """Draw every plot that the points have enough of; returns their file names.

    Latency against throughput takes two concurrencies of a workload, time to first token two prefix lengths,
    time per output token two overlaps, at the same concurrency.
    """
    import matplotlib

    matplotlib.use("Agg")
    points = latest(store.points())
    table = [row for row in rows(points) if row.values]
    machine = " / ".join(dict.fromkeys(point["machine"] for point in points))
    made = []
    for name, draw in ((LATENCY, _latency), (FIRST_TOKEN, _first_token), (SHARING, _sharing)):
        if draw(table, store.folder / name, machine):
            made.append(name)
    return made


def _latency(table: list[Row], path: Path, machine: str) -> bool:
    """Tokens per second of all requests against time per output token, one curve per variant and load."""
    curves = _curves(
        table,
        _by("workload", "prefix_tokens", "shared_share"),
        lambda row: row.load["max_concurrency"],
    )
    return _draw(
        curves,
        path,
        machine,
        title="Latency against throughput; numbers are requests in flight",
        x=("output throughput (tokens/s)", lambda row: row.values["output_throughput"].median),
        y=("time per output token (ms, median)", lambda row: row.values["median_tpot_ms"].median),
        mark=lambda row: str(row.load["max_concurrency"]),
        label=lambda key: f"{key[0]}, {key[1]}",
    )


def _first_token(table: list[Row], path: Path, machine: str) -> bool:
    curves = _curves(
        table,
        _by("workload", "max_concurrency", "shared_share"),
        lambda row: row.load["prefix_tokens"],
    )
    return _draw(
        curves,
        path,
        machine,
        title="Time to first token against the length of the cached prefix",
        x=("prefix (tokens)", lambda row: row.load["prefix_tokens"]),
        y=("time to first token (ms, median)", lambda row: row.values["median_ttft_ms"].median),
        mark=lambda row: "",
        label=lambda key: f"{key[0]}, {key[2]} in flight",
    )


def _sharing(table: list[Row], path: Path, machine: str) -> bool:
    curves = _curves(
        table,
        _by("workload", "max_concurrency", "prefix_tokens"),
        lambda row: row.load["shared_share"],
    )
    return _draw(
        curves,
        path,
        machine,
        title="Time per output token against how much of the prompts is shared",
        x=("prompt tokens shared with other requests (%)", lambda row: 100 * row.values["overlap"].median),
        y=("time per output token (ms, median)", lambda row: row.values["median_tpot_ms"].median),
        mark=lambda row: "",
        label=lambda key: f"{key[0]}, {key[2]} in flight",
    )


def _by(*names: str) -> Callable[[Row], tuple[Any, ...]]:
    """Curves that differ in the variant or in one of these fields of the load."""
    return lambda row: (row.variant, *(row.load[name] for name in names))


def _curves(
    table: list[Row], curve: Callable[[Row], tuple[Any, ...]], step: Callable[[Row], float]
) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by curve, ordered along it; curves of one point are none."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in table:
        found.setdefault(curve(row), []).append(row)
    return {
        key: sorted(members, key=step)
        for key, members in found.items()
        if len({step(row) for row in members}) > 1
    }


def _draw(
    curves: dict[tuple[Any, ...], list[Row]],
    path: Path,
    machine: str,
    *,
    title: str,
    x: tuple[str, Callable[[Row], float]],
    y: tuple[str, Callable[[Row], float]],
    mark: Callable[[Row], str],
    label: Callable[[tuple[Any, ...]], str],
) -> bool:
    if not curves:
        return False
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for key, members in curves.items():
        (line,) = axes.plot(list(map(x[1], members)), list(map(y[1], members)), marker="o", label=label(key))
        for row in members:
            axes.annotate(
                mark(row),
                (x[1](row), y[1](row)),
                textcoords="offset points",
                xytext=(5, 5),
                color=line.get_color(),
            )
    axes.set(title=title, xlabel=x[0], ylabel=y[0])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.text(0.01, -0.02, machine, fontsize=7, color="dimgray")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return True
