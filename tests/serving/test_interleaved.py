"""Thinking that goes back to the server with its calls: in the prompt, and in the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.parsing.writing import block
from tests.serving.conftest import Endpoint
from tests.serving.reply_cases import WRITE
from tests.serving.reply_clients import Served, anthropic_tools, clients, response_tools

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

PAGE_TOKENS = 128


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


def common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with, in whole pages."""
    equal = next((at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), len(first))
    return equal // PAGE_TOKENS * PAGE_TOKENS


THOUGHT = " ".join(f"Step {number}: look at the file again." for number in range(16))
TASK = {"role": "user", "content": "Look into the file, please. " * 12}


def system(name: str) -> str:
    """What begins the conversation `name`, so that it has no page in common with another."""
    return f"{name}: you look after files."


def turn(served: Served, messages: list[Any], reply: str) -> tuple[list[int], list[int], Any, int]:
    """The prompt's tokens, those that are in the cache after the turn, the message, cached tokens."""
    answer = served.create(messages, reply, max_tokens=1500, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    kept = [*choice.prompt_token_ids, *choice.response_token_ids[:-1]]
    return choice.prompt_token_ids, kept, choice.message, answer.usage.prompt_tokens_details.cached_tokens


def chat(served: Served, name: str, content: str) -> None:
    start = [{"role": "system", "content": system(name)}, TASK]
    reply = f"<mm:think>{THOUGHT}</mm:think>{content}{block(WRITE)}"
    prompt_ids, kept, message, cached = turn(served, start, reply)
    assert cached == 0
    call = message.tool_calls[0]
    given_back = {
        "role": "assistant",
        "content": message.content,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [call.model_dump(include={"id", "type", "function"})],
    }
    messages = [*start, given_back, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    second_ids, second_kept, _, cached = turn(served, messages, "</mm:think>It is done.")
    assert served.write.tokenizer.decode(second_ids).count(THOUGHT) == 1
    assert cached == common(kept, second_ids) > common(prompt_ids, second_ids) > 0

    messages += [{"role": "assistant", "content": "It is done."}, {"role": "user", "content": "And now?"}]
    third_ids, _, _, cached = turn(served, messages, "</mm:think>Nothing.")
    assert THOUGHT not in served.write.tokenizer.decode(third_ids)
    assert cached == max(common(kept, third_ids), common(second_kept, third_ids)) > 0


def anthropic(served: Served, name: str) -> None:
    messages: list[Any] = [TASK]
    options = {
        "model": served.model,
        "max_tokens": 1500,
        "tools": anthropic_tools(),
        "system": system(name),
    }
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


def responses(served: Served, name: str) -> None:
    messages: list[Any] = [TASK]
    options = {
        "model": served.model,
        "max_output_tokens": 1500,
        "tools": response_tools(),
        "instructions": system(name),
    }
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


CONVERSATIONS: dict[str, Callable[[Served, str], None]] = {
    "chat": functools.partial(chat, content=""),
    "chat with text": functools.partial(chat, content="I look."),
    "chat with text and a newline": functools.partial(chat, content="I look.\n"),
    "messages": anthropic,
    "responses": responses,
}
"""Name -> the turns of a conversation; it asserts what they found in the cache."""


@pytest.fixture(scope="module")
def conversations(served: Served) -> Iterator[dict[str, Future[None]]]:
    """All of them at the same time: tokens of a batch cost little more than those of one request."""
    served.flush()
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        yield {name: pool.submit(hold, served, name) for name, hold in CONVERSATIONS.items()}


@pytest.mark.parametrize("name", tuple(CONVERSATIONS))
def test_thinking_given_back_with_a_result_is_in_the_cache_and_in_chat_dropped_by_the_next_question(
    conversations: dict[str, Future[None]], name: str
) -> None:
    conversations[name].result()
