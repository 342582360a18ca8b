"""The OpenAI API of the server as a user gets it: `launch/serve.sh`, the tiny checkpoint in bfloat16."""

from __future__ import annotations

import base64
import io
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from PIL import Image

from tests.serving.client import Server
from tests.serving.completions import Served, connect
from tests.serving.conftest import Endpoint
from tests.serving.expectation import Oracle

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

TOP = 8
"""Alternatives asked for; more than could tie with the greedy token in bfloat16."""

MEDIAN_ERROR = 0.05
"""Of prompt log-probabilities in bfloat16; leaving out one layer's experts moves every row by 0.7 or more."""

Prompt = Callable[..., list[int]]


@pytest.fixture(scope="module")
def served(endpoint: Endpoint) -> Served:
    return connect(endpoint.url, endpoint.log)


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
    whole = served.complete(text, 24)
    served.flush()
    chunks = list(served.complete(text, 24, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert len(chunks) > 10, "the text did not come in pieces"
    assert streamed == whole.choices[0].text != ""
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 24
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


@pytest.mark.parametrize("thinking_mode", ("adaptive", "enabled", "disabled"))
def test_a_streamed_chat_equals_the_whole_one(served: Served, thinking_mode: str) -> None:
    whole = served.chat(TEXTS[1], 24, thinking_mode)
    served.flush()
    chunks = list(
        served.chat(TEXTS[1], 24, thinking_mode, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message = whole.choices[0].message
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert "".join(delta.reasoning_content or "" for delta in deltas) == (message.reasoning_content or "")
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 24


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
