"""A reply's way to the client: what the reasoning parser knows of the request, and the order of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest

from sglang_m3.parsing import replies

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "request_",
    [
        ChatCompletionRequest(model="m3", messages=[{"role": "user", "content": "a"}], tools=[TOOL]),
        ChatCompletionRequest(
            model="m3",
            messages=[
                {"role": "system", "content": "s", "tools": [TOOL]},
                {"role": "user", "content": "a"},
            ],
        ),
        ResponsesRequest(input="a", tools=[{"type": "function", **FUNCTION}, {"type": "web_search"}]),
    ],
    ids=["chat", "chat-message", "responses"],
)
def test_the_functions_of_a_request_are_declared_wherever_it_has_them(request_):
    assert replies.declared_functions(request_)["f"] == SCHEMA


def test_a_custom_tool_is_a_function_of_one_text():
    request = ResponsesRequest(input="a", tools=[{"type": "custom", "name": "f"}])
    (properties,) = [schema["properties"] for schema in replies.declared_functions(request).values()]
    assert [schema["type"] for schema in properties.values()] == ["string"]


def event(content: str = "", reasoning: str = "", call: tuple[int, str, str] | None = None) -> str:
    """A chat completion chunk as the server sends it; `call` is (index, name, arguments)."""
    delta: dict[str, Any] = {"content": content or None, "reasoning_content": reasoning or None}
    if call is not None:
        function = {"name": call[1] or None, "arguments": call[2]}
        delta["tool_calls"] = [{"index": call[0], "function": function}]
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


THOUGHT, TEXT = event(reasoning="a"), event("b")
REST, START, ARGUMENTS = event(call=(0, "", "}")), event(call=(1, "f", "{")), event(call=(1, "", "}"))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([THOUGHT, TEXT], [THOUGHT, TEXT]),
        ([TEXT, REST], [REST, TEXT]),
        ([THOUGHT, TEXT, REST, START, ARGUMENTS], [REST, THOUGHT, TEXT, START, ARGUMENTS]),
        ([TEXT, START, ARGUMENTS], [TEXT, START, ARGUMENTS]),
        ([REST, START], [REST, START]),
        ([TEXT], [TEXT]),
        ([], []),
    ],
)
@pytest.mark.parametrize("parser", ["minimax-m3", "qwen"])
def test_a_call_that_was_open_is_finished_before_anything_else_and_for_m3_only(sent, expected, parser):
    async def original(serving: Any, *, index: int) -> AsyncIterator[str]:
        assert index == 3
        for each in sent:
            yield each

    async def collect() -> list[str]:
        serving = SimpleNamespace(tool_call_parser=parser)
        return [each async for each in replies.around_generate_stream_content(original, serving, index=3)]

    assert asyncio.run(collect()) == (expected if parser == "minimax-m3" else sent)
