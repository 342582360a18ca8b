"""Replies through the real server: what a test dictates, as the clients of three APIs receive it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import requests

from tests.parsing.writing import block
from tests.serving.reply_cases import NOW, PLAN, REPLIES, WRITE
from tests.serving.reply_clients import (
    Reply,
    Served,
    anthropic_tools,
    chat_tools,
    clients,
    response_tools,
)

pytestmark = pytest.mark.server

PAGE_TOKENS = 128


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with clients(tiny, tmp_path_factory.mktemp("replies")) as running:
        yield running


both = pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))


@both
@pytest.mark.parametrize("case", tuple(REPLIES))
def test_a_reply_reaches_the_client_whole(served: Served, case: str, stream: bool) -> None:
    mode, pieces, expected = REPLIES[case]
    assert served.chat(pieces, mode, stream=stream) == expected


@both
@pytest.mark.parametrize("case", ("an answer", "a call after thinking", "delimiters in values"))
def test_a_reply_is_the_same_in_every_api(served: Served, case: str, stream: bool) -> None:
    mode, pieces, expected = REPLIES[case]
    thinking = {"type": mode, **({"budget_tokens": 1024} if mode == "enabled" else {})}
    assert served.messages(pieces, thinking, stream=stream) == expected
    assert served.respond(pieces, mode, stream=stream) == expected


@both
def test_without_tools_in_the_request_a_call_is_read_as_by_its_text(served: Served, stream: bool) -> None:
    reply = served.chat(f"<mm:think>a</mm:think>b{block(PLAN)}", stream=stream, tools=openai.NOT_GIVEN)
    ((name, arguments),) = reply.calls
    assert (reply.reasoning, reply.content, name, reply.finish) == ("a", "b", "plan", "tool_calls")
    assert arguments["limits"] == {"cost": "2.5", "who": None}


@both
def test_calls_stay_text_when_the_request_wants_none(served: Served, stream: bool) -> None:
    reply = served.chat(f"<mm:think>a</mm:think>b{block(WRITE)}", stream=stream, tool_choice="none")
    assert reply == Reply("a", f"b{block(WRITE)}", (), "stop")


def cut(served: Served, text: str, shown: str) -> dict[str, Any]:
    """Options that stop `text` after the tokens of its beginning `shown`."""
    count = len(served.write.tokenizer(shown)["input_ids"])
    assert served.write.tokenizer.decode(served.write.tokenizer(text)["input_ids"][:count]) == shown
    return {"max_tokens": count}


@both
def test_a_length_stop_inside_thinking_leaves_reasoning_only(served: Served, stream: bool) -> None:
    text = "Two and two are four</mm:think>Four."
    reply = served.chat(text, "enabled", stream=stream, **cut(served, text, "Two and two"))
    assert reply == Reply("Two and two", "", (), "length")


@both
def test_a_length_stop_after_a_call_keeps_the_call_and_its_reason(served: Served, stream: bool) -> None:
    text = f"{block(WRITE)} and more"
    reply = served.chat(text, "disabled", stream=stream, **cut(served, text, f"{block(WRITE)} and"))
    assert reply == Reply("", " and", (WRITE,), "length")


def test_a_length_stop_inside_a_call_gives_its_text_and_no_call(served: Served) -> None:
    text = f"One {block(NOW)} two {block(WRITE)}"
    shown = text[: text.index("hello") + len("hello")]
    reply = served.chat(text, "disabled", **cut(served, text, shown))
    assert reply == Reply("", shown.replace(block(NOW), ""), (NOW,), "length")


def test_a_length_stop_inside_a_streamed_call_leaves_its_arguments_open(served: Served) -> None:
    text = f"One {block(NOW)} two {block(WRITE)}"
    shown = text[: text.index("hello") + len("hello")]
    reply = served.chat(text, "disabled", stream=True, **cut(served, text, shown))
    cut_off = ("write", '{"path": "a.txt", "content": "hello')
    assert reply == Reply("", "One  two ", (NOW, cut_off), "length")


def test_a_streamed_call_that_the_turn_ends_is_no_reason_to_run_it(served: Served) -> None:
    text = block(WRITE)[: block(WRITE).index("hello")]
    reply = served.chat(text, "disabled", stream=True)
    assert reply == Reply("", "", (("write", '{"path": "a.txt", "content": "'),), "stop")


@both
def test_a_stop_string_ends_the_answer(served: Served, stream: bool) -> None:
    assert served.chat("One. Two.", "disabled", stream=stream, stop=[" Two"]) == Reply("", "One.", (), "stop")


THINKING: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "thinking.type enabled": ({"thinking": {"type": "enabled"}}, "<mm:think>"),
    "thinking.type disabled": ({"thinking": {"type": "disabled"}}, "</mm:think>"),
    "thinking.type adaptive": ({"thinking": {"type": "adaptive"}}, ""),
    "thinking_mode before thinking.type": (
        {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking_mode": "disabled"}},
        "</mm:think>",
    ),
    "reasoning_effort none": ({"reasoning_effort": "none"}, "</mm:think>"),
    "reasoning_effort high": ({"reasoning_effort": "high"}, ""),
}
"""Case -> (a request's fields, what they leave at the prompt's end)."""


def prompt(served: Served, **body: Any) -> str:
    """The rendered prompt of a chat request."""
    request = {
        "model": served.model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        **body,
    }
    answer = requests.post(
        f"{served.url}/v1/chat/completions", json={**request, "return_prompt_token_ids": True}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    return served.write.tokenizer.decode(answer.json()["choices"][0]["prompt_token_ids"])


@pytest.mark.parametrize("case", tuple(THINKING))
def test_each_way_to_ask_for_thinking_reaches_the_prompt(served: Served, case: str) -> None:
    fields, opened = THINKING[case]
    assert prompt(served, **fields).endswith(f"]~b]ai\n{opened}")


@pytest.mark.parametrize("effort", ("low", "medium", "high", "xhigh", "max"))
def test_every_effort_reaches_the_prompt_unless_thinking_is_off(served: Served, effort: str) -> None:
    line = f"Reasoning effort: {effort}"
    assert line in prompt(served, reasoning_effort=effort)
    assert line not in prompt(served, reasoning_effort=effort, thinking={"type": "disabled"})


def test_a_leading_root_message_is_its_own_turn(served: Served) -> None:
    messages = [{"role": "root", "content": "Obey."}, {"role": "user", "content": "Hi"}]
    assert "]~b]root\nObey.[e~[" in prompt(served, messages=messages)


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
"""What is wrong -> (the request's fields, what the message must mention)."""


@pytest.mark.parametrize("case", tuple(BAD))
def test_an_unknown_value_is_refused_with_its_name(served: Served, case: str) -> None:
    fields, mention = BAD[case]
    request = {"model": served.model, "messages": [USER], "max_tokens": 1, **fields}
    answer = requests.post(f"{served.url}/v1/chat/completions", json=request, timeout=60)
    assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:500]}"
    assert mention in answer.json()["message"], answer.text


