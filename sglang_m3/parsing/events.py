"""What the parser reports, in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Reasoning:
    """A piece of thinking, without its markers."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call to the function `name` has begun; `index` counts the calls of the reply from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next characters of the call's arguments: those of an ended call concatenate to one JSON object."""

    index: int
    json_delta: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete. A call without this event was cut off and must not be run."""

    index: int


Event = Reasoning | Content | CallStart | CallArguments | CallEnd


def _run(event: Event) -> object:
    """Neighbours with equal keys form one event; starts and ends stand alone."""
    if isinstance(event, CallArguments):
        return CallArguments, event.index
    return type(event) if isinstance(event, Reasoning | Content) else id(event)


def merge(events: Iterable[Event]) -> list[Event]:
    """Joins neighbouring pieces of the same text and drops empty ones; linear in the text."""
    solid = [event for event in events if isinstance(event, CallStart | CallEnd) or _text(event)]
    if len(solid) < 2:
        return solid
    return [_join(list(run)) for _, run in groupby(solid, _run)]


def _join(run: list[Event]) -> Event:
    first = run[0]
    if len(run) == 1:
        return first
    text = "".join(map(_text, run))
    return CallArguments(first.index, text) if isinstance(first, CallArguments) else type(first)(text)


def _text(event: Event) -> str:
    return event.json_delta if isinstance(event, CallArguments) else event.text
