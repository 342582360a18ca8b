"""How texts become values where schemas leave room."""

from __future__ import annotations

import json

import pytest

from sglang_m3.parsing.schema import Schema, dump

ANY_OF = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
LOOP = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "boolean"}]}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (None, "521", '"521"'),
        (None, " true ", "true"),
        (None, "None", '"None"'),
        ({}, "null", "null"),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "string"}, " x ", '" x "'),
        ({"type": ["string", "null"]}, "", '""'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["number", "null"]}, "", "null"),
        ({"type": ["string", "integer"]}, "5", '"5"'),
        ({"type": "integer"}, " 12\n", "12"),
        ({"type": "integer"}, "+007", "7"),
        ({"type": "integer"}, "-0", "-0"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "integer"}, "twelve", '"twelve"'),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "number"}, "0.10000000000000000001", "0.10000000000000000001"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "number"}, "٣", '"٣"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "yes", '"yes"'),
        ({"type": "Int"}, "3", "3"),
        ({"enum": [1, "1", "x"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"const": True}, "true", "true"),
        ({"type": "array"}, "", "[]"),
        ({"type": "array", "items": {"type": "integer"}}, "3", "[3]"),
        ({"type": "array"}, "[1, 2", '["[1, 2"]'),
        ({"type": "array"}, "[NaN]", '["[NaN]"]'),
        ({"type": "array"}, "[" * 100_000, json.dumps(["[" * 100_000])),
        ({"type": "object"}, ' {"a": [1]} ', '{"a": [1]}'),
        ({"type": "object"}, "\n", "{}"),
        ({"type": "object"}, "[1]", '"[1]"'),
        (ANY_OF, "4", "4"),
        (ANY_OF, "[4]", "[4]"),
        (LOOP, "false", "false"),
        ({"$ref": "#/nowhere"}, "1", '"1"'),
    ],
)
def test_text_becomes_the_declared_type(schema, text, expected):
    assert dump(Schema(schema, schema).read(text)) == expected


@pytest.mark.parametrize(
    ("schema", "children", "expected"),
    [
        (None, [("item", "1"), ("item", "2")], "[1, 2]"),
        (None, [("item", "1"), ("x", "2")], '{"item": 1, "x": 2}'),
        (None, [("x", "1"), ("x", "2")], '{"x": [1, 2]}'),
        ({"type": "object"}, [("item", "1")], '{"item": 1}'),
        ({"type": "array"}, [("x", "1"), ("y", "2")], "[1, 2]"),
        ({"type": ["array", "object"]}, [("item", "1")], "[1]"),
        ({"type": ["array", "object"], "properties": {"item": {}}}, [("item", "1")], '{"item": 1}'),
        ({"properties": {"x": {"type": "array"}}}, [("x", ["1"]), ("x", ["2", "3"])], '{"x": [1, 2, 3]}'),
    ],
)
def test_children_become_an_array_or_an_object(schema, children, expected):
    assert dump(Schema(schema, schema).assemble(children)) == expected


def test_elements_of_older_drafts_have_their_own_schemas():
    schema = Schema({"items": [{"type": "integer"}], "additionalItems": {"type": "boolean"}})
    assert [schema.item(0).kinds, schema.item(1).kinds] == [{"integer"}, {"boolean"}]


def test_alternatives_of_one_property_are_read_together():
    branches = [{"properties": {"x": {"type": "integer"}}}, {"properties": {"x": {"type": "null"}}}]
    assert Schema({"oneOf": branches}).child("x").kinds == {"integer", "null"}


def test_undeclared_properties_have_the_additional_schema():
    assert Schema({"additionalProperties": {"type": "integer"}}).child("x").kinds == {"integer"}
    assert Schema({"additionalProperties": False}).child("x").kinds == frozenset()
