"""Several reviewers read one diff at the same time, and a summary joins what they found.

Run it against a server that `make serve` started:

    git diff HEAD~1 | .venv/bin/python -m examples.review --url http://127.0.0.1:30000 --diff -
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

import sglang as sgl

from examples.frontend import Answer, as_answer, ask_in_forks, connect, read_answers
from examples.sharing import index_pages

CONCERNS = (
    "Is it correct? Name an input that breaks it.",
    "Is it tested? Name the test that is missing.",
    "Is it fast enough? Name the slowest line.",
    "Is it readable? Name the worst name.",
    "Is it safe? Name what a hostile input reaches.",
    "Is it documented? Name the sentence that became wrong.",
)


@dataclass(frozen=True)
class Review:
    """One finding for each concern, in their order, and the summary of all."""

    findings: tuple[Answer, ...]
    summary: Answer


@sgl.function
def review_in_parallel(s, diff: str, concerns: tuple[str, ...], answer_tokens: int):
    """Fork the prompt with the diff once for each concern, then go on in the trunk with all answers."""
    s += sgl.system("You review changes to source code.")
    s += sgl.user_begin() + "Here is a change.\n" + diff
    findings = ask_in_forks(s, concerns, answer_tokens)
    s += "\nReviewers found:\n" + "\n".join(f"- {finding}" for finding in findings)
    s += "\nWhich of it must change before the merge?" + sgl.user_end()
    s += sgl.assistant(sgl.gen("summary", max_tokens=answer_tokens, temperature=0))


def run(url: str, diff: str, concerns: tuple[str, ...] = CONCERNS, answer_tokens: int = 48) -> Review:
    """Review `diff` on the server at `url`."""
    connect(url)
    state = review_in_parallel.run(diff=diff, concerns=concerns, answer_tokens=answer_tokens)
    return Review(read_answers(state), as_answer(state["summary"], state.get_meta_info("summary")))


def sample_diff() -> str:
    """A change to a module of the standard library, for want of one's own."""
    before = inspect.getsource(tokenize).splitlines(keepends=True)[:260]
    after = [line.replace("line", "text").replace("Token", "Piece") for line in before]
    return "".join(difflib.unified_diff(before, after, "a/tokenize.py", "b/tokenize.py"))


def _read_diff(path: str) -> str:
    if not path:
        return sample_diff()
    return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--diff", default="", help="file to read, - for standard input; without it, a sample")
    parser.add_argument("--answer-tokens", type=int, default=48)
    options = parser.parse_args()
    before = index_pages(options.url)
    review = run(options.url, _read_diff(options.diff), answer_tokens=options.answer_tokens)
    for title, answer in zip((*CONCERNS, "Summary"), (*review.findings, review.summary)):
        print(f"{title}\n{answer}")
    print(index_pages(options.url).since(before))


if __name__ == "__main__":
    main()
