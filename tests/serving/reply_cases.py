"""Replies to dictate to a server, and what its clients must make of them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.parsing.transcripts import HEAD, MARKERS, TAIL
from tests.parsing.writing import NS, block, ns
from tests.serving.reply_clients import Reply

WRITE = ("write", {"path": "a.txt", "content": "hello\n"})
NOW = ("now", {})
PLAN = (
    "plan",
    {
        "steps": [{"title": "κόσμε 🙂", "done": True}, {"done": False}],
        "limits": {"cost": 2.5, "who": None},
    },
)
CLOSERS = ("write", {"content": ns("~</invoke></mm:think>~</tool_call>x"), "path": "p"})
QUOTED = ("write", {"path": "a < b & c > d", "content": MARKERS, "tags": ["]<]", "[>["]})

REPLIES: dict[str, tuple[str, tuple[str, ...], Reply]] = {
    "an answer": ("disabled", ("Four.\n",), Reply("", "Four.\n", (), "stop")),
    "thinking that the prompt opened": (
        "enabled",
        ("Two and two.</mm:think>Four.",),
        Reply("Two and two.", "Four.", (), "stop"),
    ),
    "thinking that the model opened": (
        "adaptive",
        ("<mm:think>Two and two.</mm:think>Four.",),
        Reply("Two and two.", "Four.", (), "stop"),
    ),
    "thinking that the model declined": ("adaptive", ("</mm:think>Four.",), Reply("", "Four.", (), "stop")),
    "a stray closer": ("disabled", ("</mm:think>Four.",), Reply("", "Four.", (), "stop")),
    "markers in several tokens": (
        "adaptive",
        ("<mm:th", "ink>Two.</", "mm:", "think>Four.", "]<]mini", "max[>[", block(NOW).removeprefix(NS)),
        Reply("Two.", "Four.", (NOW,), "tool_calls"),
    ),
    "thinking twice": (
        "adaptive",
        ("<mm:think>a</mm:think>b<mm:think>c</mm:think>d",),
        Reply("ac", "bd", (), "stop"),
    ),
    "characters in several tokens": (
        "enabled",
        ("世界 🙂</mm:think>κόσμε 🙂",),
        Reply("世界 🙂", "κόσμε 🙂", (), "stop"),
    ),
    "a call": ("disabled", (block(WRITE),), Reply("", "", (WRITE,), "tool_calls")),
    "a call after thinking": (
        "enabled",
        (f"I look.</mm:think>{block(NOW)}",),
        Reply("I look.", "", (NOW,), "tool_calls"),
    ),
    "a call inside thinking": (
        "enabled",
        (f"I look. {block(NOW)}",),
        Reply("I look. ", "", (NOW,), "tool_calls"),
    ),
    "several calls with text around": (
        "adaptive",
        (f"First. {block(NOW, PLAN)} Then. {block(NOW)} Done.",),
        Reply("", "First.  Then.  Done.", (NOW, PLAN, NOW), "tool_calls"),
    ),
    "text and whitespace after a call": (
        "disabled",
        (block(NOW), "\n\n", "Done."),
        Reply("", "\n\nDone.", (NOW,), "tool_calls"),
    ),
    "text inside a call": (
        "disabled",
        (HEAD + ns("~<path>p~</path> and ~<content>c~</content>") + TAIL,),
        Reply("", "and", (("write", {"path": "p", "content": "c"}),), "tool_calls"),
    ),
    "the ends of calls and thinking in a value": (
        "enabled",
        (f"Hm.</mm:think>{block(CLOSERS)}",),
        Reply("Hm.", "", (CLOSERS,), "tool_calls"),
    ),
    "thinking after a call": (
        "enabled",
        (f"a{block(NOW)}b</mm:think>c{block(WRITE)}<mm:think>d",),
        Reply("abd", "c", (NOW, WRITE), "tool_calls"),
    ),
    "delimiters in values": ("disabled", (block(QUOTED),), Reply("", "", (QUOTED,), "tool_calls")),
    "a block without its end": (
        "disabled",
        (block(WRITE).removesuffix(f"\n{NS}</tool_call>"),),
        Reply("", "", (WRITE,), "tool_calls"),
    ),
    "a first parameter without its tag": (
        "disabled",
        (ns('~<tool_call>\n~<invoke name="write">~a.txt~</path>~<content>b~</content>') + TAIL,),
        Reply("", "", (("write", {"path": "a.txt", "content": "b"}),), "tool_calls"),
    ),
    "an unknown function": (
        "disabled",
        (f"See: {block(('rm', {'x': '1'}))}",),
        Reply("", f"See: {block(('rm', {'x': '1'}))}", (), "stop"),
    ),
    "markup that is no call": (
        "disabled",
        (ns("Write ~<tool_call> and then ~<b> and ~."),),
        Reply("", ns("Write ~<tool_call> and then ~<b> and ~."), (), "stop"),
    ),
}
"""Case -> (thinking mode, the reply's pieces, what the client gets)."""


@dataclass(frozen=True)
class End:
    """A reply that does not come to its own end.

    `shown` is where the limit of tokens stops it, if it does; `streamed` is what a streaming client gets, if
    that is something else.
    """

    mode: str
    text: str
    reply: Reply
    streamed: Reply | None = None
    shown: str = ""
    stop: tuple[str, ...] = ()


_TWO_CALLS = f"One {block(NOW)} two {block(WRITE)}"
_INSIDE = _TWO_CALLS[: _TWO_CALLS.index("hello") + len("hello")]
_CUT = block(WRITE)[: block(WRITE).index("hello")]

ENDS = {
    "the limit inside thinking": End(
        "enabled",
        "Two and two are four</mm:think>Four.",
        Reply("Two and two", "", (), "length"),
        shown="Two and two",
    ),
    "the limit in an answer": End(
        "adaptive",
        "<mm:think>Hm.</mm:think>Two and two",
        Reply("Hm.", "Two", (), "length"),
        shown="<mm:think>Hm.</mm:think>Two",
    ),
    "the limit after a call": End(
        "disabled",
        f"{block(WRITE)} and more",
        Reply("", " and", (WRITE,), "length"),
        shown=f"{block(WRITE)} and",
    ),
    "the limit inside a call": End(
        "disabled",
        _TWO_CALLS,
        Reply("", _INSIDE.replace(block(NOW), ""), (NOW,), "length"),
        Reply("", "One  two ", (NOW, ("write", '{"path": "a.txt", "content": "hello')), "length"),
        shown=_INSIDE,
    ),
    "the end of the turn inside a call": End(
        "disabled",
        _CUT,
        Reply("", _CUT, (), "stop"),
        Reply("", "", (("write", '{"path": "a.txt", "content": "'),), "stop"),
    ),
    "a stop string": End("disabled", "One. Two.", Reply("", "One.", (), "stop"), stop=(" Two",)),
}
"""Case -> what ends the reply early, and what the client gets then."""
