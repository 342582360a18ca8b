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
from tests.serving.reply_cases import NOW, PLAN, REPLIES, WRITE
from tests.serving.reply_clients import Reply, Served, clients

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

IN_EVERY_API = ("an answer", "a call after thinking", "delimiters in values")
AT_A_TIME = 24
"""Requests that are answered together: tokens of a batch cost little more than those of one request."""


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


both = pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))


def ask(served: Served, api: str, case: str, stream: bool) -> Reply:
    mode, pieces, _ = REPLIES[case]
    if api == "chat":
        return served.chat(pieces, mode, stream=stream)
    if api == "responses":
        return served.respond(pieces, mode, stream=stream)
    thinking = {"type": mode, **({"budget_tokens": 1024} if mode == "enabled" else {})}
    return served.messages(pieces, thinking, stream=stream)


@pytest.fixture(scope="module")
def replies(served: Served) -> Iterator[dict[tuple[str, str, bool], Future[Reply]]]:
    """Every case, in every API that it is for, whole and streamed; all in flight together."""
    apis = {"chat": tuple(REPLIES), "messages": IN_EVERY_API, "responses": IN_EVERY_API}
    keys = [(api, case, stream) for api, cases in apis.items() for case in cases for stream in (False, True)]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {key: pool.submit(ask, served, *key) for key in keys}


@both
@pytest.mark.parametrize("case", tuple(REPLIES))
def test_a_reply_reaches_the_client_whole(replies: Any, case: str, stream: bool) -> None:
    assert replies["chat", case, stream].result() == REPLIES[case][2]


@both
@pytest.mark.parametrize("case", IN_EVERY_API)
@pytest.mark.parametrize("api", ("messages", "responses"))
def test_a_reply_is_the_same_in_every_api(replies: Any, api: str, case: str, stream: bool) -> None:
    assert replies[api, case, stream].result() == REPLIES[case][2]


@both
def test_without_tools_in_the_request_a_call_is_read_as_by_its_text(served: Served, stream: bool) -> None:
    reply = served.chat(f"<mm:think>a</mm:think>b{block(PLAN)}", stream=stream, tools=openai.NOT_GIVEN)
    ((name, arguments),) = reply.calls
    assert (reply.reasoning, reply.content, name, reply.finish) == ("a", "b", "plan", "tool_calls")
    assert arguments["limits"] == {"cost": "2.5", "who": None}


@both
def test_calls_stay_text_when_the_request_wants_none(served: Served, stream: bool) -> None:
    reply = served.chat(f"<mm:think>a</mm:think>b{block(WRITE)}", stream=stream, tool_choice="none")
    assert reply == Reply("a", f"b{block(WRITE)}", (), "stop")


def cut(served: Served, text: str, shown: str) -> dict[str, Any]:
    """Options that stop `text` after the tokens of its beginning `shown`."""
    count = len(served.write.tokenizer(shown)["input_ids"])
    assert served.write.tokenizer.decode(served.write.tokenizer(text)["input_ids"][:count]) == shown
    return {"max_tokens": count}


@both
def test_a_length_stop_inside_thinking_leaves_reasoning_only(served: Served, stream: bool) -> None:
    text = "Two and two are four</mm:think>Four."
    reply = served.chat(text, "enabled", stream=stream, **cut(served, text, "Two and two"))
    assert reply == Reply("Two and two", "", (), "length")


@both
def test_a_length_stop_after_a_call_keeps_the_call_and_its_reason(served: Served, stream: bool) -> None:
    text = f"{block(WRITE)} and more"
    reply = served.chat(text, "disabled", stream=stream, **cut(served, text, f"{block(WRITE)} and"))
    assert reply == Reply("", " and", (WRITE,), "length")


def test_a_length_stop_inside_a_call_gives_its_text_and_no_call(served: Served) -> None:
    text = f"One {block(NOW)} two {block(WRITE)}"
    shown = text[: text.index("hello") + len("hello")]
    reply = served.chat(text, "disabled", **cut(served, text, shown))
    assert reply == Reply("", shown.replace(block(NOW), ""), (NOW,), "length")


def test_a_length_stop_inside_a_streamed_call_leaves_its_arguments_open(served: Served) -> None:
    text = f"One {block(NOW)} two {block(WRITE)}"
    shown = text[: text.index("hello") + len("hello")]
    reply = served.chat(text, "disabled", stream=True, **cut(served, text, shown))
    cut_off = ("write", '{"path": "a.txt", "content": "hello')
    assert reply == Reply("", "One  two ", (NOW, cut_off), "length")


def test_a_streamed_call_that_the_turn_ends_is_no_reason_to_run_it(served: Served) -> None:
    text = block(WRITE)[: block(WRITE).index("hello")]
    reply = served.chat(text, "disabled", stream=True)
    assert reply == Reply("", "", (("write", '{"path": "a.txt", "content": "'),), "stop")


@both
def test_a_stop_string_ends_the_answer(served: Served, stream: bool) -> None:
    assert served.chat("One. Two.", "disabled", stream=stream, stop=[" Two"]) == Reply("", "One.", (), "stop")
