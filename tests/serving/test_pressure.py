"""Eviction, retraction, abort and overlap happen, and change no surviving answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from launch.server import metric
from tests.serving.client import Completion, Server, server
from tests.serving.expectation import Oracle, check

pytestmark = pytest.mark.server

POOL_TOKENS = 2560


@pytest.fixture(scope="module")
def small(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose pool holds twenty pages, and which admits requests as if answers were short."""
    flags = ("--max-total-tokens", str(POOL_TOKENS), "--schedule-conservativeness", "0.05")
    with server(tiny, tmp_path_factory.mktemp("small"), "--chunked-prefill-size", "384", *flags) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(small: Server) -> None:
    small.flush()
    small.forget_blocks()


def info(running: Server) -> dict:
    return requests.get(f"{running.url}/server_info", timeout=10).json()


def test_overlap_scheduling_is_on(small: Server) -> None:
    assert info(small)["disable_overlap_schedule"] is False


def test_an_evicted_prefix_is_computed_again_with_the_same_result(
    small: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    first = prompt(700)
    before = small.complete(first, new_tokens=4)
    assert small.complete(first, new_tokens=4).cached_tokens == 640
    for seed in range(1, 5):
        small.complete(prompt(900, seed), new_tokens=2)
    after = small.complete(first, new_tokens=4)
    assert after.cached_tokens < 640, "nothing was evicted"
    assert after.token_ids == before.token_ids
    check(small, expected, first, after)


def test_retracted_requests_end_with_the_tokens_of_an_undisturbed_run(
    small: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    prompts = [prompt(380, seed) for seed in range(1, 6)]
    # Requests that may end early are admitted by a guess; with `ignore_eos` SGLang would count exactly.
    answers = small.complete_together(prompts, new_tokens=300, ignore_eos=False)
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


def test_without_the_radix_cache_nothing_is_cached_and_the_results_are_the_same(
    tiny: Path, expected: Oracle, prompt: Callable[..., list[int]], tmp_path: Path
) -> None:
    ids = prompt(700)
    with server(tiny, tmp_path, "--chunked-prefill-size", "384", "--disable-radix-cache") as uncached:
        for _ in range(2):
            answer = uncached.complete(ids, new_tokens=5)
            assert answer.cached_tokens == 0
            check(uncached, expected, ids, answer)
        prefix = prompt(520, 5)
        prompts = [prefix + prompt(30 + number, number + 1) for number in range(4)]
        for wanted, answer in zip(prompts, uncached.complete_together(prompts, new_tokens=5)):
            check(uncached, expected, wanted, answer)
