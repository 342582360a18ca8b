"""Golden replies, one or more for every rule of the grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.parsing.writing import NS, block, invoke, ns


@dataclass(frozen=True)
class Transcript:
    rule: str
    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    thinking: bool = False
    undeclared: bool = False
    cut_off: bool = False
    """A call began and did not end."""


WRITE = ("write", {"path": "a.txt", "content": "hello\n"})
NOW = ("now", {})
MARKERS = f'a]<]b[>[c<d>&amp;{NS}e{NS}</f>{NS}<g>{NS}</invoke>\n{NS}</tool_call><mm:think>"\\\n</mm:think>'
HEAD = ns('~<tool_call>\n~<invoke name="write">')
TAIL = ns("~</invoke>\n~</tool_call>")

TRANSCRIPTS = (
    Transcript("a plain answer is content", "Four.\n", content="Four.\n"),
    Transcript("adaptive thinking opens itself", "<mm:think>Hm.</mm:think>\nYes", "Hm.", "\nYes"),
    Transcript("enabled thinking is open from the start", "Hm.</mm:think>Yes", "Hm.", "Yes", thinking=True),
    Transcript(
        "an opener that the prompt already wrote is dropped",
        "<mm:think>Hm.</mm:think>Yes",
        "Hm.",
        "Yes",
        (),
        True,
    ),
    Transcript("a leading closer is dropped", " \n</mm:think>Yes", content=" \nYes"),
    Transcript("a later closer is dropped", "Yes</mm:think>, it is", content="Yes, it is"),
    Transcript("text before thinking is content", "Well. <mm:think>Hm.</mm:think>Yes", "Hm.", "Well. Yes"),
    Transcript("thinking may come again", "<mm:think>a</mm:think>b<mm:think>c</mm:think>d", "ac", "bd"),
    Transcript("a length stop inside thinking leaves no answer", "<mm:think>Hm, if", "Hm, if"),
    Transcript("half a marker at the end is text", "Yes ]<]minimax[", content="Yes ]<]minimax["),
    Transcript("half a closer at the end is thinking", "Hm.</mm:thin", "Hm.</mm:thin", thinking=True),
    Transcript("a call", block(WRITE), calls=(WRITE,)),
    Transcript("a call without arguments", block(NOW), calls=(NOW,)),
    Transcript(
        "text around a call is kept",
        f"First. {block(WRITE)} Then.",
        content="First.  Then.",
        calls=(WRITE,),
    ),
    Transcript("calls of a block count on", block(WRITE, NOW), calls=(WRITE, NOW)),
    Transcript("calls of several blocks count on", block(WRITE) + "\n" + block(NOW), "", "\n", (WRITE, NOW)),
    Transcript(
        "a call before thinking closed is a call",
        f"<mm:think>I write it. {block(WRITE)} Done.</mm:think>Yes",
        "I write it.  Done.",
        "Yes",
        (WRITE,),
    ),
    Transcript(
        "thinking, call, thinking, call",
        f"a</mm:think>{block(NOW)}<mm:think>b</mm:think>c{block(WRITE)}",
        "ab",
        "c",
        (NOW, WRITE),
        thinking=True,
    ),
    Transcript(
        "markers in an argument are text",
        block(("write", {"content": MARKERS, "path": "]<]"})),
        calls=(("write", {"content": MARKERS, "path": "]<]"}),),
    ),
    *(
        Transcript(
            f"a text value that starts with {name} ends at its own tag",
            block(("write", {"content": ns(value), "path": "p"})) + "<mm:think>b",
            "b",
            calls=(("write", {"content": ns(value), "path": "p"}),),
        )
        for name, value in (
            ("the end of its call", "~</invoke></mm:think>x"),
            ("the end of its block", "~</tool_call>\n<mm:think>x"),
            ("an element", "~<g>~</invoke></mm:think>x"),
            ("a call", '~<invoke name="now"></mm:think>x'),
        )
    ),
    Transcript(
        "objects, arrays and types follow the schema",
        block(
            (
                "plan",
                {
                    "steps": [{"title": "1", "done": True}, {"title": "", "done": False}],
                    "limits": {"cost": 1e-3, "who": None},
                },
            )
        ),
        calls=(
            (
                "plan",
                {
                    "steps": [{"title": "1", "done": True}, {"title": "", "done": False}],
                    "limits": {"cost": 1e-3, "who": None},
                },
            ),
        ),
    ),
    Transcript(
        "repeated tags are an array",
        HEAD + ns("~<tags>a~</tags>~<tags>b~</tags>~<path>p~</path>") + TAIL,
        calls=(("write", {"tags": ["a", "b"], "path": "p"}),),
    ),
    Transcript(
        "tags that come back later join their array",
        HEAD + ns("~<tags>a~</tags>~<path>p~</path>~<tags>b~</tags>") + TAIL,
        calls=(("write", {"tags": ["a", "b"], "path": "p"}),),
    ),
    Transcript(
        "an array of one without its item tag",
        HEAD + ns("~<tags>a~</tags>") + TAIL,
        calls=(("write", {"tags": ["a"]}),),
    ),
    Transcript(
        "JSON where children belong",
        HEAD + ns('~<tags>["a", "b"]~</tags>') + TAIL,
        calls=(("write", {"tags": ["a", "b"]}),),
    ),
    Transcript(
        "whitespace between the namespace and its tag",
        ns('~ <tool_call>~\n<invoke name="write">~\t<path>p~ </path>~ </invoke>~ </tool_call>'),
        calls=(("write", {"path": "p"}),),
    ),
    Transcript(
        "an elided first tag",
        HEAD + ns("~offer.docx~</path>~<content>Hello~</content>") + TAIL,
        calls=(("write", {"path": "offer.docx", "content": "Hello"}),),
    ),
    Transcript(
        "an elided first tag and a value that looks like one",
        HEAD + ns("~<!DOCTYPE html>\n<p>Hello</p>~</content>~<path>p~</path>") + TAIL,
        calls=(("write", {"content": "<!DOCTYPE html>\n<p>Hello</p>", "path": "p"}),),
    ),
    Transcript(
        "an elided first tag with its namespace",
        HEAD + ns("offer.docx~</path>~<mode>007~</mode>") + TAIL,
        calls=(("write", {"path": "offer.docx", "mode": 7}),),
    ),
    Transcript(
        "an argument's dropped <",
        HEAD + ns("~path>p~</path>~<content>c~</content>") + TAIL,
        calls=(("write", {"path": "p", "content": "c"}),),
    ),
    Transcript(
        "an elided tag inside an array",
        HEAD + ns("~<tags>~a~</item>~<item>b~</item>~</tags>") + TAIL,
        calls=(("write", {"tags": ["a", "b"]}),),
    ),
    Transcript(
        "an invocation's dropped <",
        block(WRITE, NOW).replace("<invoke", "invoke"),
        calls=(WRITE, NOW),
    ),
    Transcript(
        "a block's end is missing",
        f"{HEAD}{NS}<path>p{NS}</path>{NS}</invoke>\n",
        "",
        "",
        (("write", {"path": "p"}),),
    ),
    Transcript("a call's end is missing", block(WRITE).replace(f"{NS}</invoke>", ""), calls=(WRITE,)),
    Transcript(
        "a call's end is missing before the next",
        ns("~<tool_call>")
        + invoke(*WRITE).removesuffix(f"{NS}</invoke>")
        + invoke(*NOW)
        + ns("~</tool_call>"),
        calls=(WRITE, NOW),
    ),
    Transcript(
        "an element's end is missing",
        ns('~<tool_call>~<invoke name="plan">~<limits>~<cost>2~</cost>~</invoke>~</tool_call>'),
        calls=(("plan", {"limits": {"cost": 2}}),),
    ),
    Transcript(
        "prose ends a block without end", f"{ns('~<tool_call>')}{invoke(*NOW)}\nSo.", "", "\nSo.", (NOW,)
    ),
    Transcript(
        "a mentioned marker is prose", ns("Write ~<tool_call> first"), "", ns("Write ~<tool_call> first")
    ),
    Transcript(
        "a mentioned marker is thought", ns("I need ~<tool_call>."), ns("I need ~<tool_call>."), thinking=True
    ),
    Transcript(
        "an empty block is text", ns("~<tool_call>~</tool_call>"), "", ns("~<tool_call>~</tool_call>")
    ),
    Transcript(
        "an invocation without a name is text",
        ns('~<tool_call>~<invoke name="">~</invoke>~</tool_call>'),
        content=ns('~<tool_call>~<invoke name="">~</invoke>~</tool_call>'),
    ),
    Transcript(
        "text that no tag claims is content",
        HEAD + ns("~<path>p~</path> and ~<content>c~</content>") + TAIL,
        content="and",
        calls=(("write", {"path": "p", "content": "c"}),),
    ),
    Transcript("an unknown function's call is text", block(("rm", {"x": 1})), "", block(("rm", {"x": 1}))),
    Transcript(
        "an unknown function between known ones",
        block(NOW, ("rm", {"x": 1}), WRITE),
        content=invoke("rm", {"x": 1}) + "\n",
        calls=(NOW, WRITE),
    ),
    Transcript(
        "an unknown function's call, if asked for",
        block(("rm", {"x": "1", "y": [True, {"z": None}]})),
        calls=(("rm", {"x": "1", "y": [True, {"z": None}]}),),
        undeclared=True,
    ),
    Transcript("a call cut off in a value", HEAD + ns("~<path>a"), cut_off=True),
    Transcript("a call cut off in an array", HEAD + ns("~<tags>~<item>a~</item>~<item>b"), cut_off=True),
    Transcript(
        "a call cut off in nested values",
        ns('~<tool_call>~<invoke name="plan">~<steps>~<item>~<title>a~</title>~<done>tr'),
        cut_off=True,
    ),
    Transcript(
        "a call cut off after text that no tag claims",
        HEAD + ns("~<path>p~</path> and ~<mode>1~</mode>~<tags>x"),
        content="and",
        cut_off=True,
    ),
    Transcript("a call cut off between its arguments", HEAD + ns("~<path>a~</path>"), cut_off=True),
    Transcript(
        "a call cut off after text",
        f"One {HEAD}{NS}<path>a",
        content="One ",
        cut_off=True,
    ),
    Transcript(
        "an untyped value that starts with a closing tag",
        ns('~<tool_call>~<invoke name="now">~<x>~</b>hello~</x>') + TAIL,
        calls=(("now", {"x": ns("~</b>hello")}),),
    ),
    Transcript(
        "an untyped value that starts with the namespace",
        ns('~<tool_call>~<invoke name="now">~<x>~a~<b>c~</x>') + TAIL,
        calls=(("now", {"x": ns("~a~<b>c")}),),
    ),
    Transcript(
        "whitespace after an unknown function's call",
        ns('~<tool_call>~<invoke name="rm">~</invoke> \n'),
        content=ns('~<tool_call>~<invoke name="rm">~</invoke> \n'),
    ),
    Transcript(
        "whitespace after a block whose call has no end",
        ns('~<tool_call>~<invoke name="now">~</tool_call> \n'),
        content=" \n",
        calls=(NOW,),
    ),
)
