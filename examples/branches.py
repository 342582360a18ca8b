"""One long prefix of source code, forked into branches that each ask their own question.

Run it against a server that `make serve` started:

    .venv/bin/python -m examples.branches --url http://127.0.0.1:30000
    .venv/bin/python -m examples.branches --url http://127.0.0.1:30000 --folder . --characters 60000
"""

from __future__ import annotations

import argparse
import inspect
import tokenize
from pathlib import Path

import sglang as sgl

from examples.frontend import Answer, ask_in_forks, connect, read_answers
from examples.sharing import index_pages

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
CHARACTERS = 14_000
SOURCE = inspect.getsource(tokenize)[:CHARACTERS]


def read_folder(folder: Path, characters: int) -> str:
    """The Python files below the folder, each after its path, as far as `characters` go."""
    text = ""
    for path in sorted(folder.rglob("*.py")):
        if len(text) >= characters:
            break
        text += f"\n# {path.relative_to(folder)}\n{path.read_text(encoding='utf-8', errors='replace')}"
    return text[:characters]


@sgl.function
def ask_in_branches(s, source: str, questions: tuple[str, ...], answer_tokens: int):
    """Read the source once, then ask every question on top of it in a fork of its own."""
    s += sgl.system("You review source code.")
    s += sgl.user_begin() + "Here is a module.\n" + source
    ask_in_forks(s, questions, answer_tokens)


def run(url: str, branches: int = 8, answer_tokens: int = 48, source: str = SOURCE) -> tuple[Answer, ...]:
    """Ask the first `branches` of `QUESTIONS` about `source` on the server at `url`."""
    connect(url)
    questions = QUESTIONS[:branches]
    return read_answers(ask_in_branches.run(source=source, questions=questions, answer_tokens=answer_tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--branches", type=int, default=8, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="its Python files are the prefix; without it, a sample")
    parser.add_argument("--characters", type=int, default=CHARACTERS, help="of the folder's files, at most")
    options = parser.parse_args()
    source = SOURCE if options.folder is None else read_folder(options.folder, options.characters)
    before = index_pages(options.url)
    answers = run(options.url, options.branches, options.answer_tokens, source)
    for question, answer in zip(QUESTIONS, answers):
        print(f"{question}\n{answer}")
    print(index_pages(options.url).since(before))


if __name__ == "__main__":
    main()
