"""The OpenAI API of the server as a user gets it: `launch/serve.sh`, the tiny checkpoint in bfloat16."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from PIL import Image

from launch.server import metric, serving
from tests.serving.client import Server
from tests.serving.expectation import Oracle

pytestmark = pytest.mark.server

PAGE_TOKENS = 128
TOP = 8
"""Alternatives asked for; more than could tie with the greedy token in bfloat16."""

MEDIAN_ERROR = 0.05
"""Of prompt log-probabilities in bfloat16; leaving out one layer's experts moves every row by 0.7 or more."""

Prompt = Callable[..., list[int]]


@dataclass(frozen=True)
class Served:
    """A running server, its log, and the arguments that every request of these tests has."""

    url: str
    log: Path
    client: openai.OpenAI
    model: str

    def complete(self, prompt: Any, max_tokens: int = 12, **options: Any) -> Any:
        """Greedy unless `options` say otherwise, and never ended early."""
        options = {"temperature": 0, "extra_body": {"ignore_eos": True}, **options}
        return self.client.completions.create(
            model=self.model, prompt=prompt, max_tokens=max_tokens, **options
        )

    def chat(
        self, content: Any, max_tokens: int = 12, thinking_mode: str = "disabled", **options: Any
    ) -> Any:
        """One user message, greedy unless `options` say otherwise, and never ended early."""
        body = {"ignore_eos": True, "chat_template_kwargs": {"thinking_mode": thinking_mode}}
        return self.client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            extra_body=body,
            **{"temperature": 0, **options},
        )

    def flush(self) -> None:
        """Empty the radix cache."""
        response = requests.post(f"{self.url}/flush_cache", timeout=60)
        assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("openai") / "server.log"
    with serving(log, ("--decode-log-interval", "5"), {"TINY": str(tiny)}, quiet=True) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        yield Served(url, log, client, client.models.list().data[0].id)


@pytest.fixture(autouse=True)
def fresh(served: Served) -> None:
    served.flush()


