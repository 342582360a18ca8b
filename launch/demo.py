"""`make demo`: serve the tiny checkpoint, run an agent-shaped program, say what was shared, stop.

python -m launch.demo [SGLang's server flags]
"""

from __future__ import annotations

import sys
import time

from examples import branches
from examples.sharing import index_pages
from launch.server import ROOT, serving

LOG = ROOT / ".cache" / "demo-server.log"


def main(flags: tuple[str, ...]) -> None:
    print(f"starting SGLang with the tiny checkpoint; log: {LOG.relative_to(ROOT)}")
    with serving(LOG, flags) as url:
        # The first run fills the cache, as an agent's first turn does; the second finds it filled.
        for title in ("first run: the prefix is computed", "second run: the prefix is cached"):
            print(f"\n== {title}")
            _run_once(url)
    print("\nserver stopped")


def _run_once(url: str) -> None:
    before = index_pages(url)
    begin = time.monotonic()
    answers = branches.run(url)
    seconds = time.monotonic() - begin
    for question, answer in zip(branches.QUESTIONS, answers):
        print(f"{question}\n{answer}")
    tokens = sum(answer.completion_tokens for answer in answers)
    print(f"{len(answers)} branches, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
    print(f"{index_pages(url).since(before)}, per sparse layer")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
