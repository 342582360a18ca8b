"""The chat template keeps M3's contract with the servers, parsers and processors that rely on it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.minimax_m3 import MinimaxM3Detector
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    jinja_template_reads_reasoning_content,
)
from sglang.srt.parser.reasoning_parser import ReasoningParser
from transformers import PreTrainedTokenizerBase

NS = "]<]minimax[>["
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "at": {
                    "type": "object",
                    "properties": {
                        "lat": {"type": "number"},
                        "tags": {"type": "array", "items": {"type": "string"}},
                    },
                },
            },
        },
    },
}
ARGUMENTS = {"place": "Zürich <1>", "days": 3, "hourly": False, "at": {"lat": 47.5, "tags": ["a b", ""]}}


def assistant(content: str = "", thinking: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": str(n), "function": f} for n, f in enumerate(calls)
        ]
    return message


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def render(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any], **options: Any) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def turns(tokenizer: PreTrainedTokenizerBase, *messages: dict[str, Any], **options: Any) -> list[str]:
    """Rendered turns after the system turn, without their markers."""
    text = render(tokenizer, *messages, **options)
    assert text.startswith("]~!b[") and text.count("]~!b[") == 1
    return [turn.removesuffix("[e~[\n") for turn in text.split("]~b]")[2:]]


@pytest.mark.parametrize(
    "options, opening",
    [
        ({}, ""),
        ({"thinking_mode": None}, ""),
        ({"thinking_mode": "adaptive"}, ""),
        ({"thinking_mode": "enabled"}, "<mm:think>"),
        ({"thinking_mode": "disabled"}, "</mm:think>"),
    ],
)
def test_generation_prompt_opens_as_the_thinking_mode_says(
    tokenizer: PreTrainedTokenizerBase, options: dict[str, Any], opening: str
) -> None:
    assert render(tokenizer, USER, add_generation_prompt=True, **options).endswith(f"]~b]ai\n{opening}")


@pytest.mark.parametrize("mode", ["adaptive", "enabled", "disabled"])
def test_answer_parses_back_after_the_generation_prompt(
    tokenizer: PreTrainedTokenizerBase, mode: str
) -> None:
    """What the model would have to write for a given turn, split again by SGLang's reasoning parser."""
    thinking = None if mode == "disabled" else "because"
    prompt = render(tokenizer, USER, add_generation_prompt=True, thinking_mode=mode)
    whole = render(tokenizer, USER, assistant("so", thinking), thinking_mode=mode)
    assert whole.startswith(prompt), (prompt, whole)
    written = whole.removeprefix(prompt).removesuffix("[e~[\n")
    parser = ReasoningParser("minimax-m3", stream_reasoning=False, force_reasoning=mode == "enabled")
    assert parser.parse_non_stream(written) == (thinking or "", "so")


def test_every_turn_keeps_its_thinking(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rendered = turns(
        tokenizer,
        USER,
        assistant("", "t1", call(place="x")),
        {"role": "tool", "content": "r1"},
        assistant("a1", "t2"),
        {"role": "user", "content": "more"},
        assistant("", "t3", call(place="y")),
        {"role": "tool", "content": "r2"},
        assistant("a2", "t4"),
    )
    assert [turn.split("\n")[0] for turn in rendered] == [
        "user",
        "ai",
        "tool",
        "ai",
        "user",
        "ai",
        "tool",
        "ai",
    ]
    openings = [turn.split("\n")[1].split(NS)[0] for turn in rendered if turn.startswith("ai\n")]
    assert openings == [
        "<mm:think>t1</mm:think>",
        "<mm:think>t2</mm:think>a1",
        "<mm:think>t3</mm:think>",
        "<mm:think>t4</mm:think>a2",
    ]


@pytest.mark.parametrize("content", ["<mm:think>t</mm:think>a", "t</mm:think>a"])
def test_thinking_inside_the_content_counts_as_thinking(
    tokenizer: PreTrainedTokenizerBase, content: str
) -> None:
    assert turns(tokenizer, USER, assistant(content))[-1] == "ai\n<mm:think>t</mm:think>a"
    assert turns(tokenizer, USER, assistant(content), USER)[1] == "ai\n<mm:think>t</mm:think>a"


def test_continued_conversation_extends_the_rendered_prefix(tokenizer: PreTrainedTokenizerBase) -> None:
    """A tool round must extend the prompt so that the radix cache serves all of the earlier turns."""
    messages = [
        {"role": "system", "content": "s"},
        USER,
        assistant("", "t", call(**ARGUMENTS), call(place="y")),
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
        assistant("done", "u"),
    ]
    texts = [render(tokenizer, *messages[:n], tools=[WEATHER]) for n in (2, 3, 5, 6)]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(texts))


def test_root_comes_before_system_and_only_first(tokenizer: PreTrainedTokenizerBase) -> None:
    root, system = {"role": "root", "content": "R"}, {"role": "system", "content": "S"}
    text = render(tokenizer, root, system, USER, tools=[WEATHER])
    assert text.startswith("]~!b[]~b]root\nR[e~[\n]~b]system\nS\n\n")
    assert text.index("<tool>") < text.index("]~b]user\nhi[e~[\n")
    with pytest.raises(TemplateError, match="root"):
        render(tokenizer, USER, root)