def png(red: int, width: int = 75, height: int = 49) -> str:
    """A data URL of a small image: a ramp of `red`."""
    image = Image.new("RGB", (width, height))
    image.putdata([(red * x // width, 3 * x, 5 * y) for y in range(height) for x in range(width)])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


TEXTS = ("def parse(text):\n", "The quick brown fox. " * 40, "κόσμε 世界 🙂")


@pytest.mark.parametrize("text", TEXTS, ids=("short", "long", "unicode"))
def test_a_streamed_completion_equals_the_whole_one(served: Served, text: str) -> None:
    whole = served.complete(text, 40)
    served.flush()
    chunks = list(served.complete(text, 40, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert len(chunks) > 10, "the text did not come in pieces"
    assert streamed == whole.choices[0].text != ""
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 40
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


@pytest.mark.parametrize("thinking_mode", ("adaptive", "enabled", "disabled"))
def test_a_streamed_chat_equals_the_whole_one(served: Served, thinking_mode: str) -> None:
    whole = served.chat(TEXTS[1], 40, thinking_mode)
    served.flush()
    chunks = list(
        served.chat(TEXTS[1], 40, thinking_mode, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert "".join(delta.reasoning_content or "" for delta in deltas) == (message.reasoning_content or "")
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 40


def test_thinking_goes_to_reasoning_content_only_when_it_is_enabled(served: Served) -> None:
    thought = served.chat("Why?", thinking_mode="enabled")
    answered = served.chat("Why?", thinking_mode="disabled")
    assert thought.choices[0].message.reasoning_content
    assert not thought.choices[0].message.content
    assert thought.usage.reasoning_tokens == 12
    assert answered.choices[0].message.content
    assert not answered.choices[0].message.reasoning_content
    assert answered.usage.reasoning_tokens == 0


def check_alternatives(chosen: str, logprob: float, alternatives: dict[str, float]) -> None:
    """The greedy token leads a list of finite log-probabilities in descending order."""
    values = list(alternatives.values())
    assert all(math.isfinite(value) for value in values), alternatives
    assert values == sorted(values, reverse=True), alternatives
    assert sum(map(math.exp, values)) <= 1 + 1e-5, alternatives
    assert alternatives.get(chosen) == logprob == values[0], f"chose {chosen!r} {logprob} of {alternatives}"


def test_completion_logprobs_are_sorted_and_hold_the_chosen_token(served: Served) -> None:
    logprobs = served.complete("import os\n", logprobs=TOP).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    for chosen in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        check_alternatives(*chosen)


def test_chat_logprobs_are_sorted_and_hold_the_chosen_token(served: Served) -> None:
    content = served.chat("import os", logprobs=True, top_logprobs=TOP).choices[0].logprobs.content
    assert len(content) == 12
    for chosen in content:
        assert len(chosen.top_logprobs) == TOP
        check_alternatives(
            chosen.token, chosen.logprob, {other.token: other.logprob for other in chosen.top_logprobs}
        )


@pytest.mark.parametrize(("temperature", "distinct"), ((0, 1), (1.3, 3)))
def test_n_choices_are_equal_when_greedy_and_differ_when_sampled(
    served: Served, prompt: Prompt, temperature: float, distinct: int
) -> None:
    answer = served.complete(prompt(300), n=3, temperature=temperature)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == distinct, answer.choices
    assert answer.usage.completion_tokens == 3 * 12


@pytest.mark.parametrize(("length", "cached"), ((128, 0), (129, 128), (256, 128), (600, 512)))
def test_a_repeated_prompt_reports_its_whole_pages_as_cached_until_the_flush(
    served: Served, prompt: Prompt, length: int, cached: int
) -> None:
    def reported() -> int:
        return served.complete(prompt(length)).usage.prompt_tokens_details.cached_tokens

    assert (reported(), reported()) == (0, cached)
    served.flush()
    assert reported() == 0


BAD = {
    "longer than the context": ({"prompt": [5] * 140_000}, "context length"),
    "longer than the pool": ({"prompt": [5] * 70_000}, "maximum allowed length"),
    "too many new tokens": ({"prompt": [5], "max_tokens": 200_000}, "context length"),
    "negative temperature": ({"prompt": [5], "temperature": -1}, "temperature"),
    "no new tokens": ({"prompt": [5], "max_tokens": -1}, "max_tokens must be positive"),
    "no prompt": ({"prompt": []}, "empty"),
    "unknown thinking mode": (
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"thinking_mode": "maybe"}},
        "thinking_mode must be",
    ),
    "not an image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                }
            ]
        },
        "image",
    ),
}
"""Case -> (request, what the message must mention)."""


@pytest.mark.parametrize("case", tuple(BAD))
def test_a_bad_request_is_refused_with_a_message_and_the_server_goes_on(served: Served, case: str) -> None:
    body, mention = BAD[case]
    path = "chat/completions" if "messages" in body else "completions"
    response = requests.post(f"{served.url}/v1/{path}", json={"model": served.model, **body}, timeout=60)
    assert 400 <= response.status_code < 500, f"{response.status_code}: {response.text[:500]}"
    assert mention in response.json()["message"]
    assert served.complete("still there?", 2).usage.completion_tokens == 2


def test_an_image_is_answered_and_changes_the_answer(served: Served) -> None:
    def first_token(*parts: dict[str, Any]) -> Any:
        text = {"type": "text", "text": "What is this?"}
        return served.chat([*parts, text], 1, logprobs=True, top_logprobs=TOP)

    def image(red: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": png(red)}}

    answer, again, other, none = (
        first_token(image(0)),
        first_token(image(0)),
        first_token(image(255)),
        first_token(),
    )
    assert answer.usage.prompt_tokens > none.usage.prompt_tokens
    assert answer.usage.prompt_tokens == other.usage.prompt_tokens
    assert answer.choices[0].logprobs == again.choices[0].logprobs
    assert answer.choices[0].logprobs != other.choices[0].logprobs, "the pixels did not reach the model"


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
    served: Served, tiny: Path, tmp_path: Path
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
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai"]
    command += ["--base-url", served.url, "--model", served.model, "--tokenizer", str(tiny)]
    command += ["--dataset-name", "generated-shared-prefix", "--output-file", str(results)]
    command += [word for name, size in sizes.items() for word in (f"--gsp-{name}", str(size))]
    # It keeps generated prompts below the home directory.
    environ = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    result = json.loads(results.read_text())
    assert result["completed"] == groups * prompts, ended.stdout[-3000:]
    assert result["total_output_tokens"] == groups * prompts * output


def test_bfloat16_log_probabilities_stay_near_float32(
    served: Served, expected: Oracle, prompt: Prompt
) -> None:
    ids = prompt(1500)
    answer = Server(served.url, Path()).complete(ids, logprob_start=0)
    logprobs = expected.run(ids).logprobs
    errors = [abs(value - float(logprobs[at - 1, ids[at]])) for at, value in answer.prompt_logprobs.items()]
    assert len(errors) == len(ids) - 1
    # Rounding moves an expert or a block here and there, so single errors are large; a wrong sum moves all.
    assert statistics.median(errors) < MEDIAN_ERROR, statistics.median(errors)
