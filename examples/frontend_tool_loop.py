"""The agent of `tool_loop` as one program of SGLang's frontend: the prompt only ever grows.

Run it against a server that `make serve` started, on its machine, for the tokenizer:

    .venv/bin/python -m examples.frontend_tool_loop --url http://127.0.0.1:30000
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import sglang as sgl
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from examples.frontend import TURN_END, connect
from examples.tools import TOOLS, run_tool
from examples.turns import ToolCall, Turn, options, show, start
from sglang_m3.parsing.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from sglang_m3.parsing.parser import Parser

FUNCTIONS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@dataclass(frozen=True)
class Prompt:
    """Writes prompts as the chat template of the served model has them."""

    tokenizer: PreTrainedTokenizerBase
    thinking_mode: str

    def first(self, messages: list[Any]) -> str:
        """The prompt for the reply to these messages."""
        return self._render(messages, add_generation_prompt=True)

    def after(self, messages: list[Any], turn: Turn) -> str:
        """What follows the reply `turn` to these messages: its end, its results and the next reply's start.

        The reply itself is not written again: its tokens are in the cache as the model chose them.
        """
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in turn.calls
        ]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [{"role": "tool", "tool_call_id": call.id, "content": call.result} for call in turn.calls]
        before = self._render([*messages, said])
        whole = self._render([*messages, said, *results], add_generation_prompt=True)
        assert before.endswith(TURN_END) and whole.startswith(before), (before, whole)
        return TURN_END + whole[len(before) :]

    def _render(self, messages: list[Any], **kwargs: Any) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=list(TOOLS), tokenize=False, thinking_mode=self.thinking_mode, **kwargs
        )


def read_reply(text: str, meta: dict[str, Any], root: Path, *, thinking: bool, first_id: int) -> Turn:
    """The turn that a reply's text stands for, with its calls answered.

    Args:
        text: the reply, without its end.
        meta: the server's `meta_info` of it.
        root: the folder whose files may be read.
        thinking: whether the prompt ended inside thinking.
        first_id: number of the first call, for its id.
    """
    parser = Parser(FUNCTIONS, thinking=thinking)
    reasoning, content, calls, ended = "", "", [], set()
    for event in (*parser.feed(text), *parser.close()):
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.json_delta
        elif isinstance(event, CallEnd):
            ended.add(event.index)
    finish = meta["finish_reason"]["type"]
    # A reply that ran out of tokens may have been about to change its mind.
    complete = [calls[index] for index in sorted(ended)] if finish == "stop" else []
    answered = tuple(
        ToolCall(f"call_{first_id + number}", name, arguments, run_tool(root, name, arguments))
        for number, (name, arguments) in enumerate(complete)
    )
    return Turn(
        reasoning,
        content,
        answered,
        "tool_calls" if answered else finish,
        meta["prompt_tokens"],
        meta["cached_tokens"],
    )


@sgl.function
def serve_calls(s, prompt: Prompt, question: str, root: Path, turn_limit: int, reply_tokens: int):
    """Let the model reply, answer its calls, and so on until it makes none; `turns` gets the turns."""
    messages = start(question)
    turns: list[Turn] = []
    s += prompt.first(messages)
    for number in range(turn_limit):
        name = f"reply {number}"
        s += sgl.gen(name, max_tokens=reply_tokens, temperature=0)
        made = sum(len(turn.calls) for turn in turns)
        thinking = prompt.thinking_mode == "enabled"
        turns.append(read_reply(s[name], s.get_meta_info(name), root, thinking=thinking, first_id=made))
        if not turns[-1].calls:
            break
        s += prompt.after(messages, turns[-1])
    s["turns"] = turns


def run(
    url: str,
    question: str,
    root: Path,
    *,
    turn_limit: int = 8,
    reply_tokens: int = 1000,
    thinking_mode: str = "adaptive",
) -> list[Turn]:
    """The model's turns on the server at `url`; the arguments are those of `tool_loop.converse`."""
    connect(url)
    path = requests.get(f"{url}/model_info", timeout=60).json()["tokenizer_path"]
    prompt = Prompt(AutoTokenizer.from_pretrained(path), thinking_mode)
    state = serve_calls.run(
        prompt=prompt, question=question, root=root, turn_limit=turn_limit, reply_tokens=reply_tokens
    )
    return state["turns"]


def main() -> None:
    given = options(__doc__.splitlines()[0])
    limits = {"reply_tokens": given.reply_tokens, "thinking_mode": given.thinking_mode}
    show(given.url, lambda: run(given.url, given.question, given.root, **limits))


if __name__ == "__main__":
    main()
