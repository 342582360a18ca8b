"""`make demo` as a newcomer runs it: healthy within a minute, and it says what was shared."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from launch.server import ROOT

pytestmark = [pytest.mark.server, pytest.mark.long]

HEALTHY_SECONDS = 60
"""On two cores of which nothing else takes any."""
BRANCHES = 8


def test_the_demo_is_healthy_within_a_minute_and_prints_what_was_shared() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["make", "--no-print-directory", "demo"]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    _, first, second = ended.stdout.split("\n== ")
    cached = []
    for run in (first, second):
        requests = re.findall(
            r"(\d+) of (\d+) prompt tokens came from the cache, first token after [\d.]+ s", run
        )
        assert len(requests) == BRANCHES, run
        assert min(int(prompt) for _, prompt in requests) > 2000, "the prefix is too short to matter"
        cached.append([int(tokens) for tokens, _ in requests])
        speed = re.search(rf"{BRANCHES} branches, (\d+) tokens in [\d.]+ s: (\d+) tokens/s", run)
        assert speed is not None and int(speed[1]) > BRANCHES, run
        pages = re.search(r"index pages scored: (\d+), saved by sharing: (\d+) \((\d+)%\)", run)
        assert pages is not None and int(pages[2]) > int(pages[1]) > 0, run
    assert min(cached[1]) > 2000, "the second run found no cached prefix"
    assert ended.stdout.rstrip().endswith("server stopped")

    healthy = re.search(r"healthy after (\d+) s", ended.stdout)
    assert healthy is not None and int(healthy[1]) <= HEALTHY_SECONDS, ended.stdout
