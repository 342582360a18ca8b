"""What the measured work was: distinct blocks that layers choose, and experts that tokens take.

Writing them down copies to the host in every layer and cannot be done inside CUDA graphs, so a variant is
started once more after it has been measured, and serves one session per slot of each workload.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_serving import server
from bench_serving.machine import gpus
from bench_serving.measure import Load, send_short, warm_prefixes
from bench_serving.server import PLUGINS, Variant

RECORD = "SGLANG_M3_RECORD_BLOCKS"
MOST_AT_ONCE = 8
"""Sessions of a probe at most: it tells what the work is like, not how it scales."""


@dataclass(frozen=True)
class Spread:
    """Of a number for each layer: the least, the median, the most."""

    least: float
    median: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        known = sorted(values)
        return cls(known[0], statistics.median(known), known[-1])


@dataclass(frozen=True)
class Use:
    """What a workload made a variant do.

    Attributes:
        tokens: query tokens that were recorded, those of warmed prefixes not among them.
        visible_blocks: of the longest request.
        distinct_blocks: by layer, logical blocks that some token chose and that were not its own.
        experts: of the model, in each layer.
        experts_touched: by layer, experts that some token took.
        experts_each_step: by layer, experts that a step of up to `MOST_AT_ONCE` tokens took, on average; None
            where every step had more.
    """

    tokens: int
    visible_blocks: int
    distinct_blocks: Spread
    experts: int
    experts_touched: Spread
    experts_each_step: Spread | None


def wanted(variant: Variant) -> bool:
    """Whether this variant can say: SGLang without the plugin cannot."""
    return (PLUGINS, "none") not in variant.environment


def recording(variant: Variant, folder: Path) -> Variant:
    """The variant, writing down what it does in `folder`."""
    eager = ("--disable-cuda-graph",) if gpus() else ()
    environment = (*variant.environment, (RECORD, str(folder)))
    return replace(variant, environment=environment, flags=(*variant.flags, *eager))


def probe(
    variant: Variant, loads: Sequence[Load], log: Path, start_limit: float
) -> list[tuple[Load, dict[str, Any]]]:
    """Start the variant, recording, and let it serve each load; what it did, as `Use` has it.

    Raises:
        RuntimeError: it did not start, or a request failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server.started(recording(variant, folder), log, start_limit) as url:
            return [(load, asdict(use(url, load, folder))) for load in loads]


def use(url: str, load: Load, folder: Path) -> Use:
    """What one session per slot makes the server at `url` do, which records in `folder`."""
    warm_prefixes(url, load)
    server.counters(url)  # Waits for the last step.
    for path in folder.iterdir():
        path.unlink()
    slots = min(MOST_AT_ONCE, max(load.workload.concurrency))
    send_short(url, load.sessions(slots, "probe", count=slots), slots)
    server.counters(url)
    return summary(folder)


def summary(folder: Path) -> Use:
    """What the files in `folder` say; every process has written the same steps.

    Raises:
        RuntimeError: there are none.
    """
    from m3_kernels.rows import BLOCK_TOKENS

    from sglang_m3.attention import recorder as blocks
    from sglang_m3.experts import recorder as experts

    chosen: dict[int, set[int]] = {}
    visible = tokens = 0
    for step in blocks.load(folder):
        rows = step.request >= 0
        tokens += int(rows.sum())
        own = step.position[rows] // BLOCK_TOKENS
        visible = max(visible, int(own.max()) + 1)
        for layer, ids in step.chosen.items():
            others = ids[:, rows]
            others = others[(others >= 0) & (others != own[None, :, None])]
            chosen.setdefault(layer, set()).update(others.unique().tolist())
    taken: dict[int, set[int]] = {}
    each_step: dict[int, list[int]] = {}
    of_model = 0
    for step in experts.load(folder):
        of_model = step.experts
        for layer, ids in step.taken.items():
            distinct = ids[ids >= 0].unique().tolist()
            taken.setdefault(layer, set()).update(distinct)
            if len(ids) <= MOST_AT_ONCE:
                each_step.setdefault(layer, []).append(len(distinct))
    processes = len({path.name.partition("-")[0] for path in folder.glob("*.pt")})
    if not (processes and chosen and taken):
        raise RuntimeError("the server wrote nothing down while it served the probe")
    return Use(
        tokens // processes,
        visible,
        Spread.of(map(len, chosen.values())),
        of_model,
        Spread.of(map(len, taken.values())),
        Spread.of(map(statistics.mean, each_step.values())) if each_step else None,
    )
