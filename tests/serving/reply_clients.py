"""The clients of three APIs, and what they make of a reply."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
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

    def header(
        self,
        pieces: tuple[str, ...] | str | None,
        at_a_time: int = 1,
        bias: Mapping[str, int] | None = None,
    ) -> dict[str, str]:
        """What forces the reply to `pieces`, streamed so many tokens at a time, or biases what is free."""
        headers = {forced.STEP_HEADER: str(at_a_time)} if at_a_time > 1 else {}
        if bias is not None:
            headers[forced.BIAS_HEADER] = json.dumps(bias)
        if pieces is not None:
            headers |= self.write.header(*((pieces,) if isinstance(pieces, str) else pieces))
        return headers

    def create(
        self, messages: Any, pieces: tuple[str, ...] | str | None, mode: str = "adaptive", **options: Any
    ) -> Any:
        """A greedy chat completion in the thinking mode `mode`; `messages` may be one user's text."""
        body = {"chat_template_kwargs": {"thinking_mode": mode}, **options.pop("extra_body", {})}
        return self.openai.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
            extra_body=body,
            **{
                "extra_headers": self.header(pieces),
                "temperature": 0,
                "max_tokens": 400,
                "tools": chat_tools(),
                **options,
            },
        )

    def chat(
        self,
        pieces: tuple[str, ...] | str | None,
        mode: str = "adaptive",
        *,
        stream: int = 0,
        **options: Any,
    ) -> Reply:
        """The chat endpoint's reply: whole, or put together from its pieces."""
        answer = self.create("Go on.", pieces, mode, stream=bool(stream), **options)
        return joined_chat(answer) if stream else whole_chat(answer)

    def reply(
        self,
        api: str,
        pieces: tuple[str, ...] | str | None,
        mode: str,
        *,
        stream: int = 0,
        max_tokens: int = 400,
        stop: tuple[str, ...] = (),
        functions: Mapping[str, Any] = FUNCTIONS,
        choice: str = "auto",
        parallel: bool = True,
        strict: bool = False,
        bias: Mapping[str, int] | None = None,
    ) -> Reply:
        """The same from `chat`, `messages` or `responses`, in words that they share.

        Args:
            api: the endpoint.
            pieces: the reply, or None for what the model writes at temperature 1.
            mode: the thinking mode.
            stream: tokens that are streamed at a time; 0 for a whole reply.
            max_tokens: where the reply is cut off.
            stop: strings that end it.
            functions: tools by name, each with its parameters' schema or None.
            choice: `auto`, `none`, `required`, or a function's name.
            parallel: whether there may be several calls.
            strict: whether arguments must follow their schemas when the choice is `auto`.
            bias: what is added to logits, by token id.
        """
        headers = self.header(pieces, stream, bias)
        temperature = int(pieces is None)
        kind = choice if choice in ("auto", "none", "required") else "named"
        if api == "chat":
            return self.chat(
                pieces,
                mode,
                stream=stream,
                max_tokens=max_tokens,
                stop=list(stop) or None,
                tools=chat_tools(functions, strict),
                tool_choice={"type": "function", "function": {"name": choice}} if kind == "named" else choice,
                parallel_tool_calls=parallel,
                temperature=temperature,
                extra_headers=headers,
            )
        if api == "messages":
            types = {"required": {"type": "any"}, "named": {"type": "tool", "name": choice}}
            alone = {} if kind == "none" else {"disable_parallel_tool_use": not parallel}
            request = {
                "model": self.model,
                "messages": [{"role": "user", "content": "Go on."}],
                "thinking": {"type": mode, **({"budget_tokens": 1024} if mode == "enabled" else {})},
                "max_tokens": max_tokens,
                "stop_sequences": list(stop),
                "tools": anthropic_tools(functions, strict),
                "tool_choice": {**types.get(kind, {"type": choice}), **alone},
                "extra_body": {"temperature": temperature},
                "extra_headers": headers,
            }
            if not stream:
                return from_message(self.anthropic.messages.create(**request))
            with self.anthropic.messages.stream(**request) as events:
                return _joined_message(events)
        answer = self.openai.responses.create(
            model=self.model,
            input="Go on.",
            max_output_tokens=max_tokens + 2,  # SGLang takes two away
            tools=response_tools(functions, strict),
            tool_choice={"type": "function", "name": choice} if kind == "named" else choice,
            parallel_tool_calls=parallel,
            stream=bool(stream),
            temperature=temperature,
            extra_headers=headers,
            extra_body={"chat_template_kwargs": {"thinking_mode": mode}, "stop": list(stop) or None},
        )
        return _joined_response(answer) if stream else from_response(answer)

    def flush(self) -> None:
        """Empty the radix cache."""
        answer = requests.post(f"{self.url}/flush_cache", timeout=60)
        assert answer.status_code == 200, answer.text


