"""Calls that a request forces: in M3's own format, under their schema, after thinking if there is any."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.parsing.writing import block
from tests.serving.conftest import Endpoint
from tests.serving.reply_clients import Reply, Served, clients

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

both = pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, properties in (
        (
            "lamp",
            {
                "on": {"type": "boolean"},
                "levels": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
            },
        ),
        ("turn", {"side": {"enum": ["left", "right"]}}),
    )
]
"""Tools whose arguments even a model that writes noise brings to an end."""
TURN = {"type": "function", "function": {"name": "turn"}}


@pytest.fixture(scope="module")
def no_spaces(served: Served) -> dict[str, int]:
    """A bias against whitespace, which the grammar allows between tags and noise is full of."""
    tokenizer = served.write.tokenizer
    return {str(token): -100 for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()}


SEEDS = (0, 1, 2)
CHOICES = {"required": "required", "named": TURN}


@pytest.fixture(scope="module")
def forced_replies(
    served: Served, no_spaces: dict[str, int]
) -> Iterator[dict[tuple[str, bool, int], Future[Reply]]]:
    """By choice, streaming and seed; all in flight together."""

    def ask(choice: str, stream: bool, seed: int) -> Reply:
        return served.chat(
            None,
            "disabled",
            stream=stream,
            tools=TOOLS,
            tool_choice=CHOICES[choice],
            parallel_tool_calls=False,
            temperature=1,
            logit_bias=no_spaces,
            extra_body={"sampling_seed": seed},
        )

    keys = list(itertools.product(CHOICES, (False, True), SEEDS))
    with ThreadPoolExecutor(len(keys)) as pool:
        yield {key: pool.submit(ask, *key) for key in keys}


@both
@pytest.mark.parametrize("choice", tuple(CHOICES))
def test_a_forced_call_follows_its_schema_whatever_the_model_would_write(
    forced_replies: Any, choice: str, stream: bool
) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for seed in SEEDS:
        reply = forced_replies[choice, stream, seed].result()
        assert (reply.reasoning, reply.content, reply.finish) == ("", "", "tool_calls"), reply
        ((name, arguments),) = reply.calls
        assert name == "turn" or choice == "required"
        jsonschema.validate(arguments, schemas[name])


CALL = block(("turn", {"side": "left"}))
THOUGHT = {
    "thinking off": ("disabled", CALL, ""),
    "thinking that the prompt opened": ("enabled", f"Left, I think.</mm:think>{CALL}", "Left, I think."),
    "thinking that the model opened": (
        "adaptive",
        f"<mm:think>Left, I think.</mm:think>{CALL}",
        "Left, I think.",
    ),
    "thinking that the model declined": ("adaptive", f"</mm:think>{CALL}", ""),
    "no thinking": ("adaptive", CALL, ""),
}
"""Case -> (thinking mode, reply, its thinking)."""


Key = tuple[str, str, bool]


@pytest.fixture(scope="module")
def thoughtful(served: Served) -> Iterator[dict[Key, Future[Reply]]]:
    """By case, choice and streaming; all in flight together."""

    def ask(case: str, choice: str, stream: bool) -> Reply:
        mode, text, _ = THOUGHT[case]
        return served.chat(text, mode, stream=stream, tools=TOOLS, tool_choice=CHOICES[choice])

    keys = list(itertools.product(THOUGHT, CHOICES, (False, True)))
    with ThreadPoolExecutor(len(keys)) as pool:
        yield {key: pool.submit(ask, *key) for key in keys}


@both
@pytest.mark.parametrize("choice", tuple(CHOICES))
@pytest.mark.parametrize("case", tuple(THOUGHT))
def test_a_forced_call_comes_after_thinking(
    thoughtful: dict[Key, Future[Reply]], case: str, choice: str, stream: bool
) -> None:
    reply = thoughtful[case, choice, stream].result()
    assert reply == Reply(THOUGHT[case][2], "", (("turn", {"side": "left"}),), "tool_calls")
