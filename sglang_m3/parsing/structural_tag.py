"""Tool schemas as the grammar library's M3 tag takes them.

xgrammar's `minimax_m3_xml` style
(`xgrammar.builtin_structural_tag.get_minimax_m3_structural_tag`) writes the names of elements
into the grammar, so it refuses values that a schema leaves open and names that it does not list. Here an
open value becomes text, which an element without children holds and which the parser reads as JSON where an
object belongs; names beyond the listed ones are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_CONSTRAINTS = (
    "type",
    "enum",
    "const",
    "$ref",
    "properties",
    "items",
    "prefixItems",
    "anyOf",
    "oneOf",
    "allOf",
)
_MEMBERS = ("properties", "enum", "const", "$ref", "anyOf", "oneOf", "allOf")
_NAMES = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def constrain_parameters(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function's parameter schema without open values. No schema: an object without members."""
    return _constrain({"type": "object", "properties": {}, **(schema or {})})


def _constrain(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return dict(_TEXT) if schema is True else schema
    named = schema.get("type")
    kinds = named if isinstance(named, list) else [named]
    is_open = not any(keyword in schema for keyword in _CONSTRAINTS)
    if is_open or ("object" in kinds and not any(keyword in schema for keyword in _MEMBERS)):
        return {keyword: value for keyword, value in schema.items() if keyword not in _NAMES} | _TEXT
    result = {keyword: value for keyword, value in schema.items() if keyword not in _NAMES}
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), Mapping):
            result[keyword] = {name: _constrain(node) for name, node in schema[keyword].items()}
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            result[keyword] = [_constrain(node) for node in schema[keyword]]
    if "items" in schema:
        result["items"] = _constrain(schema["items"])
    if "array" in kinds and "prefixItems" not in schema:
        result.setdefault("items", dict(_TEXT))
    return result
