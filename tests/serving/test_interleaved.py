"""Thinking that goes back to the server with its calls: in the prompt, and in the cache, whatever the API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parsing.writing import block
from tests.serving import forced
from tests.serving.conftest import Endpoint
from tests.serving.reply_cases import NOW
from tests.serving.reply_clients import Served, anthropic_tools, chat_tools, clients, response_tools

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

PAGE_TOKENS = 128
REPLY_TOKENS = 1500
TASK = {"role": "user", "content": "Look into the file, please. " * 4}
FUNCTIONS = {"now": None}


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


def common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with, in whole pages."""
    equal = next((at for at, pair in enumerate(zip(first, second)) if pair[0] != pair[1]), len(first))
    return equal // PAGE_TOKENS * PAGE_TOKENS


class Chat:
    """A conversation over one API.

    `send` asks for the next turn, adds it to the conversation as the API's client gives it back, and returns
    how many tokens of its prompt were in the cache.
    """

    def __init__(self, served: Served, system: str, stream: int) -> None:
        self.served = served
        self.stream = bool(stream)
        self.system = system
        self.listed: list[Any] = self.begin()
        self.call_id = ""

    def begin(self) -> list[Any]:
        return [{"role": "system", "content": self.system}, TASK]

    def send(self, headers: dict[str, str]) -> int:
        options = {"stream_options": {"include_usage": True}} if self.stream else {}
        answer = self.served.openai.chat.completions.create(
            model=self.served.model,
            messages=self.listed,
            tools=chat_tools(FUNCTIONS),
            max_tokens=REPLY_TOKENS,
            stream=self.stream,
            extra_headers=headers,
            **options,
        )
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: list[dict[str, Any]] = []
        for chunk in answer if self.stream else (answer,):
            usage = chunk.usage
            for choice in chunk.choices:
                part = choice.delta if self.stream else choice.message
                message["content"] += part.content or ""
                message["reasoning_content"] += part.reasoning_content or ""
                for call in part.tool_calls or ():
                    if call.id:
                        calls.append(call.model_dump(include={"id", "type", "function"}))
                    else:
                        calls[-1]["function"]["arguments"] += call.function.arguments
        if calls:
            message["tool_calls"] = calls
            self.call_id = calls[-1]["id"]
        self.listed.append(message)
        return usage.prompt_tokens_details.cached_tokens

    def give_result(self) -> None:
        self.listed.append({"role": "tool", "tool_call_id": self.call_id, "content": "done"})

    def ask(self, question: str) -> None:
        self.listed.append({"role": "user", "content": question})


class Messages(Chat):
    def begin(self) -> list[Any]:
        return [TASK]

    def send(self, headers: dict[str, str]) -> int:
        options = {
            "model": self.served.model,
            "max_tokens": REPLY_TOKENS,
            "tools": anthropic_tools(FUNCTIONS),
            "system": self.system,
            "messages": self.listed,
            "extra_headers": headers,
        }
        if self.stream:
            with self.served.anthropic.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = self.served.anthropic.messages.create(**options)
        blocks = [each.model_dump(exclude_none=True) for each in message.content]
        self.call_id = next((each["id"] for each in blocks if each["type"] == "tool_use"), "")
        self.listed.append({"role": "assistant", "content": blocks})
        return message.usage.cache_read_input_tokens or 0

    def give_result(self) -> None:
        result = {"type": "tool_result", "tool_use_id": self.call_id, "content": "done"}
        self.listed.append({"role": "user", "content": [result]})


class Responses(Chat):
    def begin(self) -> list[Any]:
        return [TASK]

    def send(self, headers: dict[str, str]) -> int:
        options = {
            "model": self.served.model,
            "max_output_tokens": REPLY_TOKENS,
            "tools": response_tools(FUNCTIONS),
            "instructions": self.system,
            "input": self.listed,
            "extra_headers": headers,
        }
        if self.stream:
            with self.served.openai.responses.stream(**options) as events:
                response = events.get_final_response()
        else:
            response = self.served.openai.responses.create(**options)
        items = [item.model_dump(exclude_none=True) for item in response.output]
        self.call_id = next((item["call_id"] for item in items if item["type"] == "function_call"), "")
        self.listed += items
        return response.usage.input_tokens_details.cached_tokens

    def give_result(self) -> None:
        self.listed.append({"type": "function_call_output", "call_id": self.call_id, "output": "done"})


TALKS = {"chat": Chat, "messages": Messages, "responses": Responses}


@dataclass(frozen=True)
class Turn:
    """Token ids of a turn's prompt, those that are in the cache after it, and how many were before it."""

    prompt: list[int]
    kept: list[int]
    cached: int


def take_turn(talk: Chat, reply: str, scratch: Path) -> Turn:
    write = talk.served.write
    file = scratch / f"{talk.system}.json"
    cached = talk.send({**write.header(reply), forced.PROMPT_HEADER: str(file)})
    sent = json.loads(file.read_text())
    prompt = sent["input_ids"] or write.tokenizer(sent["text"])["input_ids"]
    return Turn(prompt, prompt + write.token_ids(reply)[:-1], cached)


THOUGHT = " ".join(f"Step {number}: look at the file again." for number in range(12))
AGAIN = "And once more."


def hold(served: Served, api: str, content: str, stream: int, scratch: Path) -> None:
    """Two rounds of calls, an answer, and the next question."""
    # No two conversations have a page in common.
    talk = TALKS[api](served, f"{api}{len(content)}{stream}", stream)
    text = served.write.tokenizer.decode
    first = take_turn(talk, f"<mm:think>{THOUGHT}</mm:think>{content}{block(NOW)}", scratch)
    assert first.cached == 0

    talk.give_result()
    second = take_turn(talk, f"<mm:think>{AGAIN}</mm:think>{block(NOW)}", scratch)
    assert text(second.prompt).startswith(text(first.kept)), text(second.prompt)
    assert second.cached == common(first.kept, second.prompt) > common(first.prompt, second.prompt) > 0

    talk.give_result()
    third = take_turn(talk, "</mm:think>It is done.", scratch)
    assert text(third.prompt).startswith(text(second.kept)), text(third.prompt)
    assert third.cached == common(second.kept, third.prompt)

    talk.ask("And now?")
    fourth = take_turn(talk, "</mm:think>Nothing.", scratch)
    rendered = text(fourth.prompt)
    assert rendered.startswith(text(third.kept)) and THOUGHT in rendered and AGAIN in rendered, rendered
    assert rendered.count(block(NOW)) == 2 and f"</mm:think>{content}" in rendered, rendered
    assert fourth.cached == common(third.kept, fourth.prompt) > 0


CONVERSATIONS = (
    ("chat", "", 0),
    ("chat", "I look.\n\n", 1),
    *((api, "I look.\n", stream) for api in TALKS for stream in (0, 1)),
)
"""API, the first turn's text beside its thinking and its call, whether it streams."""


@pytest.fixture(scope="module")
def conversations(
    served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str, int], Future[None]]]:
    """All of them at the same time: tokens of a batch cost little more than those of one request."""
    served.flush()
    scratch = tmp_path_factory.mktemp("prompts")
    with ThreadPoolExecutor(len(CONVERSATIONS)) as pool:
        yield {case: pool.submit(hold, served, *case, scratch) for case in CONVERSATIONS}


@pytest.mark.parametrize(("api", "content", "stream"), CONVERSATIONS)
def test_thinking_stays_with_its_calls_and_in_the_cache(
    conversations: dict[tuple[str, str, int], Future[None]], api: str, content: str, stream: int
) -> None:
    conversations[api, content, stream].result()
