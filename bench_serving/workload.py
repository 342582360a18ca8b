"""What is asked of a server: the declarative files in `workloads/`."""

from __future__ import annotations

import hashlib
import json
import tomllib
import typing
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "workloads"


class WorkloadError(ValueError):
    """A workload file that does not say what it must, or says what nobody reads; names the file and field."""


@dataclass(frozen=True)
class PrefixLevel:
    """One level of the tree of shared prefixes.

    Attributes:
        tokens: length of each text of this level.
        copies: different texts under each text of the level above.
    """

    tokens: int
    copies: int = 1


@dataclass(frozen=True)
class Traffic:
    """One kind of session. A range is inclusive, drawn uniformly.

    Attributes:
        share: part of the sessions that are of this kind, relative to the other kinds.
        shared_prefix: whether a session starts with a path of the prefix tree.
        first_input_tokens: private tokens before the first turn's own, the same for all branches.
        input_tokens: new tokens of every turn.
        output_tokens: tokens generated per turn; end-of-sequence is ignored.
        turns: requests of a session, one after the other; each prompt holds everything before it.
        think_seconds: pause before each turn but the first.
        branches: requests sent at once in each turn, alike but for their last `input_tokens`. A session with
            branches has one turn.
    """

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    share: float = 1.0
    shared_prefix: bool = True
    first_input_tokens: tuple[int, int] = (0, 0)
    turns: tuple[int, int] = (1, 1)
    think_seconds: tuple[float, float] = (0.0, 0.0)
    branches: int = 1