CHOICES = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, properties in (
        (
            "lamp",
            {
                "on": {"type": "boolean"},
                "levels": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
            },
        ),
        ("turn", {"side": {"enum": ["left", "right"]}}),
    )
]
"""Tools whose arguments even a model that writes noise brings to an end."""
TURN = {"type": "function", "function": {"name": "turn"}}


@pytest.fixture(scope="module")
def no_spaces(served: Served) -> dict[str, int]:
    """A bias against whitespace, which the grammar allows between tags and noise is full of."""
    tokenizer = served.write.tokenizer
    return {str(token): -100 for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()}


@both
@pytest.mark.parametrize("choice", ("required", TURN), ids=("required", "named"))
def test_a_forced_call_follows_its_schema_whatever_the_model_would_write(
    served: Served, no_spaces: dict[str, int], choice: Any, stream: bool
) -> None:
    options = {"tools": CHOICES, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 1}
    for seed in range(3):
        body = {"sampling_seed": seed}
        reply = served.chat(None, "disabled", stream=stream, logit_bias=no_spaces, extra_body=body, **options)
        assert (reply.reasoning, reply.content, reply.finish) == ("", "", "tool_calls"), reply
        ((name, arguments),) = reply.calls
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in CHOICES}
        assert name == "turn" or choice == "required"
        jsonschema.validate(arguments, schemas[name])


