"""What the server counts: pages scored and saved by sharing, in `/metrics` and in its log; its benchmark."""

from __future__ import annotations

import json
import re
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch.server import metric
from tests.serving.completions import Served, connect
from tests.serving.conftest import Endpoint

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

Prompt = Callable[..., list[int]]


@pytest.fixture(scope="module")
def served(endpoint: Endpoint) -> Served:
    return connect(endpoint.url, endpoint.log)


@pytest.fixture(autouse=True)
def fresh(served: Served) -> None:
    served.flush()


@dataclass(frozen=True)
class Counts:
    """The selection counters of `/metrics`, or how much they grew."""

    scored: float
    saved: float
    rows: float


def counts(served: Served) -> Counts:
    """The counters, read when they have not changed for a second: the last steps are counted when idle."""

    def read() -> Counts:
        names = ("index_pages_scored", "index_pages_saved", "rows")
        return Counts(*(metric(served.url, f"sglang:m3_{name}_total") for name in names))

    value = read()
    while True:
        time.sleep(1)
        if (again := read()) == value:
            return value
        value = again


def growth(served: Served, action: Callable[[], Any]) -> Counts:
    before = counts(served)
    action()
    after = counts(served)
    return Counts(after.scored - before.scored, after.saved - before.saved, after.rows - before.rows)


def test_nothing_is_saved_for_one_request(served: Served, prompt: Prompt) -> None:
    # 5 pages in the prompt, then 15 decode steps (the first token is the prompt's) of 6 pages each.
    grown = growth(served, lambda: served.complete(prompt(640), 16))
    assert grown == Counts(scored=5 + 15 * 6, saved=0, rows=640 + 15)


def test_nothing_is_saved_for_requests_without_a_common_prefix(served: Served, prompt: Prompt) -> None:
    grown = growth(served, lambda: served.complete([prompt(200, seed) for seed in range(1, 5)], 16))
    assert grown == Counts(scored=4 * (2 + 15 * 2), saved=0, rows=4 * (200 + 15))


def test_pages_of_a_common_prefix_are_saved_when_requests_decode_together(
    served: Served, prompt: Prompt
) -> None:
    prefix = prompt(600)
    served.complete(prefix, 1)
    prompts = [prefix + prompt(40, seed) for seed in range(1, 5)]
    grown = growth(served, lambda: served.complete(prompts, 32))
    # Of 640 prompt tokens 512 are cached. The loads without sharing are certain; how many of them are
    # saved depends on when the requests meet. At most, three of four load the 4 common pages in no step.
    assert grown.rows == 4 * (128 + 31)
    assert grown.scored + grown.saved == 4 * (5 + 31 * 6)
    assert 3 * 4 * 16 <= grown.saved <= 3 * 4 * 32


def test_the_decode_log_line_counts_index_pages(served: Served, prompt: Prompt) -> None:
    begin = served.log.stat().st_size
    before = counts(served)
    served.complete(prompt(300), 30)
    after = counts(served)
    pattern = r"Decode batch.*, index pages scored: (\d+), saved by sharing: (\d+), rows: (\d+)"
    lines = re.findall(pattern, served.log.read_bytes()[begin:].decode())
    assert len(lines) >= 30 // 5 - 1
    logged = [Counts(*map(int, line)) for line in lines]
    rows = [before.rows, *(each.rows for each in logged), after.rows]
    assert rows == sorted(rows) and len(set(rows[1:-1])) == len(logged), rows
    assert before.scored < logged[0].scored < logged[-1].scored <= after.scored


def test_bench_serving_with_shared_prefixes_runs_without_a_network(
    served: Served, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, prompts, output = 2, 4, 8
    sizes = {
        "num-groups": groups,
        "prompts-per-group": prompts,
        "system-prompt-len": 300,
        "question-len": 30,
        "output-len": output,
    }
    results = tmp_path / "results.jsonl"
    command = ["sglang.bench_serving", "--backend", "sglang-oai"]
    command += ["--base-url", served.url, "--model", served.model, "--tokenizer", str(tiny)]
    command += ["--dataset-name", "generated-shared-prefix", "--output-file", str(results)]
    command += [word for name, size in sizes.items() for word in (f"--gsp-{name}", str(size))]
    # It keeps generated prompts below the home directory.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_module("sglang.bench_serving", run_name="__main__")
    result = json.loads(results.read_text())
    assert result["completed"] == groups * prompts, result
    assert result["total_output_tokens"] == groups * prompts * output
