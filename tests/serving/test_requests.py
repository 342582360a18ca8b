"""What a request says about thinking reaches the prompt, whatever the API; what it gets wrong is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.parsing.writing import block
from tests.serving import forced
from tests.serving.conftest import Endpoint
from tests.serving.reply_clients import Served, chat_tools, clients

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"path": "chat/completions", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "messages": {"path": "messages", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "responses": {"path": "responses", "input": "Hi", "max_output_tokens": 4},
}
"""API -> a request's path below `/v1` and its other fields."""

OPEN, CLOSED, FREE = "<mm:think>", "</mm:think>", ""
BUDGET = {"budget_tokens": 1024}
THINKING: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat, nothing": ("chat", {}, FREE),
    "chat, thinking.type enabled": ("chat", {"thinking": {"type": "enabled"}}, OPEN),
    "chat, thinking.type disabled": ("chat", {"thinking": {"type": "disabled"}}, CLOSED),
    "chat, thinking.type adaptive": ("chat", {"thinking": {"type": "adaptive"}}, FREE),
    "chat, thinking_mode before thinking.type": (
        "chat",
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking_mode": "disabled"}},
        CLOSED,
    ),
    "chat, reasoning_effort none": ("chat", {"reasoning_effort": "none"}, CLOSED),
    "chat, reasoning_effort minimal": ("chat", {"reasoning_effort": "minimal"}, CLOSED),
    "chat, reasoning_effort high": ("chat", {"reasoning_effort": "high"}, FREE),
    "messages, nothing": ("messages", {}, FREE),
    "messages, thinking.type enabled": ("messages", {"thinking": {"type": "enabled", **BUDGET}}, OPEN),
    "messages, thinking.type disabled": ("messages", {"thinking": {"type": "disabled"}}, CLOSED),
    "messages, thinking.type adaptive": ("messages", {"thinking": {"type": "adaptive"}}, FREE),
    "messages, effort minimal": ("messages", {"output_config": {"effort": "minimal"}}, CLOSED),
    "responses, nothing": ("responses", {}, FREE),
    **{
        f"responses, thinking_mode {mode}": (
            "responses",
            {"chat_template_kwargs": {"thinking_mode": mode}},
            end,
        )
        for mode, end in (("enabled", OPEN), ("disabled", CLOSED), ("adaptive", FREE))
    },
    "responses, effort none": ("responses", {"reasoning": {"effort": "none"}}, CLOSED),
    "responses, effort minimal": ("responses", {"reasoning": {"effort": "minimal"}}, CLOSED),
    "responses, effort high": ("responses", {"reasoning": {"effort": "high"}}, FREE),
}
"""Case -> (API, a request's fields, what they leave at the prompt's end)."""


def post(served: Served, api: str, headers: dict[str, str] | None = None, **fields: Any) -> requests.Response:
    request = {"model": served.model, **REQUESTS[api], **fields}
    return requests.post(f"{served.url}/v1/{request.pop('path')}", json=request, headers=headers, timeout=60)


@pytest.fixture
def prompt(served: Served, tmp_path: Path) -> Callable[..., str]:
    """`prompt(api, fields)`: the rendered prompt of a request."""

    def render(api: str, **fields: Any) -> str:
        file = tmp_path / "prompt.json"
        answer = post(served, api, {forced.PROMPT_HEADER: str(file)}, **fields)
        assert answer.status_code == 200, answer.text
        sent = json.loads(file.read_text())
        return sent["text"] or served.write.tokenizer.decode(sent["input_ids"])

    return render


@pytest.mark.parametrize("case", tuple(THINKING))
def test_each_way_to_ask_for_thinking_reaches_the_prompt(prompt: Callable[..., str], case: str) -> None:
    api, fields, end = THINKING[case]
    assert prompt(api, **fields).endswith(f"]~b]ai\n{end}")


EFFORT_FIELDS: dict[str, tuple[Callable[[str], dict[str, Any]], dict[str, Any]]] = {
    "chat": (lambda effort: {"reasoning_effort": effort}, {"thinking": {"type": "disabled"}}),
    "messages": (lambda effort: {"output_config": {"effort": effort}}, {"thinking": {"type": "disabled"}}),
    "responses": (
        lambda effort: {"reasoning": {"effort": effort}},
        {"chat_template_kwargs": {"thinking_mode": "disabled"}},
    ),
}
"""API -> (what asks for an effort, what turns thinking off)."""


