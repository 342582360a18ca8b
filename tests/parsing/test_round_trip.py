"""Any arguments under any schema survive being written as M3 writes them and read back."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_m3.parsing.events import CallArguments
from sglang_m3.parsing.parser import Parser
from tests.parsing.writing import NS, block, calls, joined

NAMES = st.text(st.characters(exclude_characters="<>\n", exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: not name.startswith("/") and name not in ("invoke", "tool_call")
)
PIECES = st.sampled_from(
    [
        NS,
        "]<]",
        "[>[",
        "<",
        ">",
        "</",
        "&lt;",
        "<mm:think>",
        "</mm:think>",
        "\\",
        '"',
        "\n",
        " ",
        "é",
        "null",
        "1",
    ]
)
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6).map(
    "".join
)
Typed = tuple[dict[str, Any], Any]
"""A schema and a value of it."""


def scalars() -> st.SearchStrategy[Typed]:
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    return st.one_of(
        TEXTS.map(lambda v: ({"type": "string"}, v)),
        st.integers().map(lambda v: ({"type": "integer"}, v)),
        numbers.map(lambda v: ({"type": "number"}, v)),
        st.booleans().map(lambda v: ({"type": "boolean"}, v)),
        st.none().map(lambda v: ({"type": ["integer", "null"]}, v)),
        TEXTS.filter(lambda v: v.strip() != "null").map(
            lambda v: ({"anyOf": [{"type": "string"}, {"type": "null"}]}, v)
        ),
        st.sampled_from(["a", 1, True, None]).map(lambda v: ({"enum": ["a", 1, True, None]}, v)),
    )


def objects(members: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def typed(chosen: dict[str, Typed]) -> Typed:
        properties = {name: schema for name, (schema, _) in chosen.items()}
        return {"type": "object", "properties": properties}, {
            name: value for name, (_, value) in chosen.items()
        }

    return st.dictionaries(NAMES, members, max_size=4).map(typed)


def arrays(members: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    def typed(chosen: list[Typed]) -> Typed:
        return {"type": "array", "prefixItems": [schema for schema, _ in chosen]}, [
            value for _, value in chosen
        ]

    return st.lists(members, max_size=4).map(typed)


VALUES = st.recursive(scalars(), lambda members: objects(members) | arrays(members), max_leaves=12)


def read(schema: dict[str, Any], text: str, size: int) -> list[Any]:
    parser = Parser({"f": schema}, thinking=False)
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.close()])


@settings(max_examples=150, deadline=None)
@given(objects(VALUES), st.integers(1, 40))
def test_arguments_survive(typed, size):
    schema, expected = typed
    text = block(("f", expected))
    events = read(schema, text, size)
    assert calls(events) == [("f", expected)], text


@settings(max_examples=60, deadline=None)
@given(objects(VALUES))
def test_arguments_keep_their_order_and_spelling(typed):
    """So that the next turn's prompt repeats this one's text."""
    schema, expected = typed
    written = [e.json_delta for e in read(schema, block(("f", expected)), 7) if isinstance(e, CallArguments)]
    assert "".join(written) == json.dumps(expected, ensure_ascii=False)
