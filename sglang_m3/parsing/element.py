"""An element of a call's arguments while it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from sglang_m3.parsing.markup import NAMESPACE, WHITESPACE
from sglang_m3.parsing.schema import Schema, Value


class Body(Enum):
    """What an element holds, as far as it has been read."""

    TEXT = auto()
    """Text up to the element's own closing tag."""
    ANY = auto()
    """Nothing but whitespace so far."""
    NAMELESS = auto()
    """A namespace and then text: all of it the value, or an elided child, as the next tag decides."""
    CHILDREN = auto()


@dataclass
class Element:
    """An open element: its name, what the schema says of its value, and what it holds so far."""

    name: str
    schema: Schema
    body: Body
    live: bool = False
    """A text argument, which is passed on as it arrives."""
    pieces: list[str] = field(default_factory=list)
    """Text that no child has claimed."""
    children: list[tuple[str, Value]] = field(default_factory=list)

    def text(self) -> str:
        return "".join(self.pieces)

    def unclaimed(self) -> bool:
        return any(piece.strip(WHITESPACE) for piece in self.pieces)

    def take_elided(self, name: str) -> str:
        """The value of a child whose opening tag is missing, in whole or without its `<`."""
        text = self.text().lstrip(WHITESPACE).removeprefix(NAMESPACE).removeprefix(f"{name}>")
        self.pieces.clear()
        return text
