"""Replies to dictate to a server, and what its clients must make of them."""

from __future__ import annotations

from tests.parsing.transcripts import MARKERS, TAIL
from tests.parsing.writing import NS, block, ns
from tests.serving.reply_clients import Reply

WRITE = ("write", {"path": "a.txt", "content": "hello\n"})
NOW = ("now", {})
PLAN = (
    "plan",
    {
        "steps": [{"title": "read", "done": True}, {"title": "κόσμε 🙂", "done": False}],
        "limits": {"cost": 2.5, "who": None},
    },
)
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
        (f"I write it.</mm:think>{block(WRITE)}",),
        Reply("I write it.", "", (WRITE,), "tool_calls"),
    ),
    "a call inside thinking": (
        "enabled",
        (f"I write it. {block(WRITE)}",),
        Reply("I write it. ", "", (WRITE,), "tool_calls"),
    ),
    "several calls with text around": (
        "adaptive",
        (f"First. {block(WRITE, PLAN)} Then. {block(NOW)} Done.",),
        Reply("", "First.  Then.  Done.", (WRITE, PLAN, NOW), "tool_calls"),
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
