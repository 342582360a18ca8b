"""The load generator's cost is near that of waking up and reading."""

from __future__ import annotations

from bench_serving import client_cost
from bench_serving.client_cost import Cost


def test_a_core_s_share_is_that_of_a_request_and_its_tokens() -> None:
    assert Cost(8, request=200.0, token=10.0, floor_token=9.0).core_share(0) == 0.02
    assert Cost(8, request=200.0, token=10.0, floor_token=9.0).core_share(100) == 0.12


def test_a_token_costs_little_more_than_reading_it() -> None:
    # Many streams at once: what is left when a wake-up serves many. Other processes disturb both alike.
    cost = client_cost.measure(32, prompt_tokens=2000, tokens=60, milliseconds=10)
    assert 0 < cost.token < 3 * cost.floor_token, cost
    assert cost.core_share(0) < 0.05, cost
