"""Replies as M3 writes them: rendered by rules of our own, which share no code with the parser."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sglang_m3.parsing.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from sglang_m3.parsing.parser import Parser

NS = "]<]minimax[>["

FUNCTIONS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
    "plan": {
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"title": {"type": "string"}, "done": {"type": "boolean"}},
                },
            },
            "limits": {
                "type": "object",
                "properties": {"cost": {"type": "number"}, "who": {"$ref": "#/$defs/who"}},
            },
        },
        "$defs": {"who": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    },
    "now": None,
}


def ns(text: str) -> str:
    """The text with the namespace in place of every `~`."""
    return text.replace("~", NS)


def element(name: str, value: Any) -> str:
    """An argument as the chat template writes it."""
    if isinstance(value, dict):
        body = "".join(element(key, member) for key, member in value.items())
    elif isinstance(value, list):
        body = "".join(element("item", member) for member in value)
    else:
        body = value if isinstance(value, str) else json.dumps(value)
    return f"{NS}<{name}>{body}{NS}</{name}>"


def invoke(name: str, arguments: dict[str, Any]) -> str:
    body = "".join(element(key, value) for key, value in arguments.items())
    return f'{NS}<invoke name="{name}">{body}{NS}</invoke>'


def block(*calls: tuple[str, dict[str, Any]]) -> str:
    lines = [f"{NS}<tool_call>", *(invoke(name, arguments) for name, arguments in calls), f"{NS}</tool_call>"]
    return "\n".join(lines)


def read(pieces: Iterable[str], *, thinking: bool = False, undeclared: bool = False) -> list[Event]:
    """What the parser reports for a reply that arrives in these pieces."""
    parser = Parser(FUNCTIONS, thinking=thinking, undeclared=undeclared)
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.close()])


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbouring pieces of the same text as one event."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Reasoning | Content) and type(last) is type(event):
            result[-1] = type(event)(last.text + event.text)
        elif (
            isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index
        ):
            result[-1] = CallArguments(event.index, last.json_delta + event.json_delta)
        else:
            result.append(event)
    return result


def reasoning(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def content(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def arguments(events: Iterable[Event]) -> dict[int, str]:
    """The arguments' text of every call that began."""
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(texts), f"call {event.index} begins after {len(texts)} calls"
            texts[event.index] = ""
        elif isinstance(event, CallArguments):
            texts[event.index] += event.json_delta
    return texts


def calls(events: list[Event]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls that ended."""
    ended = {event.index for event in events if isinstance(event, CallEnd)}
    texts = arguments(events)
    starts = [event for event in events if isinstance(event, CallStart)]
    return [(start.name, json.loads(texts[start.index])) for start in starts if start.index in ended]