@dataclass(frozen=True)
class Workload:
    """A load: what sessions look like, and how many are in flight.

    Attributes:
        concurrency: sessions in flight, one measured point each.
        requests_per_slot: sessions of a point = this times its concurrency, at least `least_sessions`.
        shared_share: part of every prefix level that is shared; the rest of its length is private text.
        prefix_tokens_sweep: total prefix lengths to measure instead of the one given by `prefix`.
        shared_share_sweep: values of `shared_share` to measure.
    """

    name: str
    description: str
    concurrency: tuple[int, ...]
    traffic: tuple[Traffic, ...]
    prefix: tuple[PrefixLevel, ...] = ()
    requests_per_slot: int = 4
    least_sessions: int = 8
    shared_share: float = 1.0
    prefix_tokens_sweep: tuple[int, ...] = ()
    shared_share_sweep: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rules = {
            "concurrency lists positive numbers": self.concurrency and min(self.concurrency) > 0,
            "there is traffic": bool(self.traffic),
            "shares are positive": all(kind.share > 0 for kind in self.traffic),
            "ranges are (low, high), low <= high, tokens positive": all(map(_ranges_hold, self.traffic)),
            "branches have one turn": all(
                kind.branches == 1 or kind.turns == (1, 1) for kind in self.traffic
            ),
            "prefix levels have tokens and copies": all(
                level.tokens > 0 and level.copies > 0 for level in self.prefix
            ),
            "requests_per_slot and least_sessions are positive": min(
                self.requests_per_slot, self.least_sessions
            )
            > 0,
            "shared_share lies in 0..1": all(
                0 <= share <= 1 for share in (self.shared_share, *self.shared_share_sweep)
            ),
            "a sweep needs a prefix": bool(self.prefix)
            or not (self.prefix_tokens_sweep or self.shared_share_sweep),
            "one sweep at a time": not (self.prefix_tokens_sweep and self.shared_share_sweep),
        }
        broken = [rule for rule, holds in rules.items() if not holds]
        if broken:
            raise WorkloadError(f"workload {self.name}: need that {'; that '.join(broken)}")

    @property
    def prefix_tokens(self) -> int:
        """Length of a path through the prefix tree, in tokens."""
        return sum(level.tokens for level in self.prefix)

    @property
    def digest(self) -> str:
        """Eight hex digits that change with anything that changes the requests."""
        content = asdict(self)
        for name in ("description", "concurrency", "prefix_tokens_sweep", "shared_share_sweep"):
            del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    def sessions(self, concurrency: int) -> int:
        """Sessions of the point at this concurrency."""
        return max(self.least_sessions, self.requests_per_slot * concurrency)

    def variations(self) -> tuple[Workload, ...]:
        """One workload per value of the sweep, without sweeps; the workload itself if it has none."""
        plain = replace(self, prefix_tokens_sweep=(), shared_share_sweep=())
        if self.prefix_tokens_sweep:
            return tuple(plain.with_prefix_tokens(tokens) for tokens in self.prefix_tokens_sweep)
        if self.shared_share_sweep:
            return tuple(replace(plain, shared_share=share) for share in self.shared_share_sweep)
        return (plain,)

    def with_prefix_tokens(self, tokens: int) -> Workload:
        """The workload with its prefix levels scaled to this total length."""
        levels = [
            replace(level, tokens=max(1, level.tokens * tokens // self.prefix_tokens))
            for level in self.prefix
        ]
        return replace(self, prefix=tuple(levels))

    def scaled(self, factor: float) -> Workload:
        """All lengths in tokens multiplied by `factor`, at least 1 where they were: for small models."""

        def scale(tokens: int) -> int:
            return max(1, round(tokens * factor)) if tokens else 0

        def pair(tokens: tuple[int, int]) -> tuple[int, int]:
            return scale(tokens[0]), scale(tokens[1])

        return replace(
            self,
            prefix=tuple(replace(level, tokens=scale(level.tokens)) for level in self.prefix),
            prefix_tokens_sweep=tuple(map(scale, self.prefix_tokens_sweep)),
            traffic=tuple(
                replace(
                    kind,
                    input_tokens=pair(kind.input_tokens),
                    first_input_tokens=pair(kind.first_input_tokens),
                    output_tokens=pair(kind.output_tokens),
                )
                for kind in self.traffic
            ),
        )


def _ranges_hold(kind: Traffic) -> bool:
    pairs = {
        "input_tokens": 1,
        "output_tokens": 1,
        "first_input_tokens": 0,
        "turns": 1,
        "think_seconds": 0,
    }
    return kind.branches > 0 and all(
        len(getattr(kind, name)) == 2 and least <= getattr(kind, name)[0] <= getattr(kind, name)[1]
        for name, least in pairs.items()
    )


def names() -> list[str]:
    """The workloads that come with the tool."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Workload:
    """A workload by its name in `workloads/`, or by the path of a TOML file.

    Raises:
        WorkloadError: no such workload, no TOML, an unknown or missing field, a value that does not fit.
    """
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise WorkloadError(f"no workload {name!r}; there are {', '.join(names())}, or give a .toml file")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path} is no readable TOML: {error}") from error
    where = str(path)
    tables = {"traffic": Traffic, "prefix": PrefixLevel}
    for field, kind in tables.items():
        listed = content.get(field, [])
        if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
            raise WorkloadError(f"{where}: {field} is given in tables [[{field}]], not as {listed!r}")
        content[field] = [_build(kind, one, where) for one in listed]
    return _build(Workload, {"name": path.stem, "description": "", **content}, where)


def _build(kind: type, content: dict[str, Any], where: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(content) - set(known))
    if unknown:
        raise WorkloadError(f"{where}: unknown {', '.join(unknown)}; {kind.__name__} knows {sorted(known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in content]
    if missing:
        raise WorkloadError(f"{where}: {kind.__name__} needs {', '.join(missing)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints[name]):
            raise WorkloadError(f"{where}: {name} must be {_in_words(hints[name])}, not {content[name]!r}")
    return kind(**values)


NAMED_TYPES = {int: "whole number", float: "number", str: "text", bool: "truth value (true, false)"}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of a TOML file is of a field's type."""
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, tuple) or (kinds[-1] is not ... and len(value) != len(kinds)):
            return False
        return all(_fits(one, kinds[0]) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _in_words(hint: Any) -> str:
    if typing.get_origin(hint) is not tuple:
        return f"a {NAMED_TYPES[hint]}"
    kind, count = typing.get_args(hint)
    return f"a list of {'' if count is ... else 'two '}{NAMED_TYPES[kind]}s"
