"""The JSON lines of a comparison: one measured point each, appended as soon as it is known."""

from __future__ import annotations

import json
import time
from collections import Counter
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
PROBES = "probes.jsonl"
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


@dataclass(frozen=True)
class Host:
    """What points were measured on.

    Attributes:
        machine: hardware and versions, in one line.
        code: a digest of the plugin's and the operators' source, or why it is not known.
    """

    machine: str
    code: str

    @classmethod
    def here(cls) -> Host:
        return cls(machine(), code())


class Store:
    """A folder with `points.jsonl` (readable), `outputs.jsonl` (generated ids, for comparing) and, where it
    was noted, `probes.jsonl` (what the work was, see `bench_serving.probe`)."""

    def __init__(self, folder: Path, host: Host | None = None) -> None:
        """`host`: what is measured on; default: this machine."""
        self.folder = folder
        self.host = host or Host.here()
        folder.mkdir(parents=True, exist_ok=True)
        for name in (POINTS, OUTPUTS, PROBES):
            _cut_off_unfinished(folder / name)

    def points(self) -> list[dict[str, Any]]:
        return _lines(self.folder / POINTS)

    def outputs(self) -> list[dict[str, Any]]:
        return _lines(self.folder / OUTPUTS)

    def probes(self) -> list[dict[str, Any]]:
        return _lines(self.folder / PROBES)

    def append_probe(self, variant: Variant, workload: Workload, use: dict[str, Any]) -> None:
        """Write what a variant did with a workload, with what tells whether it goes with the points."""
        _append(
            self.folder / PROBES,
            {
                "workload": workload.name,
                "digest": workload.digest,
                "time": time.time(),
                **self._same(variant),
                **use,
            },
        )

    def probed(self, variant: Variant, workload: Workload) -> bool:
        """Whether it is known what this variant, as it is, does with this workload."""
        return any(
            probe["digest"] == workload.digest
            and all(probe[name] == value for name, value in self._same(variant).items())
            for probe in self.probes()
        )

    def _same(self, variant: Variant) -> dict[str, Any]:
        """What must be equal for a line to stand for this variant."""
        return {
            "variant": variant.name,
            "environment": dict(variant.environment),
            "flags": list(variant.flags),
            **asdict(self.host),
        }

    def append(
        self, point: PointKey, variant: Variant, measured: dict[str, Any], answers: Iterable[Exchange]
    ) -> None:
        """Write one measured point with when, where and on what it was measured."""
        context = {
            "time": time.time(),
            **asdict(self.host),
            "environment": dict(variant.environment),
            "flags": variant.flags,
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
        same = {**self._same(variant), "failed": 0}
        names = PointKey.__dataclass_fields__
        return {
            PointKey(**{name: point[name] for name in names})
            for point in self.points()
            if time.time() - point["time"] < FRESH_SECONDS
            and all(point[name] == value for name, value in same.items())
        }


@dataclass(frozen=True)
class Current:
    """The points that may stand side by side, and why the others may not.

    Attributes:
        points: of one machine and one code, each variant with one set of flags and environment variables, no
            hour between one and the next, every key once; in order of first appearance.
        left_out: how many others there are, by the reason.
    """

    points: list[dict[str, Any]]
    left_out: dict[str, int]


def current(points: Iterable[dict[str, Any]]) -> Current:
    """What the newest point and those that go with it say; see `Current`."""
    left_out: Counter[str] = Counter()
    by_variant: dict[str, dict[str, Any]] = {}
    kept: list[dict[str, Any]] = []
    newest: dict[str, Any] | None = None
    reached = float("inf")
    # Of two of one time the later line is the newer.
    for _, point in sorted(enumerate(points), key=lambda at: (at[1]["time"], at[0]), reverse=True):
        newest = newest or point
        same = by_variant.setdefault(point["variant"], point)
        if reached - point["time"] > FRESH_SECONDS and kept:
            left_out[f"older by {FRESH_SECONDS // 60} minutes than those that follow"] += 1
            continue
        reached = point["time"]
        for name in ("machine", "code"):
            if point[name] != newest[name]:
                left_out[f"of another {name}: {point[name]}"] += 1
                break
        else:
            if any(point[name] != same[name] for name in ("flags", "environment")):
                left_out[f"of {point['variant']} with other flags or environment variables"] += 1
            else:
                kept.append(point)
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in reversed(kept):
        by_key[_key_of(point)] = point
    return Current(list(by_key.values()), dict(left_out))


def _key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in PointKey.__dataclass_fields__)


def outputs_of(points: Iterable[dict[str, Any]], outputs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of `outputs.jsonl` that belong to these points, in their order."""
    by_point = {(*_key_of(output), output["time"]): output for output in outputs}
    places = ((*_key_of(point), point["time"]) for point in points)
    return [by_point[place] for place in places if place in by_point]


def probes_of(points: Iterable[dict[str, Any]], probes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is known of the work of these points, the newest of each variant and workload."""
    names = ("variant", "digest", "machine", "code")
    wanted = {
        tuple(point[name] for name in names): (point["flags"], point["environment"]) for point in points
    }
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for probe in probes:
        place = tuple(probe[name] for name in names)
        if wanted.get(place) == (probe["flags"], probe["environment"]):
            found[place] = probe
    return list(found.values())


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
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, is no JSON: {error}") from error
    return found


def _cut_off_unfinished(path: Path) -> None:
    """A process that was killed while it wrote leaves a part of a line."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)
