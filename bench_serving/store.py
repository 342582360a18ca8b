"""The JSON lines of a comparison: one measured point each, appended as soon as it is known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_serving.machine import code, machine
from bench_serving.server import Variant
from bench_serving.workload import Workload

if TYPE_CHECKING:
    from bench_serving.client import Exchange

POINTS = "points.jsonl"
OUTPUTS = "outputs.jsonl"
NOTE = "benchmark-note.txt"
FRESH_SECONDS = 3600
"""Points older than this are measured again: machines drift."""


@dataclass(frozen=True)
class PointKey:
    """What makes a point that point.

    Attributes:
        digest: of the workload, its variation included.
        max_concurrency: sessions in flight (SGLang's records call what was reached `concurrency`).
    """

    variant: str
    workload: str
    digest: str
    prefix_tokens: int
    shared_share: float
    max_concurrency: int
    repeat: int
    round: int
    seed: int

    @property
    def load(self) -> tuple[Any, ...]:
        """The load alone: equal for the same requests to another variant or in another round."""
        return (self.workload, self.digest, self.max_concurrency, self.repeat, self.seed)


def key(
    variant: str, workload: Workload, concurrency: int, *, repeat: int, round: int, seed: int
) -> PointKey:
    return PointKey(
        variant,
        workload.name,
        workload.digest,
        workload.prefix_tokens,
        workload.shared_share,
        concurrency,
        repeat,
        round,
        seed,
    )


class Store:
    """A folder with `points.jsonl` (readable) and `outputs.jsonl` (generated ids, for comparing)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def points(self) -> list[dict[str, Any]]:
        return _lines(self.folder / POINTS)

    def outputs(self) -> list[dict[str, Any]]:
        return _lines(self.folder / OUTPUTS)

    def append(
        self, point: PointKey, variant: Variant, measured: dict[str, Any], answers: Iterable[Exchange]
    ) -> None:
        """Write one measured point with when, where and on what it was measured."""
        context = {
            "time": time.time(),
            "machine": machine(),
            "code": code(),
            "environment": dict(variant.environment),
            "flags": variant.flags,
            "weights": variant.weights,
            "model_note": model_note(variant),
        }
        ids = {
            f"{answer.session}.{answer.turn}.{answer.branch}": answer.output_ids
            for answer in answers
            if answer.output.success
        }
        # The point comes last: it says that everything of it is there.
        _append(self.folder / OUTPUTS, {**asdict(point), "time": context["time"], "ids": ids})
        _append(self.folder / POINTS, {**asdict(point), **context, **measured})

    def measured(self, variant: Variant) -> set[PointKey]:
        """Points of this variant that need no repeating: same flags, environment, machine and code, within
        the hour, and with no failed request."""
        same = {
            "variant": variant.name,
            "environment": dict(variant.environment),
            "flags": list(variant.flags),
            "machine": machine(),
            "code": code(),
            "failed": 0,
        }
        names = PointKey.__dataclass_fields__
        return {
            PointKey(**{name: point[name] for name in names})
            for point in self.points()
            if time.time() - point["time"] < FRESH_SECONDS
            and all(point[name] == value for name, value in same.items())
        }


def latest(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points without those that were measured again later, in order of first appearance."""
    names = PointKey.__dataclass_fields__
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in points:
        by_key[tuple(point[name] for name in names)] = point
    return list(by_key.values())


def model_note(variant: Variant) -> str:
    """What a report must say about the model, if its folder says so (`bench_serving.one_rank`)."""
    folder = Path(variant.flag("--model-path"))
    note = folder / NOTE
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def _append(path: Path, content: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
