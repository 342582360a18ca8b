"""An agent that reads files and calculates until it has an answer: OpenAI's client, streaming, thinking.

Run it against a server that `make serve` started:

    .venv/bin/python -m examples.tool_loop --url http://127.0.0.1:30000
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from examples.tools import TOOLS, run_tool
from examples.turns import ToolCall, Turn, options, show, start


@dataclass
class _Growing:
    """A reply that is still arriving."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """Id, name and pieces of the arguments."""
    finish_reason: str = ""
    usage: Any = None

    def add(self, chunk: Any) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.reasoning.append(getattr(choice.delta, "reasoning_content", None) or "")
            self.content.append(choice.delta.content or "")
            for call in choice.delta.tool_calls or ():
                if call.id:
                    self.calls.append((call.id, call.function.name, []))
                self.calls[call.index][2].append(call.function.arguments or "")


def converse(
    client: openai.OpenAI,
    question: str,
    root: Path,
    *,
    turn_limit: int = 8,
    reply_tokens: int = 1000,
    thinking_mode: str = "adaptive",
) -> Iterator[Turn]:
    """The model's turns, each after its calls were answered, until one has none to answer.

    Thinking goes back to the server with the calls that it led to: M3 goes on from it, and the prompt stays
    the one that the server has in its cache.

    Args:
        client: connected to a server of M3.
        question: the user's message.
        root: the folder whose files the model may read.
        turn_limit: replies to ask for at most.
        reply_tokens: tokens of a reply at most.
        thinking_mode: `adaptive`, `enabled` or `disabled`.
    """
    model = client.models.list().data[0].id
    messages: list[Any] = start(question)
    for _ in range(turn_limit):
        turn = _ask(client, model, messages, root, reply_tokens, thinking_mode)
        yield turn
        if not turn.calls:
            return
        messages += _as_messages(turn)


def _ask(
    client: openai.OpenAI, model: str, messages: list[Any], root: Path, reply_tokens: int, thinking_mode: str
) -> Turn:
    growing = _Growing()
    for chunk in client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        max_tokens=reply_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"thinking_mode": thinking_mode}},
    ):
        growing.add(chunk)
    # Any other reason means that the last call may have been cut off, and half a call must not be run.
    complete = growing.calls if growing.finish_reason == "tool_calls" else []
    calls = [(id_, name, "".join(pieces)) for id_, name, pieces in complete]
    details = growing.usage.prompt_tokens_details
    return Turn(
        "".join(growing.reasoning),
        "".join(growing.content),
        tuple(ToolCall(*call, run_tool(root, *call[1:])) for call in calls),
        growing.finish_reason,
        growing.usage.prompt_tokens,
        details.cached_tokens if details else 0,
    )


def _as_messages(turn: Turn) -> list[Any]:
    """The turn and its results, as the next request gives them back."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.calls
    ]
    said = {"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning}
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.result} for call in turn.calls]
    return [{**said, "tool_calls": calls}, *results]


def main() -> None:
    given = options(__doc__.splitlines()[0])
    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key="none")
    limits = {"reply_tokens": given.reply_tokens, "thinking_mode": given.thinking_mode}
    show(given.url, lambda: converse(client, given.question, given.root, **limits))


if __name__ == "__main__":
    main()
