"""`make demo`: serve the tiny checkpoint, run an agent-shaped program, say what was shared, stop."""

from __future__ import annotations

import time

from examples import branches
from launch.server import ROOT, metric, serving

LOG = ROOT / ".cache" / "demo-server.log"
SCORED = "sglang:m3_index_pages_scored_total"
SAVED = "sglang:m3_index_pages_saved_total"


def main() -> None:
    print(f"starting SGLang with the tiny checkpoint; log: {LOG.relative_to(ROOT)}")
    with serving(LOG) as url:
        # The first run fills the cache, as an agent's first turn does; the second finds it filled.
        for title in ("first run: the prefix is computed", "second run: the prefix is cached"):
            print(f"\n== {title}")
            _run_once(url)
    print("\nserver stopped")


def _run_once(url: str) -> None:
    scored, saved = metric(url, SCORED), metric(url, SAVED)
    begin = time.monotonic()
    answered = branches.run(url)
    seconds = time.monotonic() - begin
    for branch in answered:
        first = (
            "" if branch.first_token_latency is None else f", first token {branch.first_token_latency:.2f} s"
        )
        print(f"- {branch.question}")
        print(f"  {branch.answer[:90]!r}")
        print(f"  {branch.prompt_tokens} prompt tokens, {branch.cached_tokens} cached{first}")
    scored, saved = _settled(url, SCORED, scored), _settled(url, SAVED, saved)
    tokens = sum(branch.completion_tokens for branch in answered)
    share = saved / max(1.0, scored + saved)
    print(f"{len(answered)} branches, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s")
    print(f"index pages scored: {scored:.0f}, saved by sharing: {saved:.0f} ({share:.0%}), per sparse layer")


def _settled(url: str, name: str, before: float) -> float:
    """How much a counter grew, read when it has stopped growing: the last steps are counted when idle."""
    value = metric(url, name)
    while True:
        time.sleep(0.5)
        again = metric(url, name)
        if again == value:
            return again - before
        value = again


if __name__ == "__main__":
    main()