@pytest.mark.parametrize("effort", ("low", "medium", "high", "xhigh", "max"))
@pytest.mark.parametrize("api", tuple(EFFORT_FIELDS))
def test_every_effort_reaches_the_prompt_unless_thinking_is_off(
    prompt: Callable[..., str], api: str, effort: str
) -> None:
    line = f"Reasoning effort: {effort}[e~["
    fields, off = EFFORT_FIELDS[api]
    assert line in prompt(api, **fields(effort))
    assert "Reasoning effort" not in prompt(api, **fields(effort), **off)


ROOTED = [{"role": "root", "content": "Obey."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("api", "fields"),
    (
        ("chat", {"messages": ROOTED}),
        ("responses", {"input": ROOTED}),
        ("responses", {"input": ROOTED, "instructions": "Be kind."}),
    ),
)
def test_a_leading_root_message_is_its_own_turn(
    prompt: Callable[..., str], api: str, fields: dict[str, Any]
) -> None:
    assert prompt(api, **fields).startswith("]~!b[]~b]root\nObey.[e~[\n]~b]system\n")


def test_one_turn_of_the_responses_endpoint_is_one_turn_of_the_prompt(prompt: Callable[..., str]) -> None:
    """Whatever phases its texts are said to have."""
    items = [
        {"type": "message", "role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": "I look.", "phase": "commentary"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"},
        {"type": "function_call_output", "call_id": "a", "output": "b"},
    ]
    call = block(("f", {}))
    turns = f"]~b]ai\n<mm:think>Hm.</mm:think>I look.{call}[e~[\n]~b]tool\n<response>b</response>[e~[\n"
    assert prompt("responses", input=items).endswith(f"{turns}]~b]ai\n")


USER = {"role": "user", "content": "Hi"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "thinking_mode": ({"chat_template_kwargs": {"thinking_mode": "maybe"}}, "thinking_mode"),
    "thinking.type": ({"thinking": {"type": "on"}}, "thinking.type"),
    "reasoning_effort": ({"reasoning_effort": "banana"}, "reasoning_effort"),
    "an effort of other models": ({"reasoning_effort": "ultra"}, "reasoning_effort must be"),
    "an effort in numbers": ({"reasoning_effort": 0.5}, "reasoning_effort must be"),
    "an effort for the template": (
        {"chat_template_kwargs": {"reasoning_effort": "huge"}},
        "reasoning_effort must be",
    ),
    "tool_choice": ({"tools": chat_tools(), "tool_choice": "perhaps"}, "tool_choice"),
    "tool_choice of an unknown tool": (
        {"tools": chat_tools(), "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "rm",
    ),
    "required without tools": ({"tool_choice": "required"}, "ools cannot be empty"),
    "a root message that is not first": (
        {"messages": [USER, {"role": "root", "content": "Obey."}]},
        "root",
    ),
    "a role": ({"messages": [{"role": "robot", "content": "Hi"}]}, "role"),
    "a result without a call": (
        {"messages": [USER, {"role": "tool", "tool_call_id": "a", "content": "b"}]},
        "tool",
    ),
    "arguments that are no object": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"id": "a", "type": "function", "function": {"name": "now", "arguments": "[]"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "b"},
            ]
        },
        "object",
    ),
}
"""What is wrong with a chat request -> (its fields, what the message must mention)."""

BAD_ELSEWHERE: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages, thinking.type": ("messages", {"thinking": {"type": "on"}}, "thinking"),
    "messages, effort": ("messages", {"output_config": {"effort": "ultra"}}, "effort"),
    "responses, effort": ("responses", {"reasoning": {"effort": "banana"}}, "effort"),
    "responses, an effort of other models": (
        "responses",
        {"reasoning": {"effort": "ultra"}},
        "reasoning_effort must be",
    ),
    "responses, thinking_mode": (
        "responses",
        {"chat_template_kwargs": {"thinking_mode": "maybe"}},
        "thinking_mode",
    ),
}
"""The same for other APIs, with the API first."""


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))
@pytest.mark.parametrize("case", (*BAD, *BAD_ELSEWHERE))
def test_an_unknown_value_is_refused_with_its_name(served: Served, case: str, stream: bool) -> None:
    api, fields, mention = BAD_ELSEWHERE[case] if case in BAD_ELSEWHERE else ("chat", *BAD[case])
    answer = post(served, api, **fields, stream=stream)
    assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:500]}"
    assert mention in answer.text, answer.text
