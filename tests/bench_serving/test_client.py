"""Every request is counted, timed and failed for what it was."""

from __future__ import annotations

import pytest

from bench_serving import client
from bench_serving.client import drive
from bench_serving.sessions import Session, Turn
from tests.bench_serving.fake_server import FakeServer, expected_tokens


def session(key: int, opening: tuple[int, ...] = (1, 2, 3), *turns: Turn) -> Session:
    return Session(key, opening, 0, turns or (Turn(((key, 5),), 7, 0.0),))


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("pair", [False, True], ids=["one-token-events", "two-token-events"])
def test_tokens_and_times_are_counted_however_they_arrive(incremental: bool, pair: bool) -> None:
    with FakeServer(incremental=incremental, pair=pair, token_seconds=0.01) as fake:
        driven = drive(fake.url, [session(key) for key in range(3)], 2)
    assert [exchange.session for exchange in driven.exchanges] == [0, 1, 2]
    for exchange in driven.exchanges:
        output = exchange.output
        assert output.success, output.error
        assert list(exchange.output_ids) == expected_tokens([1, 2, 3, exchange.session, 5], 7)
        assert output.output_len == 7 and output.prompt_len == 5
        # The first event's tokens have no gap before them.
        assert len(output.itl) == (5 if pair else 6)
        assert output.ttft + sum(output.itl) == pytest.approx(output.latency)
        assert 0.009 < output.ttft < output.latency <= driven.seconds
    assert driven.client_cpu_seconds > 0


def test_as_many_sessions_as_asked_are_in_flight() -> None:
    with FakeServer(token_seconds=0.01) as fake:
        drive(fake.url, [session(key) for key in range(9)], 4)
    assert fake.most_at_once == 4


@pytest.mark.parametrize(("idle_limit", "connections"), [(60.0, 2), (0.0, 6)])
def test_a_connection_is_used_again_unless_it_was_idle_for_long(
    idle_limit: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IDLE_LIMIT_SECONDS", idle_limit)
    with FakeServer(token_seconds=0.005) as fake:
        driven = client.drive(fake.url, [session(key) for key in range(6)], 2)
    assert all(exchange.output.success for exchange in driven.exchanges)
    assert len(fake.connections) == connections


FAULTS = {
    "http": "HTTP 400",
    "stream": "went wrong",
    "short": "2 of 7 tokens",
    "drop": "Error",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items(), ids=FAULTS)
def test_a_failed_request_says_why_and_leaves_the_others(fault: str, message: str) -> None:
    with FakeServer(fault=lambda number: fault if number == 1 else None) as fake:
        driven = drive(fake.url, [session(key) for key in range(4)], 1)
    assert [exchange.output.success for exchange in driven.exchanges] == [True, False, True, True]
    assert message in driven.exchanges[1].output.error


def test_a_server_that_is_not_there_fails_every_request() -> None:
    with FakeServer() as fake:
        url = fake.url
    driven = drive(url, [session(key) for key in range(2)], 2)
    assert [exchange.output.success for exchange in driven.exchanges] == [False, False]


def test_a_turn_holds_everything_before_it_and_the_model_s_own_answer() -> None:
    turns = tuple(Turn(((10 + turn,),), 3, 0.0) for turn in range(3))
    with FakeServer() as fake:
        drive(fake.url, [session(0, (1, 2), *turns)], 1)
    first, second, third = fake.prompts
    assert first == [1, 2, 10]
    assert second == [*first, *expected_tokens(first, 3), 11]
    assert third == [*second, *expected_tokens(second, 3), 12]


def test_a_session_whose_turn_failed_counts_its_other_turns_as_failed() -> None:
    turns = tuple(Turn(((10 + turn,),), 3, 0.0) for turn in range(3))
    with FakeServer(fault=lambda number: "http" if number == 1 else None) as fake:
        driven = drive(fake.url, [session(0, (1, 2), *turns)], 1)
    assert [exchange.output.success for exchange in driven.exchanges] == [True, False, False]
    assert len(fake.prompts) == 2
    assert driven.exchanges[2].output.error.startswith("not sent")


def test_branches_are_sent_at_once() -> None:
    turn = Turn(((7,), (8,), (9,)), 4, 0.0)
    with FakeServer(token_seconds=0.02) as fake:
        driven = drive(fake.url, [session(0, (1, 2), turn)], 1)
    assert fake.most_at_once == 3
    assert sorted(fake.prompts) == [[1, 2, 7], [1, 2, 8], [1, 2, 9]]
    assert [exchange.branch for exchange in driven.exchanges] == [0, 1, 2]
