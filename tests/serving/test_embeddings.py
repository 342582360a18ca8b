"""Embeddings in place of token ids, which SGLang takes without a radix cache only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import torch
from torch import Tensor

from tests import oracle
from tests.serving.client import Server, server

pytestmark = [pytest.mark.server, pytest.mark.long]

LOGPROB_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def uncached(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--chunked-prefill-size", "384", "--disable-radix-cache")
    with server(tiny, tmp_path_factory.mktemp("uncached"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def model(tiny: Path) -> oracle.Model:
    return oracle.load_oracle(tiny)


def complete(running: Server, embeddings: Tensor, new_tokens: int) -> list[tuple[int, float]]:
    """Greedy tokens and their log-probabilities after `[N, hidden]` embeddings."""
    body = {
        "input_embeds": embeddings.tolist(),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    response = requests.post(f"{running.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return [(token, value) for value, token, _ in response.json()["meta_info"]["output_token_logprobs"]]


# Within one chunk and over several, within the selection and beyond.
@pytest.mark.parametrize("length", (5, 130, 1100))
def test_embeddings_that_no_token_has_give_what_the_oracle_says(
    uncached: Server, model: oracle.Model, prompt: Callable[..., list[int]], length: int
) -> None:
    ids = prompt(length)
    table = model.get_input_embeddings().weight.detach()
    # Two tokens' mean; SGLang rounds what it is given to bfloat16.
    embeddings = ((table[ids] + table[prompt(length, 3)]) / 2).bfloat16().float()
    answers = complete(uncached, embeddings, new_tokens=3)
    for number, (token, value) in enumerate(answers):
        generated = table[[token for token, _ in answers[:number]]]
        logits = model(
            inputs_embeds=_cat(embeddings, generated)[None], input_ids=None, use_cache=False
        ).logits[0, -1]
        logprobs = logits.detach().log_softmax(-1)
        assert abs(value - float(logprobs[token])) < LOGPROB_TOLERANCE, f"token {number}"
        assert float(logprobs.max() - logprobs[token]) < LOGPROB_TOLERANCE, f"token {number} is {token}"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: [row[:-1] for row in rows], "numbers for each token"),
        (lambda rows: [rows[0], rows[1][:-1]], "numbers for each token"),
        (lambda rows: [rows[0], [*rows[1][:-1], 1e300]], "1e+300 at place"),
    ],
    ids=["narrow", "ragged", "huge"],
)
def test_embeddings_that_the_model_cannot_take_are_refused_and_the_next_request_is_served(
    uncached: Server, model: oracle.Model, spoil: Callable[[list[list[float]]], object], words: str
) -> None:
    rows = model.get_input_embeddings().weight.detach()[5:7]
    body = {"input_embeds": spoil(rows.tolist()), "sampling_params": {"max_new_tokens": 1}}
    answer = requests.post(f"{uncached.url}/generate", json=body, timeout=120)
    assert answer.status_code == 400 and words in answer.text, answer.text[:500]
    assert complete(uncached, rows, new_tokens=1)


@pytest.fixture(scope="module")
def bfloat16(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--chunked-prefill-size", "384", "--disable-radix-cache", "--dtype", "bfloat16")
    with server(tiny, tmp_path_factory.mktemp("bfloat16"), *flags) as running:
        yield running


@pytest.mark.parametrize("length", (5, 450, 1100))
@torch.no_grad()
def test_in_bfloat16_embeddings_give_the_oracles_distribution(
    bfloat16: Server, model: oracle.Model, prompt: Callable[..., list[int]], length: int
) -> None:
    table = model.get_input_embeddings().weight
    embeddings = ((table[prompt(length)] + table[prompt(length, 3)]) / 2).bfloat16().float()
    body = {
        "input_embeds": embeddings.tolist(),
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": table.shape[0],
    }
    answer = requests.post(f"{bfloat16.url}/generate", json=body, timeout=120).json()
    got = torch.full((table.shape[0],), torch.nan)
    for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]:
        got[token] = value
    logits = model(inputs_embeds=embeddings[None], input_ids=None, use_cache=False).logits[0, -1]
    want = logits.log_softmax(-1)
    divergence = (want.exp() * (want - got)).sum()
    print(f"KL in nats: {divergence:.5f}")
    assert divergence < 0.01


def _cat(first: Tensor, then: Tensor) -> Tensor:
    return first.new_tensor([*first.tolist(), *then.tolist()])
