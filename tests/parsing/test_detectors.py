"""SGLang's parsers with our detectors in them, streaming and not, as its server runs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Function, Tool, ToolChoice
from sglang.srt.environ import envs
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_m3.parsing import register, replies
from sglang_m3.parsing.events import Event
from sglang_m3.parsing.markup import THINK_CLOSE, THINK_OPEN
from sglang_m3.parsing.reasoning import M3ReasoningDetector
from sglang_m3.parsing.tool_calls import M3ToolCallDetector
from tests.parsing.transcripts import HEAD, TAIL, TRANSCRIPTS, WRITE
from tests.parsing.writing import FUNCTIONS, arguments, block, calls, content, ns, read, reasoning

NAME = "minimax-m3"
TOOLS = [Tool(function=Function(name=name, parameters=schema)) for name, schema in FUNCTIONS.items()]
UNCONSTRAINED = {
    "type": "object",
    "properties": {
        "any": {},
        "list": {"type": "array"},
        "free": {"type": "object"},
        "map": {"type": ["object", "null"], "additionalProperties": {"type": "integer"}},
        "deep": {"items": True},
    },
    "additionalProperties": True,
}

every = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda t: t.rule.replace(" ", "-"))


@pytest.fixture(autouse=True, scope="module")
def registered():
    before = ReasoningParser.DetectorMap[NAME], FunctionCallParser.ToolCallParserEnum[NAME]
    register.register()
    yield before
    ReasoningParser.DetectorMap[NAME], FunctionCallParser.ToolCallParserEnum[NAME] = before


def reasoning_parser(
    thinking: bool, mode: str = "", tools: Sequence[Tool] = (), **template: Any
) -> ReasoningParser:
    kwargs = template | ({"thinking_mode": mode} if mode else {})
    request = SimpleNamespace(chat_template_kwargs=kwargs, tools=tools)
    parser = ReasoningParser(NAME, force_reasoning=None if mode else thinking, request=request)
    replies.after_reasoning_parser_init(None, parser, NAME, request=request)
    return parser


def whole(text: str, thinking: bool, tools: list[Tool]) -> tuple[str, str, list[tuple[str, Any]]]:
    """As `OpenAIServingChat` reads a reply that does not stream."""
    thought, rest = reasoning_parser(thinking, tools=tools).parse_non_stream(text)
    parser = FunctionCallParser(tools, NAME)
    found = []
    if parser.has_tool_call(rest):
        rest, found = parser.parse_non_stream(rest)
    assert [call.tool_index for call in found] == list(range(len(found)))
    return thought, rest, [(call.name, json.loads(call.parameters)) for call in found]


def streamed(
    text: str, size: int, thinking: bool, tools: list[Tool]
) -> tuple[str, str, dict[int, list[str]], set]:
    """As `OpenAIServingChat` reads a reply that streams: both parsers on every piece, then both ends."""
    first, second = reasoning_parser(thinking, tools=tools), FunctionCallParser(tools, NAME)
    thought, rest = "", ""
    found: dict[int, list[str]] = {}
    for start in range(0, len(text), size):
        more, normal = first.parse_stream_chunk(text[start : start + size])
        if start + size >= len(text):
            end_more, end_normal = first.parse_stream_end()
            more, normal = more + end_more, normal + end_normal
        thought += more
        normal, items = second.parse_stream_chunk(normal)
        if start + size >= len(text):
            end_normal, end_items = second.parse_stream_end()
            normal, items = normal + end_normal, items + end_items
        rest += normal
        for item in items:
            if item.name:
                assert item.tool_index == len(found)
                found[item.tool_index] = [item.name, ""]
            found[item.tool_index][1] += item.parameters
    return thought, rest, found, second.detector.incomplete_tool_call_indices


def expected_events(transcript) -> tuple[list[Event], list[Tool]]:
    tools = [] if transcript.undeclared else TOOLS
    return read([transcript.text], thinking=transcript.thinking, undeclared=transcript.undeclared), tools


def test_the_names_are_ours(registered):
    assert isinstance(reasoning_parser(False).detector, M3ReasoningDetector)
    assert isinstance(FunctionCallParser(TOOLS, NAME).detector, M3ToolCallDetector)
    assert registered[0] is not M3ReasoningDetector
    assert ReasoningParser.DetectorMap["minimax"] is not M3ReasoningDetector
    assert FunctionCallParser.ToolCallParserEnum["minimax-m2"] is not M3ToolCallDetector


@every
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_streaming_is_the_parser(transcript, size):
    events, tools = expected_events(transcript)
    thought, rest, found, incomplete = streamed(transcript.text, size, transcript.thinking, tools)
    assert thought == reasoning(events)
    assert rest == content(events)
    assert {index: text for index, (_, text) in found.items()} == arguments(events)
    complete = [(name, json.loads(text)) for index, (name, text) in found.items() if index not in incomplete]
    assert complete == calls(events)
    assert bool(incomplete) == transcript.cut_off


@every
def test_whole_replies_are_the_parser(transcript):
    events, tools = expected_events(transcript)
    thought, rest, found = whole(transcript.text, transcript.thinking, tools)
    assert thought == reasoning(events)
    assert found == calls(events)
    assert rest == (transcript.text if transcript.cut_off else content(events))


def test_a_cut_off_call_is_content_where_calls_count_as_complete():
    text = f"One {block(WRITE)} two {HEAD}" + ns("~<path>a~</path> stray ~<content>b")
    _, rest, found = whole(text, False, TOOLS)
    assert found == [WRITE]
    assert rest == text.replace(block(WRITE), "")


@pytest.mark.parametrize(
    ("mode", "text", "expected"),
    [
        ("enabled", "a</mm:think>b", ("a", "b")),
        ("disabled", "b", ("", "b")),
        ("disabled", "</mm:think>b", ("", "b")),
        ("adaptive", "<mm:think>a</mm:think>b", ("a", "b")),
        ("adaptive", "</mm:think>b", ("", "b")),
    ],
)
def test_modes_of_a_request(mode, text, expected):
    assert reasoning_parser(False, mode).parse_non_stream(text) == expected
    parser = reasoning_parser(False, mode)
    pieces = [*map(parser.parse_stream_chunk, text), parser.parse_stream_end()]
    assert tuple(map("".join, zip(*pieces))) == expected


@pytest.mark.parametrize(
    ("mode", "before", "expected"),
    [
        ("adaptive", "<mm:think>Hm", ("a", "b")),
        ("adaptive", "<mm:think>Hm</mm:think>", ("", "ab")),
        ("adaptive", "Yes", ("", "ab")),
        ("enabled", "Hm", ("a", "b")),
        ("enabled", "Hm</mm:think>", ("", "ab")),
        ("adaptive", block(("write", {"content": THINK_OPEN})), ("", "ab")),
    ],
)
def test_a_message_that_goes_on_keeps_its_state(mode, before, expected):
    request = ChatCompletionRequest(
        model="m3",
        messages=[
            {"role": "user", "content": f"What does {THINK_OPEN} mean?"},
            {"role": "assistant", "content": before},
        ],
        continue_final_message=True,
        chat_template_kwargs={"thinking_mode": mode},
    )
    assert ReasoningParser(NAME, request=request).parse_non_stream(f"a{THINK_CLOSE}b") == expected


def test_markers_quoted_in_the_prompt_change_nothing():
    request = ChatCompletionRequest(
        model="m3",
        messages=[{"role": "user", "content": THINK_OPEN}, {"role": "assistant", "content": THINK_OPEN}],
        chat_template_kwargs={},
    )
    assert ReasoningParser(NAME, request=request).parse_non_stream("b") == ("", "b")


def test_thinking_can_be_held_until_it_pauses():
    parser = ReasoningParser(NAME, stream_reasoning=False, force_reasoning=True)
    pieces = [*map(parser.parse_stream_chunk, f"abc{THINK_CLOSE}d{THINK_OPEN}ef"), parser.parse_stream_end()]
    assert [piece for piece in pieces if any(piece)] == [("abc", ""), ("", "d"), ("ef", "")]


@pytest.mark.parametrize("size", [1, 99])
def test_nothing_but_thinking_becomes_content_on_request(size):
    def run(text: str) -> list[tuple[str, str]]:
        parser = reasoning_parser(True, force_nonempty_content=True)
        return [
            *(parser.parse_stream_chunk(text[at : at + size]) for at in range(0, len(text), size)),
            parser.parse_stream_end(),
        ]

    assert "".join(normal for _, normal in run("only this")) == "only this"
    assert "".join(normal for _, normal in run(f"this{THINK_CLOSE}that")) == "that"
    parsed = reasoning_parser(True, force_nonempty_content=True).parse_non_stream("only this")
    assert parsed == ("", "only this")


def test_whitespace_after_a_call_comes_with_the_text_that_follows():
    parser = FunctionCallParser(TOOLS, NAME)
    pieces = (" ", OTHER, "\n", "\n", "So", " ", "it is.", OTHER, "\n")
    texts = [*(parser.parse_stream_chunk(piece)[0] for piece in pieces), parser.parse_stream_end()[0]]
    assert texts == [" ", "", "", "", "\n\nSo", " ", "it is.", "", "", "\n"]


def test_unknown_functions_follow_the_servers_option():
    text = block(("rm", {"x": "1"}))
    assert whole(text, False, TOOLS) == ("", text, [])
    assert whole(text, False, []) == ("", "", [("rm", {"x": "1"})])
    with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
        assert whole(text, False, TOOLS) == ("", "", [("rm", {"x": "1"})])


def test_without_a_reasoning_parser_thinking_stays_in_the_text():
    parser = FunctionCallParser(TOOLS, NAME)
    text, found = parser.parse_non_stream(f"{THINK_OPEN}a{block(WRITE)}{THINK_CLOSE}b")
    assert text == f"{THINK_OPEN}a{THINK_CLOSE}b"
    assert [call.name for call in found] == ["write"]


def accepts(tag: Any, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    return _is_grammar_accept_string(xgrammar.Grammar.from_structural_tag(tag), text)


GOOD = (
    HEAD + ns("~<path>p~</path>~<content>c~</content>~<mode>3~</mode>~<tags>~<item>x~</item>~</tags>") + TAIL
)
BAD = GOOD.replace("3", "three")
OTHER = ns('~<tool_call>\n~<invoke name="now">~</invoke>\n~</tool_call>')


@pytest.mark.parametrize(
    ("choice", "accepted", "refused"),
    [
        ("required", (GOOD, OTHER), (BAD, "Four.")),
        (ToolChoice(function={"name": "write"}), (GOOD,), (BAD, OTHER, "Four.")),
    ],
    ids=["required", "named"],
)
def test_forced_calls_come_in_the_models_own_format(choice, accepted, refused):
    parser = FunctionCallParser(TOOLS, NAME)
    assert parser.owns_tool_format()
    kind, tag = parser.get_structure_constraint(choice)
    assert kind == "structural_tag"
    assert [accepts(tag, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(tag, text) for text in refused] == [False] * len(refused)


def test_what_the_tag_admits_is_read():
    assert [call[0] for call in whole(GOOD + OTHER, False, TOOLS)[2]] == ["write", "now"]


def test_one_call_if_parallel_calls_are_off():
    parser = FunctionCallParser(TOOLS, NAME)
    _, tag = parser.get_structure_constraint("required", parallel_tool_calls=False)
    assert [accepts(tag, text) for text in (OTHER, OTHER + OTHER)] == [True, False]


def test_the_tag_can_hold_the_thinking():
    _, tag = FunctionCallParser(TOOLS, NAME).get_structure_constraint("required", thinking_mode=True)
    assert [accepts(tag, text) for text in (f"Hm.{THINK_CLOSE}{OTHER}", OTHER)] == [True, False]


@pytest.mark.parametrize(
    "choice", ["required", ToolChoice(function={"name": "now"})], ids=["required", "named"]
)
def test_the_tag_can_leave_thinking_to_the_model(choice):
    tag = M3ToolCallDetector().get_structural_tag(TOOLS, choice, "auto")
    accepted = (OTHER, f"{THINK_CLOSE}{OTHER}", f"{THINK_OPEN}Hm.{THINK_CLOSE}{OTHER}")
    refused = (
        f"Hm.{THINK_CLOSE}{OTHER}",
        f"{THINK_OPEN}Hm.{THINK_CLOSE}",
        f"{THINK_CLOSE}Four.",
        THINK_CLOSE,
    )
    assert [accepts(tag, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(tag, text) for text in refused] == [False] * len(refused)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_free_choices_are_not_constrained(choice):
    assert FunctionCallParser(TOOLS, NAME).get_structure_constraint(choice) is None


def test_calls_of_strict_tools_follow_their_schemas_where_the_choice_is_free():
    tools = [Tool(function=tool.function.model_copy(update={"strict": True})) for tool in TOOLS]
    kind, tag = FunctionCallParser(tools, NAME).get_structure_constraint("auto")
    assert kind == "structural_tag"
    assert [accepts(tag, text) for text in ("Four.", GOOD, f"So: {GOOD}{OTHER}", BAD)] == [True] * 3 + [False]
    _, tag = FunctionCallParser(tools, NAME).get_structure_constraint("auto", thinking_mode=True)
    assert [accepts(tag, f"Hm.{THINK_CLOSE}{text}") for text in ("Four.", GOOD, BAD)] == [True, True, False]


@pytest.mark.parametrize("strict", [False, True])
def test_tools_with_unconstrained_arguments_can_be_forced(strict):
    tool = Tool(function=Function(name="f", parameters=UNCONSTRAINED, strict=strict))
    _, tag = FunctionCallParser([tool], NAME).get_structure_constraint("required")
    text = ns('~<tool_call>\n~<invoke name="f">~<any>x~</any>~<list>~<item>y~</item>~</list>')
    text += ns('~<free>{"k": [1]}~</free>~<map>{"m": 2}~</map>~<deep>~<item>w~</item>~</deep>') + TAIL
    assert accepts(tag, text)
    expected = {"any": "x", "list": ["y"], "free": {"k": [1]}, "map": {"m": 2}, "deep": ["w"]}
    assert whole(text, False, [tool])[2] == [("f", expected)]


def test_tools_without_parameters_can_be_forced():
    for parameters in (None, {}, {"type": "object"}):
        tool = Tool(function=Function(name="now", parameters=parameters))
        _, tag = FunctionCallParser([tool], NAME).get_structure_constraint("required")
        assert accepts(tag, OTHER), parameters
