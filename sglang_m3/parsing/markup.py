"""M3's markers, and how to recognise one that may not have arrived whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NAMESPACE = "]<]minimax[>["
"""Stands before every tag of a tool call; one token of the vocabulary, but it may arrive in pieces."""
THINK_OPEN = "<mm:think>"
THINK_CLOSE = "</mm:think>"
CALL_OPEN = "<tool_call>"
INVOKE_OPEN = '<invoke name="'
INVOKE_NAME_END = '">'
BLOCK = "tool_call"
INVOKE = "invoke"

WHITESPACE = " \t\r\n"
MAX_GAP = 64
"""Characters of whitespace allowed inside a marker, between the namespace and its tag."""
MAX_NAME = 512
"""Characters of a tag's or a function's name. The limits bound what the parser may hold back."""

MORE = -1
"""Undecided until more text arrives."""
NO = -2
"""Not there."""


class Markers:
    """Markers to look for: one of them, or the beginning of one at the end of the text."""

    def __init__(self, *markers: str) -> None:
        beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self.longest = max(map(len, markers))
        self.whole = _any_of(markers)
        self.begun = re.compile(f"(?:{_any_of(beginnings).pattern})\\Z")


def _any_of(literals: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(literals))))


NAMESPACES = Markers(NAMESPACE)
NAMESPACES_AND_THINKING = Markers(NAMESPACE, THINK_CLOSE, THINK_OPEN)


_BEGUN_TAG = re.compile(rf"(?:{re.escape(NAMESPACE)}\s*(?:<[^<>\n]*)?|{NAMESPACES.begun.pattern})\Z")


def without_begun_tag(text: str) -> str:
    """The text without the tag that it ends in the middle of."""
    return _BEGUN_TAG.sub("", text)


class Buffer:
    """Text that has arrived and is not yet read: `text[pos:]`. After `finish` nothing more will come."""

    __slots__ = ("final", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.final = False

    def push(self, text: str) -> None:
        assert not self.final
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def finish(self) -> None:
        self.final = True

    def take(self, end: int) -> str:
        """Reads up to the absolute position `end`."""
        taken = self.text[self.pos : end]
        self.pos = end
        return taken

    def __bool__(self) -> bool:
        return self.pos < len(self.text)

    def match(self, literal: str, pos: int) -> int:
        """The position after `literal` at `pos`, or MORE, or NO."""
        if self.text.startswith(literal, pos):
            return pos + len(literal)
        missing = len(literal) - (len(self.text) - pos)
        if not self.final and missing > 0 and literal.startswith(self.text[pos:]):
            return MORE
        return NO

    def skip_gap(self, pos: int) -> int:
        """The position after at most MAX_GAP characters of whitespace, or MORE if only they have arrived."""
        limit = min(len(self.text), pos + MAX_GAP)
        while pos < limit and self.text[pos] in WHITESPACE:
            pos += 1
        return MORE if pos == len(self.text) and not self.final else pos

    def find(self, markers: Markers) -> int:
        """Where the text surely holds no marker up to: at one, or at what may become one, or at the end."""
        found = markers.whole.search(self.text, self.pos)
        if found:
            return found.start()
        begun = (
            None
            if self.final
            else markers.begun.search(self.text, max(self.pos, len(self.text) - markers.longest))
        )
        return begun.start() if begun else len(self.text)


@dataclass(frozen=True)
class Tag:
    """A namespaced tag that ends at the absolute position `end`."""

    name: str
    closes: bool
    end: int


def match_tag(buffer: Buffer, pos: int) -> Tag | int:
    """The tag whose namespace is at `pos`, or MORE, or NO where the namespace is only text.

    A name is everything up to `>`: argument names are JSON keys and may hold spaces or hyphens.
    """
    start = _after_namespace(buffer, pos, "<")
    if start < 0:
        return start
    text = buffer.text
    stop = start
    limit = min(len(text), start + MAX_NAME)
    while stop < limit and text[stop] not in "<>\n":
        stop += 1
    if stop < len(text) and text[stop] == ">":
        name = text[start:stop]
        return Tag(name.removeprefix("/"), name.startswith("/"), stop + 1)
    return MORE if stop == len(text) and stop < start + MAX_NAME and not buffer.final else NO


def match_close(buffer: Buffer, pos: int, name: str) -> int:
    """The position after the closing tag of `name` whose namespace is at `pos`, or MORE, or NO."""
    return _after_namespace(buffer, pos, f"</{name}>")


def match_invoke(buffer: Buffer, pos: int) -> tuple[str, int]:
    """The function's name and the position after `NAMESPACE<invoke name="...">` at `pos`.

    The name is empty where the position is MORE or NO. The `<` may be missing: deployed checkpoints drop it
    now and then (seen by users of vLLM's Gaudi backend).
    """
    start = _after_namespace(buffer, pos, INVOKE_OPEN, INVOKE_OPEN[1:])
    if start < 0:
        return "", start
    text = buffer.text
    limit = min(len(text), start + MAX_NAME)
    stop = start
    while stop < limit and text[stop] not in '"<\n':
        stop += 1
    if stop == len(text) and stop < start + MAX_NAME and not buffer.final:
        return "", MORE
    end = buffer.match(INVOKE_NAME_END, stop) if stop > start else NO
    return (text[start:stop], end) if end >= 0 else ("", end)


def match_block(buffer: Buffer, pos: int) -> tuple[str, int]:
    """`match_invoke` for the first call of a block, which `NAMESPACE<tool_call>` at `pos` opens.

    A block is only a block once a call follows: a marker that prose mentions stays prose.
    """
    opened = _after_namespace(buffer, pos, CALL_OPEN, CALL_OPEN[1:])
    if opened < 0:
        return "", opened
    opened = buffer.skip_gap(opened)
    return match_invoke(buffer, opened) if opened >= 0 else ("", opened)


def _after_namespace(buffer: Buffer, pos: int, *literals: str) -> int:
    """The position after the namespace, a gap and one of the literals; or MORE, or NO."""
    pos = buffer.match(NAMESPACE, pos)
    if pos < 0:
        return pos
    pos = buffer.skip_gap(pos)
    return max(buffer.match(literal, pos) for literal in literals) if pos >= 0 else pos
