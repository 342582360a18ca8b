"""What programs of SGLang's frontend need for M3: its turns, and questions to forks of one prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sglang as sgl
from sglang.lang.chat_template import ChatTemplate

TURN_END = "[e~[\n"
TURNS = ChatTemplate(
    name="minimax-m3",
    default_system_prompt="",
    role_prefix_and_suffix={
        "system": ("]~!b[]~b]system\n", TURN_END),
        "user": ("]~b]user\n", TURN_END),
        # The marker ends a thinking that never began: short answers are wanted here.
        "assistant": ("]~b]ai\n</mm:think>", TURN_END),
    },
)
"""M3's prompt format, which the frontend does not know; programs begin with a system turn."""


@dataclass(frozen=True)
class Answer:
    """An answer and what the server said of its request.

    The latency of the first token is in seconds, and None where the server runs without `--enable-metrics`.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_latency: float | None

    def __str__(self) -> str:
        latency = self.first_token_latency
        first = "" if latency is None else f", first token after {latency:.2f} s"
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens came from the cache"
        return f"  {self.text[:90]!r}\n  {cached}{first}"


def connect(url: str) -> None:
    """Make the server at `url` the one that programs run on."""
    endpoint = sgl.RuntimeEndpoint(url)
    endpoint.chat_template = TURNS
    sgl.set_default_backend(endpoint)


def ask_in_forks(s: Any, questions: tuple[str, ...], answer_tokens: int) -> list[str]:
    """Go on from `s`, in which a user's turn is open, with each question in a fork of its own.

    The variable `answers` gets what `read_answers` reads.

    Returns:
        The texts of the answers, in the order of the questions.
    """
    # A fork puts the trunk into the cache, but only what has been appended by then.
    s.sync()
    forks = s.fork(len(questions))
    for fork, question in zip(forks, questions):
        fork += "\n" + question
        fork += sgl.user_end()
        fork += sgl.assistant(sgl.gen("answer", max_tokens=answer_tokens, temperature=0))
    texts = [fork["answer"] for fork in forks]
    s["answers"] = json.dumps(list(zip(texts, (fork.get_meta_info("answer") for fork in forks))))
    return texts


def read_answers(state: Any) -> tuple[Answer, ...]:
    """The answers of a program that called `ask_in_forks`, in the order of the questions."""
    return tuple(as_answer(text, meta) for text, meta in json.loads(state["answers"]))


def as_answer(text: str, meta: dict[str, Any]) -> Answer:
    """An answer from its text and the `meta_info` of its request."""
    return Answer(
        text,
        meta["prompt_tokens"],
        meta["cached_tokens"],
        meta["completion_tokens"],
        meta.get("first_token_latency"),
    )