def test_tools_and_effort_appear_only_when_given(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = render(tokenizer, USER)
    assert "tool" not in plain and "effort" not in plain
    assert "effort: high" in render(tokenizer, USER, reasoning_effort="high")
    with_tools = render(tokenizer, USER, tools=[WEATHER])
    body = with_tools.split("<tool>")[1].split("</tool>")[0]
    assert json.loads(body) == WEATHER["function"]
    flat = render(tokenizer, USER, tools=[WEATHER["function"]])
    assert flat == with_tools


def test_tool_results_of_one_round_share_a_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    results = [{"role": "tool", "content": text} for text in ("r1", "r2")]
    rendered = turns(
        tokenizer, USER, assistant("", None, call(), call()), *results, assistant("a"), *results[:1]
    )
    assert rendered[2] == "tool\n<response>r1</response>\n<response>r2</response>"
    assert rendered[4] == "tool\n<response>r1</response>"


def test_sglang_parses_rendered_calls_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = turns(tokenizer, USER, assistant("look: ", None, call(**ARGUMENTS), call(place="y")))[-1]
    parsed = MinimaxM3Detector().detect_and_parse(text, [Tool(**WEATHER)])
    assert [json.loads(item.parameters) for item in parsed.calls] == [ARGUMENTS, {"place": "y"}]
    assert parsed.normal_text.strip() == "ai\n</mm:think>look:"


def element(text: str, at: int) -> tuple[str, Any, int]:
    """Reads the element at `at`: (tag, value, end). A value is text, or a list of (tag, value) children."""
    assert text.startswith(f"{NS}<", at), text[at:]
    close = text.index(">", at + len(NS))
    tag = text[at + len(NS) + 1 : close]
    at = close + 1
    children = []
    while text.startswith(f"{NS}<", at) and not text.startswith(f"{NS}</", at):
        name, value, at = element(text, at)
        children.append((name, value))
    stop = text.index(f"{NS}</{tag}>", at)
    return tag, children or text[at:stop], stop + len(f"{NS}</{tag}>")


def expected(value: Any) -> Any:
    if isinstance(value, dict) and value:
        return [(name, expected(child)) for name, child in value.items()]
    if isinstance(value, list) and value:
        return [("item", expected(child)) for child in value]
    return "" if isinstance(value, dict | list) else value if isinstance(value, str) else json.dumps(value)


names = st.text("abcdefgh_", min_size=1, max_size=4)
strings = st.text().filter(lambda text: NS not in text)
values = st.recursive(
    strings | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, deadline=None)
@given(arguments=st.dictionaries(names, values, max_size=3))
def test_every_tag_of_a_call_is_namespaced_and_every_value_verbatim(
    tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
) -> None:
    turn = turns(tokenizer, USER, assistant("", None, call("f", **arguments)))[-1]
    start, stop = f'{NS}<tool_call>\n{NS}<invoke name="f">', f"{NS}</invoke>\n{NS}</tool_call>"
    body = turn.removeprefix("ai\n</mm:think>").removeprefix(start).removesuffix(stop)
    found, at = [], 0
    while at < len(body):
        tag, value, at = element(body, at)
        found.append((tag, value))
    assert found == (expected(arguments) or [])


@pytest.mark.parametrize(
    "part, token",
    [
        ({"type": "image"}, "]<]image[>["),
        ({"type": "image_url", "image_url": {"url": "u"}}, "]<]image[>["),
        ({"type": "video"}, "]<]video[>["),
        ({"type": "video_url", "video_url": {"url": "u"}}, "]<]video[>["),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_media_become_one_placeholder_in_place(
    tokenizer: PreTrainedTokenizerBase, part: dict[str, Any], token: str, role: str
) -> None:
    content = [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}]
    assert f"a{token}b" in turns(tokenizer, USER, {"role": role, "content": content})[-1]


@pytest.mark.parametrize(
    "messages, options, complaint",
    [
        ([USER], {"thinking_mode": "on"}, "thinking_mode"),
        ([{"role": "user", "content": [{"type": "audio"}]}], {}, "audio"),
        ([{"role": "narrator", "content": "x"}], {}, "narrator"),
        ([USER, assistant("", None, {"name": "f", "arguments": "[1]"})], {}, "must be an object"),
    ],
)
def test_what_the_format_cannot_express_is_an_error(
    tokenizer: PreTrainedTokenizerBase, messages: list, options: dict, complaint: str
) -> None:
    with pytest.raises(TemplateError, match=complaint):
        render(tokenizer, *messages, **options)


def test_sglang_recognises_what_the_template_can_do(tokenizer: PreTrainedTokenizerBase) -> None:
    assert detect_jinja_template_content_format(tokenizer.chat_template) == "openai"
    assert jinja_template_reads_reasoning_content(tokenizer.chat_template)
