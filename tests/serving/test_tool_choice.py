"""Calls that a request forces: in M3's own format, under their schema, after thinking if there is any."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from tests.parsing.writing import block
from tests.serving.conftest import Endpoint
from tests.serving.reply_clients import APIS, Reply, Served, clients

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]


@pytest.fixture(scope="module")
def served(endpoint: Endpoint, tiny: Path) -> Served:
    return clients(endpoint.url, tiny)


FUNCTIONS = {
    name: {"type": "object", "properties": properties, "required": list(properties)}
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
}
"""Tools whose arguments even a model that writes noise brings to an end."""
CHOICES = ("required", "turn")
"""Any tool, and one by its name."""
CHAT, *OTHERS = APIS


@pytest.fixture(scope="module")
def no_spaces(served: Served) -> dict[str, int]:
    """A bias against whitespace, which the grammar allows between tags and noise is full of."""
    tokenizer = served.write.tokenizer
    return {str(token): -100 for token in range(len(tokenizer)) if tokenizer.decode([token]).isspace()}


Noise = tuple[str, str, int, int]
"""API, choice, streaming, number of the try."""
NOISE: tuple[Noise, ...] = (
    *itertools.product((CHAT,), CHOICES, (0, 1), (0, 1)),
    *itertools.product(OTHERS, CHOICES, (1,), (0,)),
)


@pytest.fixture(scope="module")
def forced_replies(served: Served, no_spaces: dict[str, int]) -> Iterator[dict[Noise, Future[Reply]]]:
    """All in flight together."""

    def ask(api: str, choice: str, stream: int) -> Reply:
        options = {"functions": FUNCTIONS, "choice": choice, "parallel": False, "bias": no_spaces}
        return served.reply(api, None, "disabled", stream=stream, **options)

    with ThreadPoolExecutor(len(NOISE)) as pool:
        yield {key: pool.submit(ask, *key[:3]) for key in NOISE}


@pytest.mark.parametrize(("api", "choice", "stream"), dict.fromkeys(key[:3] for key in NOISE))
def test_a_forced_call_follows_its_schema_whatever_the_model_would_write(
    forced_replies: dict[Noise, Future[Reply]], api: str, choice: str, stream: int
) -> None:
    for key, future in forced_replies.items():
        if key[:3] == (api, choice, stream):
            reply = future.result()
            assert (reply.reasoning, reply.content, reply.finish) == ("", "", "tool_calls"), reply
            ((name, arguments),) = reply.calls
            assert name == "turn" or choice == "required"
            jsonschema.validate(arguments, FUNCTIONS[name])


CALL = block(("turn", {"side": "left"}))
OPENED = "thinking that the prompt opened"
CHOSEN = "thinking that the model opened"
THOUGHT = {
    "thinking off": ("disabled", CALL, ""),
    OPENED: ("enabled", f"Left, I think.</mm:think>{CALL}", "Left, I think."),
    CHOSEN: ("adaptive", f"<mm:think>Left, I think.</mm:think>{CALL}", "Left, I think."),
    "thinking that the model declined": ("adaptive", f"</mm:think>{CALL}", ""),
    "no thinking": ("adaptive", CALL, ""),
}
"""Case -> (thinking mode, reply, its thinking)."""


Key = tuple[str, str, str, int]
"""API, case, choice, streaming. A choice of `auto` is one with strict tools, whose calls are constrained."""
THOUGHTFUL: tuple[Key, ...] = (
    *itertools.product((CHAT,), THOUGHT, CHOICES, (0, 1)),
    *itertools.product((CHAT,), (OPENED, CHOSEN), ("auto",), (1,)),
    *itertools.product(OTHERS, (OPENED, CHOSEN), ("required",), (0,)),
    *itertools.product(OTHERS, (OPENED, CHOSEN), ("turn",), (1,)),
    *itertools.product(OTHERS, (CHOSEN,), ("auto",), (1,)),
)


@pytest.fixture(scope="module")
def thoughtful(served: Served) -> Iterator[dict[Key, Future[Reply]]]:
    """All in flight together."""

    def ask(api: str, case: str, choice: str, stream: int) -> Reply:
        mode, text, _ = THOUGHT[case]
        options = {"functions": FUNCTIONS, "choice": choice, "strict": choice == "auto"}
        return served.reply(api, text, mode, stream=stream, **options)

    with ThreadPoolExecutor(len(THOUGHTFUL)) as pool:
        yield {key: pool.submit(ask, *key) for key in THOUGHTFUL}


@pytest.mark.parametrize(("api", "case", "choice", "stream"), THOUGHTFUL)
def test_a_constrained_call_comes_after_thinking(
    thoughtful: dict[Key, Future[Reply]], api: str, case: str, choice: str, stream: int
) -> None:
    reply = thoughtful[api, case, choice, stream].result()
    assert reply == Reply(THOUGHT[case][2], "", (("turn", {"side": "left"}),), "tool_calls")
