"""The clients of three APIs, and what they make of a reply."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import requests

from tests.parsing.writing import FUNCTIONS
from tests.serving import forced

Call = tuple[str, Any]


@dataclass(frozen=True)
class Reply:
    """What a client got; calls as (name, arguments), a call that was cut off as (name, text of arguments).

    `finish` is a chat completion's, whatever the API: `stop`, `length` or `tool_calls`.
    """

    reasoning: str
    content: str
    calls: tuple[Call, ...]
    finish: str


@dataclass(frozen=True)
class Served:
    """A server that writes what it is told to, and clients that do not retry."""

    url: str
    write: forced.Writer
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    model: str

    def header(self, pieces: tuple[str, ...] | str | None) -> dict[str, str]:
        """What forces the reply to `pieces`; None leaves the model to itself."""
        if pieces is None:
            return {}
        return self.write.header(*((pieces,) if isinstance(pieces, str) else pieces))

    def create(
        self, messages: Any, pieces: tuple[str, ...] | str | None, mode: str = "adaptive", **options: Any
    ) -> Any:
        """A greedy chat completion in the thinking mode `mode`; `messages` may be one user's text."""
        body = {"chat_template_kwargs": {"thinking_mode": mode}, **options.pop("extra_body", {})}
        return self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
            extra_headers=self.header(pieces),
            extra_body=body,
            **{"temperature": 0, "max_tokens": 400, "tools": chat_tools(), **options},
        )

    def chat(
        self,
        pieces: tuple[str, ...] | str | None,
        mode: str = "adaptive",
        *,
        stream: bool = False,
        **options: Any,
    ) -> Reply:
        """The chat endpoint's reply, whole or put together from its pieces."""
        answer = self.create("Go on.", pieces, mode, stream=stream, **options)
        return _joined_chat(answer) if stream else _whole_chat(answer)

    def messages(self, pieces: tuple[str, ...] | str, thinking: dict[str, Any], *, stream: bool) -> Reply:
        """The same from Anthropic's Messages endpoint."""
        request = {
            "model": self.model,
            "max_tokens": 400,
            "messages": [{"role": "user", "content": "Go on."}],
            "tools": anthropic_tools(),
            "thinking": thinking,
            "extra_headers": self.header(pieces),
        }
        if not stream:
            return from_message(self.anthropic.messages.create(**request))
        with self.anthropic.messages.stream(**request) as events:
            return from_message(events.get_final_message())

    def respond(self, pieces: tuple[str, ...] | str, mode: str, *, stream: bool) -> Reply:
        """The same from the Responses endpoint; streamed, all text comes from the deltas."""
        request = {
            "model": self.model,
            "max_output_tokens": 400,
            "input": "Go on.",
            "tools": response_tools(),
            "extra_headers": self.header(pieces),
            "extra_body": {"chat_template_kwargs": {"thinking_mode": mode}},
        }
        if not stream:
            return from_response(self.openai.responses.create(**request))
        return _joined_response(self.openai.responses.create(**request, stream=True))

    def flush(self) -> None:
        """Empty the radix cache."""
        answer = requests.post(f"{self.url}/flush_cache", timeout=60)
        assert answer.status_code == 200, answer.text


def clients(url: str, checkpoint: Path) -> Served:
    """Clients of the server at `url`, which serves `checkpoint` and takes forced replies."""
    chat = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    messages = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    return Served(url, forced.Writer(checkpoint), chat, messages, chat.models.list().data[0].id)


def chat_tools() -> list[Any]:
    """`FUNCTIONS`, as the chat endpoint takes them."""
    return [
        {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {})}}
        for name, schema in FUNCTIONS.items()
    ]


def anthropic_tools() -> list[Any]:
    return [
        {"name": name, "input_schema": schema or {"type": "object"}} for name, schema in FUNCTIONS.items()
    ]


def response_tools() -> list[Any]:
    return [
        {"type": "function", "name": name, "parameters": schema, "strict": False}
        for name, schema in FUNCTIONS.items()
    ]


def _call(name: str, arguments: str) -> Call:
    try:
        return name, json.loads(arguments)
    except ValueError:  # the call was cut off
        return name, arguments


def _whole_chat(answer: Any) -> Reply:
    choice = answer.choices[0]
    message = choice.message
    calls = [_call(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return Reply(message.reasoning_content or "", message.content or "", tuple(calls), choice.finish_reason)


def _joined_chat(chunks: Iterable[Any]) -> Reply:
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    deltas = [choice.delta for choice in choices]
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        for call in delta.tool_calls or ():
            if call.function.name:
                assert call.index == len(names), f"call {call.index} begins after {len(names)} calls"
                assert call.id
                names.append(call.function.name)
                arguments.append("")
            arguments[call.index] += call.function.arguments or ""
    finish = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert len(finish) == 1, finish
    return Reply(
        "".join(delta.reasoning_content or "" for delta in deltas),
        "".join(delta.content or "" for delta in deltas),
        tuple(map(_call, names, arguments)),
        finish[0],
    )


_FINISH = {
    "tool_use": "tool_calls",
    "end_turn": "stop",
    "max_tokens": "length",
    "completed": "stop",
    "incomplete": "length",
}


def from_message(message: Any) -> Reply:
    blocks = message.content
    return Reply(
        "".join(each.thinking for each in blocks if each.type == "thinking"),
        "".join(each.text for each in blocks if each.type == "text"),
        tuple((each.name, each.input) for each in blocks if each.type == "tool_use"),
        _FINISH[message.stop_reason],
    )


def from_response(response: Any) -> Reply:
    """A response with calls is one that ended to make them."""
    calls = [_call(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    texts = {
        kind: "".join(part.text for item in response.output if item.type == kind for part in item.content)
        for kind in ("reasoning", "message")
    }
    finish = "tool_calls" if calls and response.status == "completed" else _FINISH[response.status]
    return Reply(texts["reasoning"], texts["message"], tuple(calls), finish)


def _joined_response(events: Iterable[Any]) -> Reply:
    text = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    arguments: dict[str, str] = {}
    last = None
    for event in events:
        if event.type in text:
            text[event.type] += event.delta
        elif event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
        last = event
    assert last is not None and last.type in ("response.completed", "response.incomplete"), last
    whole = from_response(last.response)
    reasoning, content = text.values()
    names = [name for name, _ in whole.calls]
    return Reply(reasoning, content, tuple(map(_call, names, arguments.values())), whole.finish)
