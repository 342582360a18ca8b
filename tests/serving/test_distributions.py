"""In bfloat16, what is served is the oracle's distribution up to rounding: compared whole, not by tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
import torch

from sglang_m3.tiny import TinyConfig
from tests.serving.expectation import Oracle

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

ROWS = 48
"""Rows of a prompt whose whole distribution is asked for."""

VOCAB = TinyConfig().vocab


def served(url: str, ids: list[int]) -> torch.Tensor:
    """`[ROWS, VOCAB]` log-probabilities after each of the last but one tokens."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": len(ids) - ROWS,
        "top_logprobs_num": VOCAB,
    }
    response = requests.post(f"{url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    meta = response.json()["meta_info"]
    rows = [row for row in [*meta["input_top_logprobs"], *meta["output_top_logprobs"]] if row is not None]
    found = torch.full((len(rows), VOCAB), torch.nan)
    for number, row in enumerate(rows):
        values, tokens, _ = zip(*row)
        found[number, list(tokens)] = torch.tensor(values)
    assert not found.isnan().any(), "a token without a log-probability"
    return found[-ROWS:]


@pytest.mark.parametrize("length", (400, 1500))
def test_distributions_are_close_to_the_float32_oracle(
    endpoint: Any, expected: Oracle, prompt: Callable[..., list[int]], length: int
) -> None:
    ids = prompt(length)
    want = expected.run(ids).logprobs[-ROWS:]
    got = served(endpoint.url, ids)
    divergence = (want.exp() * (want - got)).sum(-1)
    print(f"KL in nats: median {divergence.median():.5f}, largest {divergence.max():.4f}")
    assert divergence.median() < 0.005
    assert divergence.max() < 0.5