@both
def test_thinking_comes_before_a_required_call(served: Served, stream: bool) -> None:
    text = f"Left, I think.</mm:think>{block(('turn', {'side': 'left'}))}"
    reply = served.chat(text, "enabled", stream=stream, tools=CHOICES, tool_choice="required")
    assert reply == Reply("Left, I think.", "", (("turn", {"side": "left"}),), "tool_calls")


def common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with, in whole pages."""
    equal = next((at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), len(first))
    return equal // PAGE_TOKENS * PAGE_TOKENS


THOUGHT = " ".join(f"Step {number}: look at the file again." for number in range(16))
TASK = {"role": "user", "content": "Look into the file, please. " * 12}


def turn(served: Served, messages: list[Any], reply: str) -> tuple[list[int], list[int], Any, int]:
    """The prompt's tokens, those that are in the cache after the turn, the message, cached tokens."""
    answer = served.create(messages, reply, max_tokens=1500, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    kept = [*choice.prompt_token_ids, *choice.response_token_ids[:-1]]
    return choice.prompt_token_ids, kept, choice.message, answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("content", ("", "I look.", "I look.\n"), ids=("bare", "text", "text-and-newline"))
def test_thinking_given_back_with_a_result_is_in_the_cache_and_dropped_by_the_next_question(
    served: Served, content: str
) -> None:
    served.flush()
    reply = f"<mm:think>{THOUGHT}</mm:think>{content}{block(WRITE)}"
    prompt_ids, kept, message, cached = turn(served, [TASK], reply)
    assert cached == 0
    call = message.tool_calls[0]
    given_back = {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [call.model_dump(include={"id", "type", "function"})],
    }
    messages = [TASK, given_back, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    second_ids, second_kept, _, cached = turn(served, messages, "</mm:think>It is done.")
    assert served.write.tokenizer.decode(second_ids).count(THOUGHT) == 1
    assert cached == common(kept, second_ids) > common(prompt_ids, second_ids) > 0

    messages += [{"role": "assistant", "content": "It is done."}, {"role": "user", "content": "And now?"}]
    third_ids, _, _, cached = turn(served, messages, "</mm:think>Nothing.")
    assert THOUGHT not in served.write.tokenizer.decode(third_ids)
    assert cached == max(common(kept, third_ids), common(second_kept, third_ids)) > 0


def test_anthropic_thinking_given_back_is_in_the_cache(served: Served) -> None:
    served.flush()
    messages: list[Any] = [TASK]
    options = {"model": served.model, "max_tokens": 1500, "tools": anthropic_tools()}
    reply = f"<mm:think>{THOUGHT}</mm:think>{block(WRITE)}"
    first = served.anthropic.messages.create(messages=messages, extra_headers=served.header(reply), **options)
    messages.append(
        {"role": "assistant", "content": [each.model_dump(exclude_none=True) for each in first.content]}
    )
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "done"}
    messages.append({"role": "user", "content": [result]})
    second = served.anthropic.messages.create(
        messages=messages, extra_headers=served.header("Done."), **options
    )
    check_thought_cached(first.usage, second.usage.cache_read_input_tokens)


def test_a_response_s_reasoning_given_back_is_in_the_cache(served: Served) -> None:
    served.flush()
    messages: list[Any] = [TASK]
    options = {"model": served.model, "max_output_tokens": 1500, "tools": response_tools()}
    reply = f"<mm:think>{THOUGHT}</mm:think>{block(WRITE)}"
    first = served.openai.responses.create(input=messages, extra_headers=served.header(reply), **options)
    messages += [item.model_dump(exclude_none=True) for item in first.output]
    messages.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "done"})
    second = served.openai.responses.create(input=messages, extra_headers=served.header("Done."), **options)
    check_thought_cached(first.usage, second.usage.input_tokens_details.cached_tokens)


def check_thought_cached(first: Any, cached: int) -> None:
    """All whole pages of the first turn's prompt and reply, but for the reply's last token."""
    fed = first.input_tokens + first.output_tokens - 1
    assert cached == fed // PAGE_TOKENS * PAGE_TOKENS
    assert cached > first.input_tokens
