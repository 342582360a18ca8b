"""Any arguments under any schema survive being written by M3's chat template and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import sglang_m3.tiny
from sglang_m3.parsing.events import CallArguments
from sglang_m3.parsing.parser import Parser
from sglang_m3.tiny.tokenizer import train
from tests.parsing.writing import NS, block, calls, content, joined, reasoning

NAMES = st.sampled_from(["item", "items", "path", "mm:think"]) | st.text(
    st.characters(exclude_characters="<>\n", exclude_categories=["Cs"]), max_size=8
).filter(lambda name: not name.startswith("/") and name not in ("invoke", "tool_call"))
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
        f"{NS}</invoke>",
        f"{NS}</tool_call>",
        f"{NS}<tool_call>",
        f'{NS}<invoke name="f">',
        f"{NS}<item>",
        f"{NS}</other>",
        "]~b]ai\n",
        "[e~[",
        "{{ x }}",
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
        st.lists(st.integers(), max_size=3).map(
            lambda v: ({"type": "array", "items": {"type": "integer"}}, v)
        ),
        st.dictionaries(NAMES, TEXTS, max_size=3).map(
            lambda v: ({"type": "object", "additionalProperties": {"type": "string"}}, v)
        ),
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


def read(functions: dict[str, Any], text: str, size: int, thinking: bool = False) -> list[Any]:
    """What the parser reports for a text that arrives `size` characters at a time."""
    parser = Parser(functions, thinking=thinking)
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.close()])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """It is the chat template that counts; the texts are not tokenized."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train(1000))
    tokenizer.chat_template = (
        Path(sglang_m3.tiny.__file__).with_name("chat_template.jinja").read_text("utf-8")
    )
    return tokenizer


@settings(max_examples=100, deadline=None)
@given(objects(VALUES), objects(VALUES), st.sampled_from(("adaptive", "enabled")), st.integers(1, 40))
def test_arguments_survive_the_chat_template(tokenizer, first, second, mode, size):
    """Two calls after thinking and text, as the prompt of the next turn repeats them."""
    schema, arguments = first
    other_schema, other_arguments = second
    functions = [("f", schema, arguments), ("g", other_schema, other_arguments)]
    tools = [
        {"type": "function", "function": {"name": name, "parameters": node}} for name, node, _ in functions
    ]
    made = [{"function": {"name": name, "arguments": values}} for name, _, values in functions]
    messages = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": made},
    ]
    options = {"tools": tools, "tokenize": False, "thinking_mode": mode}
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(messages, **options)
    assert whole.startswith(prompt)
    reply = whole.removeprefix(prompt).removesuffix("[e~[\n")
    events = read({"f": schema, "g": other_schema}, reply, size, thinking=mode == "enabled")
    assert calls(events) == [("f", arguments), ("g", other_arguments)], reply
    assert (reasoning(events), content(events)) == ("Hm.", "So.")


@settings(max_examples=40, deadline=None)
@given(objects(VALUES))
def test_arguments_keep_their_order_and_spelling(typed):
    """So that the next turn's prompt repeats this one's text."""
    schema, expected = typed
    events = read({"f": schema}, block(("f", expected)), 7)
    written = [event.json_delta for event in events if isinstance(event, CallArguments)]
    assert "".join(written) == json.dumps(expected, ensure_ascii=False)
