"""Replies through the real server: what a test dictates, as the clients of three APIs receive it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.parsing.writing import block
from tests.serving.conftest import Endpoint
from tests.serving.reply_cases import ENDS, NOW, PLAN, REPLIES
from tests.serving.reply_clients import APIS, Reply, Served, clients, joined_chat, whole_chat

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

AROUND_CALLS = ("text inside a call", "thinking after a call")
IN_EVERY_API = (
    *AROUND_CALLS,
    "thinking that the model opened",
    "markers in several tokens",
    "text and whitespace after a call",
    "the ends of calls and thinking in a value",
    "an unknown function",
)
"""What the APIs put together in ways of their own; the rest is read by the same code for all."""
STEP_TOKENS = 7
"""Streamed at a time, so that a step ends a call and goes on."""
AT_A_TIME = 32
"""Requests that are answered together: tokens of a batch cost little more than those of one request."""


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


both = pytest.mark.parametrize("stream", (0, 1), ids=("whole", "streamed"))
Key = tuple[str, str, int]
"""API, case, tokens that are streamed at a time or 0."""
ANSWERED: tuple[Key, ...] = (
    *(("chat", case, stream) for case in REPLIES for stream in (0, 1)),
    *((api, case, 1) for api in APIS[1:] for case in IN_EVERY_API),
    *((api, case, 0) for api in APIS[1:] for case in AROUND_CALLS),
    *((api, case, STEP_TOKENS) for api in APIS for case in AROUND_CALLS),
)
ENDED: tuple[Key, ...] = tuple((api, case, stream) for api in APIS for case in ENDS for stream in (0, 1))
NO_TOOLS, NO_CALLS = "no tools", "no calls"
TEXT_ONLY: tuple[Key, ...] = (
    *(("chat", NO_TOOLS, stream) for stream in (0, 1)),
    *((api, NO_CALLS, stream) for api in APIS for stream in (0, 1)),
)


THOUGHT = "<mm:think>a</mm:think>b"


def ask(served: Served, api: str, case: str, stream: int) -> Reply:
    if case in REPLIES:
        mode, pieces, _ = REPLIES[case]
        return served.reply(api, pieces, mode, stream=stream)
    if case == NO_TOOLS:
        return served.chat(THOUGHT + block(PLAN), stream=stream, tools=openai.NOT_GIVEN)
    if case == NO_CALLS:
        return served.reply(api, THOUGHT + block(NOW), "adaptive", stream=stream, choice="none")
    end = ENDS[case]
    limit = {"max_tokens": tokens_of(served, end.text, end.shown)} if end.shown else {}
    return served.reply(api, end.text, end.mode, stream=stream, stop=end.stop, **limit)


def tokens_of(served: Served, text: str, shown: str) -> int:
    """How many of the tokens of `text` its beginning `shown` is."""
    count = len(served.write.tokenizer(shown)["input_ids"])
    assert served.write.tokenizer.decode(served.write.tokenizer(text)["input_ids"][:count]) == shown
    return count


@pytest.fixture(scope="module")
def replies(served: Served) -> Iterator[dict[Key, Future[Reply]]]:
    """All in flight together."""
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {key: pool.submit(ask, served, *key) for key in (*TEXT_ONLY, *ENDED, *ANSWERED)}


@pytest.mark.parametrize(("api", "case", "stream"), ANSWERED)
def test_a_reply_reaches_the_client_whole(
    replies: dict[Key, Future[Reply]], api: str, case: str, stream: int
) -> None:
    assert replies[api, case, stream].result() == REPLIES[case][2]


@pytest.mark.parametrize(("api", "case", "stream"), ENDED)
def test_a_reply_that_ends_early_keeps_what_it_had_and_says_why(
    replies: dict[Key, Future[Reply]], api: str, case: str, stream: int
) -> None:
    end = ENDS[case]
    assert replies[api, case, stream].result() == ((stream and end.streamed) or end.reply)


@both
def test_without_tools_in_the_request_a_call_is_read_as_by_its_text(
    replies: dict[Key, Future[Reply]], stream: int
) -> None:
    reply = replies["chat", NO_TOOLS, stream].result()
    ((name, arguments),) = reply.calls
    assert (reply.reasoning, reply.content, name, reply.finish) == ("a", "b", "plan", "tool_calls")
    assert arguments["limits"] == {"cost": "2.5", "who": None}


def test_every_choice_of_a_request_is_read_by_itself(served: Served) -> None:
    def ask(stream: bool) -> Any:
        answer = served.create("Go on.", THOUGHT + block(NOW), n=2, stream=stream)
        return list(answer) if stream else answer

    with ThreadPoolExecutor(2) as pool:
        whole, chunks = pool.map(ask, (False, True))
    expected = Reply("a", "b", (NOW,), "tool_calls")
    assert [whole_chat(whole, index) for index in (0, 1)] == [expected] * 2
    assert [joined_chat(chunks, index) for index in (0, 1)] == [expected] * 2


@both
@pytest.mark.parametrize("api", APIS)
def test_calls_stay_text_when_the_request_wants_none(
    replies: dict[Key, Future[Reply]], api: str, stream: int
) -> None:
    assert replies[api, NO_CALLS, stream].result() == Reply("a", f"b{block(NOW)}", (), "stop")
