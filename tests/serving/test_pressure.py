"""Eviction, retraction, abort and overlap happen, and change no surviving answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from launch.server import metric
from tests.serving.client import Completion, Server, server
from tests.serving.conftest import POOL_TOKENS
from tests.serving.expectation import Oracle, check
from tests.serving.scheduling import overlapped_steps

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("float32")]


@pytest.fixture
def small(float32: Server) -> Server:
    """The server with an empty cache."""
    float32.set_chunk_tokens(384)
    float32.flush()
    float32.forget_blocks()
    return float32


def test_decode_steps_overlap_and_the_tokens_are_the_oracle_s(
    small: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    ids = prompt(150, 4)
    before = overlapped_steps(small.url)
    answer = small.complete(ids, new_tokens=30)
    # Each decode step starts before the step in front of it is evaluated, but for the first and the last.
    assert overlapped_steps(small.url) - before >= 28
    check(small, expected, ids, answer)


def test_an_evicted_prefix_is_computed_again_with_the_same_result(
    small: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    first = prompt(700)
    before = small.complete(first, new_tokens=4)
    assert small.complete(first, new_tokens=4).cached_tokens == 640
    for seed in range(1, 5):
        small.complete(prompt(1300, seed), new_tokens=2)
    after = small.complete(first, new_tokens=4)
    assert after.cached_tokens < 640, "nothing was evicted"
    assert after.token_ids == before.token_ids
    check(small, expected, first, after)


def test_retracted_requests_end_with_the_tokens_of_an_undisturbed_run(
    small: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    # Their prompts fit, but not the page that each starts after 40 new tokens.
    prompts = [prompt(600, seed) for seed in range(1, 9)]
    assert 8 * 5 * 128 <= POOL_TOKENS < 8 * 6 * 128
    # Requests that may end early are admitted by a guess; with `ignore_eos` SGLang would count exactly.
    answers = small.complete_together(prompts, new_tokens=60, ignore_eos=False)
    retractions = [answer.retractions for answer in answers]
    assert sum(retractions) > 0, "the pool was large enough after all"
    for ids, answer in zip(prompts, answers):
        check(small, expected, ids, answer)


def test_a_client_that_disconnects_is_aborted_and_the_others_are_not_disturbed(
    small: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    aborted = metric(small.url, "sglang:num_aborted_requests_total")
    survivor = prompt(300, 7)

    def leave() -> None:
        request = {
            "input_ids": prompt(300, 8),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(f"{small.url}/generate", json=request, stream=True, timeout=60) as response:
            next(response.iter_lines())

    with ThreadPoolExecutor(2) as pool:
        pending = pool.submit(small.complete, survivor, 60)
        pool.submit(leave).result()
        answer: Completion = pending.result()
    check(small, expected, survivor, answer)
    deadline = time.monotonic() + 20
    while metric(small.url, "sglang:num_aborted_requests_total") == aborted:
        assert time.monotonic() < deadline, "the disconnected request was never aborted"
        time.sleep(0.2)


@pytest.mark.long
def test_without_the_radix_cache_nothing_is_cached_and_the_results_are_the_same(
    tiny: Path, expected: Oracle, prompt: Callable[..., list[int]], tmp_path: Path
) -> None:
    ids = prompt(700)
    with server(tiny, tmp_path, "--chunked-prefill-size", "256", "--disable-radix-cache") as uncached:
        for _ in range(2):
            answer = uncached.complete(ids, new_tokens=5)
            assert answer.cached_tokens == 0
            check(uncached, expected, ids, answer)
        prefix = prompt(520, 5)
        prompts = [prefix + prompt(30 + number, number + 1) for number in range(4)]
        for wanted, answer in zip(prompts, uncached.complete_together(prompts, new_tokens=5)):
            check(uncached, expected, wanted, answer)
