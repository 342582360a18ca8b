"""Served results equal transformers' own MiniMax-M3 for any chunking and cache hit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.serving.client import Server
from tests.serving.expectation import Oracle, check

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("float32")]

LENGTHS = (1, 127, 128, 129, 511, 513, 2000, 5000)
WHOLE = 8192

in_every_chunk_size = pytest.mark.parametrize(
    "chunk",
    [pytest.param(size, marks=pytest.mark.long) for size in (128, 384)] + [WHOLE],
    indirect=True,
    ids="chunk{}".format,
)
"""What chunks hardly touch: with small ones it is shown in `make test-long`."""


@pytest.fixture(scope="module", params=(128, 384, WHOLE), ids="chunk{}".format)
def chunk(request: pytest.FixtureRequest) -> int:
    """Tokens of a prompt that are computed in one step."""
    return request.param


@pytest.fixture(scope="module")
def chunked(chunk: int, float32: Server) -> Server:
    float32.set_chunk_tokens(chunk)
    return float32


@pytest.fixture(autouse=True)
def fresh(chunked: Server) -> None:
    chunked.flush()
    chunked.forget_blocks()


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_logprobs_and_blocks_equal_the_oracle(
    chunked: Server, chunk: int, expected: Oracle, prompt: Callable[..., list[int]], length: int
) -> None:
    ids = prompt(length)
    answer = chunked.complete(ids, logprob_start=0)
    assert len(answer.prompt_logprobs) == length - 1
    check(chunked, expected, ids, answer)
    rows = chunked.rows_per_step(answer.request_id)
    assert rows == [min(chunk, length - begin) for begin in range(0, length, chunk)]


@pytest.mark.parametrize("rest", (0, 1, 63, 127))
@pytest.mark.parametrize("blocks", (1, 5))
def test_a_hit_ends_at_the_last_common_page_wherever_prompts_diverge(
    chunked: Server, expected: Oracle, prompt: Callable[..., list[int]], blocks: int, rest: int
) -> None:
    common = blocks * 128 + rest
    first = prompt(900)
    second = first[:common] + [token + 1 for token in prompt(260, 3)]
    chunked.complete(first)
    answer = chunked.complete(second, new_tokens=3, logprob_start=common)
    assert answer.cached_tokens == blocks * 128
    check(chunked, expected, second, answer)


@pytest.mark.parametrize("blocks", (1, 4, 6))
def test_a_prompt_that_repeats_whole_pages_is_answered_from_the_cache(
    chunked: Server, expected: Oracle, prompt: Callable[..., list[int]], blocks: int
) -> None:
    ids = prompt(blocks * 128 + 1)
    chunked.complete(ids)
    answer = chunked.complete(ids, new_tokens=2)
    assert answer.cached_tokens == blocks * 128
    check(chunked, expected, ids, answer)


@in_every_chunk_size
def test_greedy_decoding_of_200_tokens_follows_the_oracle(
    chunked: Server, expected: Oracle, prompt: Callable[..., list[int]]
) -> None:
    ids = prompt(777)
    answer = chunked.complete(ids, new_tokens=200)
    assert len(answer.token_ids) == 200
    check(chunked, expected, ids, answer)


@in_every_chunk_size
@pytest.mark.parametrize(("requests", "order"), [(8, "given"), (8, "reversed"), (3, "given")])
def test_requests_that_share_a_prefix_are_each_as_if_alone(
    chunked: Server, expected: Oracle, prompt: Callable[..., list[int]], requests: int, order: str
) -> None:
    prefix = prompt(1030)
    prompts = [prefix + prompt(40 + 37 * number, number + 1) for number in range(requests)]
    if order == "reversed":
        prompts.reverse()
    chunked.complete(prefix)
    answers = chunked.complete_together(prompts, new_tokens=12)
    assert chunked.largest_batch() > 1, "the requests never met in a step"
    assert min(answer.cached_tokens for answer in answers) >= 8 * 128
    for ids, answer in zip(prompts, answers):
        check(chunked, expected, ids, answer)