def clients(url: str, checkpoint: Path) -> Served:
    """Clients of the server at `url`, which serves `checkpoint` and takes forced replies."""
    # The server closes connections that are idle for five seconds: none must be used again that long after.
    limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
    options = {"api_key": "none", "max_retries": 0, "timeout": 120}
    chat = openai.OpenAI(
        base_url=f"{url}/v1", http_client=openai.DefaultHttpxClient(limits=limits), **options
    )
    messages = anthropic.Anthropic(
        base_url=url, http_client=anthropic.DefaultHttpxClient(limits=limits), **options
    )
    return Served(url, forced.Writer(checkpoint), chat, messages, chat.models.list().data[0].id)


APIS = ("chat", "messages", "responses")


def chat_tools(functions: Mapping[str, Any] = FUNCTIONS, strict: bool = False) -> list[Any]:
    """Functions by name, each with its parameters' schema or None, as the chat endpoint takes them."""
    flag = {"strict": True} if strict else {}
    return [
        {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {}), **flag}}
        for name, schema in functions.items()
    ]


def anthropic_tools(functions: Mapping[str, Any] = FUNCTIONS, strict: bool = False) -> list[Any]:
    flag = {"strict": True} if strict else {}
    return [
        {"name": name, "input_schema": schema or {"type": "object"}, **flag}
        for name, schema in functions.items()
    ]


def response_tools(functions: Mapping[str, Any] = FUNCTIONS, strict: bool = False) -> list[Any]:
    return [
        {"type": "function", "name": name, "parameters": schema, "strict": strict}
        for name, schema in functions.items()
    ]


def _call(name: str, arguments: str) -> Call:
    try:
        return name, json.loads(arguments)
    except ValueError:  # the call was cut off
        return name, arguments


def whole_chat(answer: Any, index: int = 0) -> Reply:
    choice = answer.choices[index]
    message = choice.message
    calls = [_call(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return Reply(message.reasoning_content or "", message.content or "", tuple(calls), choice.finish_reason)


def joined_chat(chunks: Iterable[Any], index: int = 0) -> Reply:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
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


def _joined_message(events: Any) -> Reply:
    texts: dict[str, dict[int, str]] = {"thinking": {}, "text": {}, "partial_json": {}}
    names: list[str] = []
    for event in events:
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            names.append(event.content_block.name)
            texts["partial_json"][event.index] = ""
        if event.type == "content_block_delta":
            kind = event.delta.type.removesuffix("_delta").replace("input_json", "partial_json")
            pieces = texts[kind]
            pieces[event.index] = pieces.get(event.index, "") + getattr(event.delta, kind)
    reasoning, content = ("".join(texts[kind].values()) for kind in ("thinking", "text"))
    calls = tuple(map(_call, names, texts["partial_json"].values()))
    return Reply(reasoning, content, calls, _FINISH[events.get_final_message().stop_reason])


def from_response(response: Any) -> Reply:
    """A response whose calls are complete is one that ended to make them."""
    items = [item for item in response.output if item.type == "function_call"]
    texts = {
        kind: "".join(part.text for item in response.output if item.type == kind for part in item.content)
        for kind in ("reasoning", "message")
    }
    ended = response.status == "completed"
    complete = bool(items) and all(item.status == "completed" for item in items)
    finish = "tool_calls" if ended and complete else _FINISH[response.status]
    calls = tuple(_call(item.name, item.arguments) for item in items)
    return Reply(texts["reasoning"], texts["message"], calls, finish)


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
