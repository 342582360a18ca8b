"""The grammar of a reply: thinking, answer and tool calls.

Two readers, one after the other, because SGLang runs them so: `ThinkingReader` parts thinking from the rest,
and `CallReader` finds the calls in the rest. Both find calls with the same code, so they agree on what is
inside a call. `Parser` is their composition. All are incremental, and what they report depends on the text
only, never on how it was cut: reading a whole reply is feeding it once.

Time is linear in the text. Held back is at most a marker, and of a call's arguments what cannot be written as
JSON before it is complete; arguments declared as strings are passed on as they arrive. A call's events are
neighbours: what else its text holds comes after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_m3.parsing.arguments import ArgumentReader, Progress
from sglang_m3.parsing.events import CallEnd, CallStart, Content, Event, Reasoning, merge
from sglang_m3.parsing.markup import (
    BLOCK,
    MORE,
    NAMESPACE,
    NAMESPACES,
    NAMESPACES_AND_THINKING,
    THINK_OPEN,
    WHITESPACE,
    Buffer,
    match_block,
    match_close,
    match_invoke,
)
from sglang_m3.parsing.schema import Schema


class _Reader:
    """Text with blocks of calls in it. Subclasses say what a call and the text around it become."""

    _markers = NAMESPACES

    def __init__(self) -> None:
        self._buffer = Buffer()
        self._events: list[Event] = []
        self._call: ArgumentReader | None = None
        self._in_block = False
        self._gap: list[str] = []
        """Whitespace after a call; markup if the block goes on."""
        self._read_before = 0
        """Characters that have left the buffer."""

    def feed(self, text: str) -> list[Event]:
        """Reads the next piece of the reply. Raises AssertionError after `close`."""
        self._read_before += self._buffer.pos
        self._buffer.push(text)
        return self._read()

    def close(self) -> list[Event]:
        """Ends the reply: what was held back is decided. A call that is still open gets no `CallEnd`."""
        self._buffer.finish()
        events = self._read()
        if self._call is not None:
            self._call.cut_off()
            self._move(self._call, "")
            self._add_left_over(self._call)
        self._add_markup("".join(self._gap))
        return merge([*events, *self._events])

    def _read(self) -> list[Event]:
        while self._buffer:
            if self._call is not None:
                decided = self._read_call(self._call)
            else:
                decided = self._read_gap() if self._in_block else self._read_outside()
            if not decided:
                break
        events, self._events = self._events, []
        return merge(events)

    def _read_outside(self) -> bool:
        buffer = self._buffer
        text = buffer.take(buffer.find(self._markers))
        self._add_text(text)
        marker = self._markers.whole.match(buffer.text, buffer.pos)
        if marker and marker[0] != NAMESPACE:
            buffer.take(marker.end())
            self._meet_marker(marker[0])
            return True
        if buffer.match(NAMESPACE, buffer.pos) < 0:
            return bool(text)
        name, end = match_block(buffer, buffer.pos)
        if end == MORE:
            return bool(text)
        if name:
            self._open_call(name, end)
        else:
            self._add_text(buffer.take(buffer.pos + len(NAMESPACE)))
        return True

    def _read_gap(self) -> bool:
        """Between the calls of a block. Anything but a tag ends the block: its own end may be missing."""
        buffer = self._buffer
        start = buffer.pos
        while start < len(buffer.text) and buffer.text[start] in WHITESPACE:
            start += 1
        self._gap.append(buffer.take(start))
        namespace = buffer.match(NAMESPACE, start)
        name, end = match_invoke(buffer, start)
        closed = match_close(buffer, start, BLOCK)
        if MORE in (namespace, end, closed):
            return False
        if name:
            self._add_markup("".join(self._gap))
            self._open_call(name, end)
        elif closed >= 0:
            self._add_markup("".join(self._gap) + buffer.take(closed))
            self._in_block = False
        else:
            self._add_text("".join(self._gap))
            self._in_block = False
        self._gap.clear()
        return True

    def _open_call(self, name: str, end: int) -> None:
        start = self._read_before + self._buffer.pos
        self._in_block = True
        self._call = self._begin_call(name, self._buffer.take(end), start)
        self._move(self._call, "")

    def _read_call(self, call: ArgumentReader) -> bool:
        start = self._buffer.pos
        progress = call.read(self._buffer)
        self._move(call, self._buffer.text[start : self._buffer.pos])
        if progress is Progress.MORE:
            return False
        self._end_call()
        self._add_left_over(call)
        self._call = None
        self._in_block = progress is not Progress.BLOCK_ENDED
        return True

    def _add_text(self, text: str) -> None:
        """Text outside blocks."""
        self._events.append(Content(text))

    def _meet_marker(self, marker: str) -> None:
        raise NotImplementedError

    def _add_markup(self, source: str) -> None:
        """What stands between the calls of a block."""

    def _begin_call(self, name: str, source: str, start: int) -> ArgumentReader:
        raise NotImplementedError

    def _move(self, call: ArgumentReader, source: str) -> None:
        """Takes what the call has reported about `source`."""
        raise NotImplementedError

    def _end_call(self) -> None:
        pass

    def _add_left_over(self, call: ArgumentReader) -> None:
        """Takes the text in the call that no tag claimed."""


class ThinkingReader(_Reader):
    """Parts thinking from the rest. Reports `Reasoning`, and `Content` that still has the calls' markup.

    `thinking` says whether the prompt ended inside thinking, as the mode `enabled` makes it; nothing else of
    the prompt matters. Thinking may come back any number of times. A marker that changes nothing, such as a
    closer without an opener, is dropped. A call inside thinking is a call, and thinking goes on after it.
    Markers inside a call are text; `functions`, as for `CallReader`, says where values that are text end.
    """

    _markers = NAMESPACES_AND_THINKING

    def __init__(self, functions: Mapping[str, Any], *, thinking: bool) -> None:
        super().__init__()
        self.thinking = thinking
        self._functions = functions

    def _add_text(self, text: str) -> None:
        self._events.append(Reasoning(text) if self.thinking else Content(text))

    def _meet_marker(self, marker: str) -> None:
        self.thinking = marker == THINK_OPEN

    def _add_markup(self, source: str) -> None:
        self._events.append(Content(source))

    def _begin_call(self, name: str, source: str, start: int) -> ArgumentReader:
        self._add_markup(source)
        schema = self._functions.get(name)
        return ArgumentReader(0, Schema(schema, schema))

    def _move(self, call: ArgumentReader, source: str) -> None:
        call.out.clear()
        self._add_markup(source)


class CallReader(_Reader):
    """Finds the calls in text without thinking. Reports `Content` and the events of calls.

    `functions` maps the declared functions to their parameter schemas (None where there is none). A call to
    another function is a call if `undeclared` is true, with arguments read as by a schema that says nothing;
    else its source is content.
    """

    def __init__(self, functions: Mapping[str, Any], *, undeclared: bool) -> None:
        super().__init__()
        self.calls = 0
        """Calls begun so far."""
        self.open_call: int | None = None
        """Where the source of the call that is still open starts: characters from the reply's first."""
        self._functions = functions
        self._undeclared = undeclared
        self._refused = False

    def _add_markup(self, source: str) -> None:
        if self._refused:
            self._events.append(Content(source))

    def _begin_call(self, name: str, source: str, start: int) -> ArgumentReader:
        self._refused = name not in self._functions and not self._undeclared
        self._add_markup(source)
        schema = self._functions.get(name)
        if not self._refused:
            self._events.append(CallStart(self.calls, name))
            self.open_call = start
            self.calls += 1
        return ArgumentReader(self.calls - 1, Schema(schema, schema))

    def _move(self, call: ArgumentReader, source: str) -> None:
        self._events.extend([Content(source)] if self._refused else call.out)
        call.out = []

    def _end_call(self) -> None:
        self.open_call = None
        if not self._refused:
            self._events.append(CallEnd(self.calls - 1))

    def _add_left_over(self, call: ArgumentReader) -> None:
        if not self._refused:
            self._events.extend(map(Content, call.left_over))


class Parser:
    """Reads a reply: `feed(text) -> events`, then `close() -> events`.

    Args:
        functions: declared functions and their parameter schemas, as for `CallReader`.
        thinking: whether the prompt ended inside thinking.
        undeclared: whether calls to other functions are calls.
    """

    def __init__(self, functions: Mapping[str, Any], *, thinking: bool, undeclared: bool = False) -> None:
        self._thinking = ThinkingReader(functions, thinking=thinking)
        self._calls = CallReader(functions, undeclared=undeclared)

    def feed(self, text: str) -> list[Event]:
        return merge(self._read(self._thinking.feed(text)))

    def close(self) -> list[Event]:
        events = self._read(self._thinking.close())
        return merge([*events, *self._calls.close()])

    def _read(self, events: list[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            read += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return read
