"""One long prefix of source code, forked into branches that each ask their own question.

Run it against a server that `make serve` started:

    .venv/bin/python -m examples.branches --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import inspect
import json
import tokenize
from dataclasses import dataclass

import sglang as sgl

QUESTIONS = (
    "Which class holds the state of the parser?",
    "Where are errors raised, and with what message?",
    "Name a function that could be split in two.",
    "What happens when the input is empty?",
    "Which names are part of the public interface?",
    "Find a loop that may run for a long time.",
    "What would you test first, and how?",
    "Which comment is out of date?",
    "How is Unicode handled?",
    "Suggest a shorter name for the longest function.",
)


@dataclass(frozen=True)
class Branch:
    """A branch's question, its answer, and what the server said of the request; latencies in seconds.

    The latency of the first token is None where the server runs without `--enable-metrics`.
    """

    question: str
    answer: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_latency: float | None


@sgl.function
def ask_in_branches(s, source: str, questions: tuple[str, ...], answer_tokens: int):
    """Read the source once, then ask every question on top of it in a fork of its own."""
    s += sgl.system("You review source code.")
    s += sgl.user_begin() + "Here is a module.\n" + source
    # The fork puts the text so far into the cache, once it is there.
    s.sync()
    branches = s.fork(len(questions))
    for branch, question in zip(branches, questions):
        branch += "\n" + question
        branch += sgl.user_end()
        branch += sgl.assistant(sgl.gen("answer", max_tokens=answer_tokens, temperature=0))
    s["branches"] = [branch["answer"] for branch in branches]
    s["meta"] = json.dumps([branch.get_meta_info("answer") for branch in branches])


def run(url: str, branches: int = 8, answer_tokens: int = 48) -> list[Branch]:
    """Run the program against the server at `url`; `branches` is at most `len(QUESTIONS)`."""
    questions = QUESTIONS[:branches]
    source = inspect.getsource(tokenize)[:14_000]
    sgl.set_default_backend(sgl.RuntimeEndpoint(url))
    state = ask_in_branches.run(source=source, questions=questions, answer_tokens=answer_tokens)
    return [
        Branch(
            question,
            answer,
            meta["prompt_tokens"],
            meta["cached_tokens"],
            meta["completion_tokens"],
            meta.get("first_token_latency"),
        )
        for question, answer, meta in zip(questions, state["branches"], json.loads(state["meta"]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--branches", type=int, default=8)
    arguments = parser.parse_args()
    for branch in run(arguments.url, arguments.branches):
        print(f"{branch.question}\n  {branch.answer!r}")
        print(f"  {branch.cached_tokens} of {branch.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
