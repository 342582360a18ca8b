"""A model's turns in a tool loop: what it thought, said and called, and what its calls returned."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.sharing import index_pages

SYSTEM = "Answer with the help of your tools. Read before you judge, calculate before you claim."
QUESTION = "How many lines has README.md, and how many characters is that at 80 characters a line?"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model completed, and what it was answered."""

    id: str
    name: str
    arguments: str
    result: str


@dataclass(frozen=True)
class Turn:
    """One reply of the model.

    `finish_reason` is `tool_calls` if there are calls to answer, `stop` if the model is done, and `length` if
    it ran out of tokens, whatever it was doing.
    """

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int

    def __str__(self) -> str:
        lines = [f"thinking: {self.reasoning!r}", f"answer: {self.content!r}"]
        for call in self.calls:
            lines.append(f"call: {call.name} {call.arguments}\n  {call.result[:200]!r}")
        lines.append(f"  {self.cached_tokens} of {self.prompt_tokens} prompt tokens came from the cache")
        lines.append(f"  the reply ended with: {self.finish_reason}")
        return "\n".join(lines)


def start(question: str) -> list[dict[str, Any]]:
    """The messages that a conversation begins with."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def options(description: str) -> argparse.Namespace:
    """The command line of a tool loop."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="folder whose files may be read")
    parser.add_argument("--thinking-mode", default="adaptive", choices=("adaptive", "enabled", "disabled"))
    parser.add_argument("--reply-tokens", type=int, default=1000)
    return parser.parse_args()


def show(url: str, converse: Callable[[], Iterable[Turn]]) -> None:
    """Print a conversation's turns as they come, and what sharing saved meanwhile on the server at `url`."""
    before = index_pages(url)
    for turn in converse():
        print(turn)
    print(index_pages(url).since(before))
