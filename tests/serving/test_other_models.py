"""With the plugin installed, models that are not M3 are served as SGLang serves them."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import requests
import torch
from transformers import PreTrainedModel

from sglang_m3 import hardware
from tests.serving import small_models
from tests.serving.client import Completion, Server

pytestmark = [pytest.mark.server, pytest.mark.long]

LOGPROB_TOLERANCE = 2e-5
"""Four times the largest difference seen; an expert's weights scaled by 1.0001 would cause 1e-3."""
CHUNK = 61
"""Tokens of a prefill chunk; M3 would be refused, its chunks are multiples of 128."""


@dataclass(frozen=True)
class Other:
    """A server and the transformers model that it serves."""

    server: Server
    model: PreTrainedModel

    def check(self, prompt: list[int], answer: Completion) -> None:
        """Every returned log-probability within `LOGPROB_TOLERANCE`, every token the most likely one."""
        ids = prompt + answer.token_ids
        with torch.inference_mode():
            logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        returned = {**answer.prompt_logprobs, **dict(enumerate(answer.token_logprobs, len(prompt)))}
        returned.pop(0, None)
        differences = {
            position: value - float(logprobs[position - 1, ids[position]])
            for position, value in returned.items()
        }
        worst = max(differences, key=lambda position: abs(differences[position]))
        assert abs(differences[worst]) < LOGPROB_TOLERANCE, (
            f"position {worst} of {len(ids)} is off by {differences[worst]:.2e}"
        )
        for position in range(len(prompt), len(ids)):
            behind = float(logprobs[position - 1].max() - logprobs[position - 1, ids[position]])
            assert behind < LOGPROB_TOLERANCE, f"position {position}: another token is {behind:.2e} likelier"


@pytest.fixture(
    scope="module",
    params=("qwen3-moe", "llama"),
)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Other]:
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        assert "sglang_m3" in importlib.metadata.entry_points(group=group).names, f"{group}: not installed"
    scratch = tmp_path_factory.mktemp(request.param)
    model = small_models.build(request.param, scratch / "checkpoint")
    flags = ("--chunked-prefill-size", str(CHUNK))
    with small_models.server(scratch / "checkpoint", scratch, *flags) as running:
        yield Other(running, model)


@pytest.fixture(autouse=True)
def fresh(other: Other) -> None:
    other.server.flush()


def tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(500), k=length)


def test_the_plugin_leaves_the_server_arguments_alone(other: Other) -> None:
    info = requests.get(f"{other.server.url}/server_info", timeout=10).json()
    assert info["page_size"] != 128
    assert info["chunked_prefill_size"] == CHUNK
    if hardware.target() == "cpu":
        assert (info["device"], info["attention_backend"]) == ("cpu", "torch_native")


@pytest.mark.parametrize("length", (1, 60, 61, 62, 129, 300))
def test_prompt_and_greedy_logprobs_equal_transformers(other: Other, length: int) -> None:
    prompt = tokens(length, seed=length)
    answer = other.server.complete(prompt, new_tokens=9, logprob_start=0)
    assert answer.cached_tokens == 0
    assert len(answer.prompt_logprobs) == length - 1
    other.check(prompt, answer)


@pytest.mark.parametrize("common", (1, 53, 200))
def test_a_radix_hit_ends_at_the_token_where_prompts_diverge(other: Other, common: int) -> None:
    first = tokens(230, seed=1)
    second = [*first[:common], (first[common] + 1) % 500, *tokens(71, seed=2)]
    other.server.complete(first)
    answer = other.server.complete(second, new_tokens=5, logprob_start=common)
    assert answer.cached_tokens == common, "pages of one token are SGLang's default"
    other.check(second, answer)


def test_requests_that_share_a_prefix_decode_together_as_if_alone(other: Other) -> None:
    prefix = tokens(140, seed=3)
    prompts = [prefix + tokens(10 + 7 * number, seed=4 + number) for number in range(5)]
    other.server.complete(prefix)
    for prompt, answer in zip(prompts, other.server.complete_together(prompts, new_tokens=20)):
        assert answer.cached_tokens >= len(prefix)
        other.check(prompt, answer)
