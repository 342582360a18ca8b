"""JSON schemas as the parser needs them, and values as JSON text.

A value is JSON text, or a list of JSON texts for an array that may still grow. Numbers keep the digits that
the model wrote, so nothing is rounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from json.encoder import encode_basestring
from typing import Any

Value = str | list[str]

_ALIASES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
_SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
_NULLS = ("null", "Null", "NULL")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_MAX_VARIANTS = 64


def dump(value: Value) -> str:
    """The value as JSON text."""
    return value if isinstance(value, str) else f"[{', '.join(value)}]"


def quote(text: str) -> str:
    """The text as a JSON string."""
    return encode_basestring(text)


@dataclass(frozen=True)
class Schema:
    """One place in a function's parameter schema. `Schema()` says nothing, as for an undeclared function.

    `root` is the whole parameter schema, which `$ref` points into. Alternatives (`anyOf`, `oneOf`, `allOf`)
    are read together: a value may be of any type that one of them names.
    """

    node: Any = None
    root: Any = field(default=None, repr=False)

    @cached_property
    def _variants(self) -> Sequence[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        waiting = [self.node]
        seen: set[int] = set()
        while waiting and len(found) < _MAX_VARIANTS:
            node = waiting.pop(0)
            if not isinstance(node, Mapping) or id(node) in seen:
                continue
            seen.add(id(node))
            found.append(node)
            waiting.append(self._target(node.get("$ref")))
            for keyword in ("anyOf", "oneOf", "allOf"):
                branches = node.get(keyword)
                waiting.extend(branches if isinstance(branches, list) else [])
        return found

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        target = self.root
        for step in filter(None, reference[1:].split("/")):
            target = (
                target.get(step.replace("~1", "/").replace("~0", "~"))
                if isinstance(target, Mapping)
                else None
            )
        return target

    @cached_property
    def choices(self) -> dict[str, str]:
        """Members of `enum` and `const`: as the model writes them, and as JSON text."""
        members: list[Any] = []
        for variant in self._variants:
            enum = variant.get("enum")
            members += enum if isinstance(enum, list) else []
            members += [variant["const"]] if "const" in variant else []
        texts = [json.dumps(member, ensure_ascii=False) for member in members]
        written = {text: text for text in texts}
        return written | {member: text for member, text in zip(members, texts) if isinstance(member, str)}

    @cached_property
    def kinds(self) -> frozenset[str]:
        """JSON types that the schema names or implies; empty where it says nothing."""
        kinds: set[str] = set()
        for variant in self._variants:
            named = variant.get("type")
            for kind in named if isinstance(named, list) else [named]:
                if isinstance(kind, str):
                    kinds.add(_ALIASES.get(kind.lower(), kind.lower()))
            if isinstance(variant.get("properties"), Mapping):
                kinds.add("object")
            if "items" in variant or "prefixItems" in variant:
                kinds.add("array")
        return frozenset(kinds or map(_kind_of, self.choices.values()))

    @property
    def is_text(self) -> bool:
        """Every value is a string, so the text can be passed on as it arrives."""
        return self.kinds == {"string"}

    @property
    def is_scalar(self) -> bool:
        """No value has children."""
        return bool(self.kinds) and self.kinds <= _SCALARS

    @cached_property
    def declared(self) -> Mapping[str, Sequence[Any]]:
        """Names of the declared properties, each with its alternative schemas."""
        found: dict[str, list[Any]] = {}
        for variant in self._variants:
            properties = variant.get("properties")
            for name, node in properties.items() if isinstance(properties, Mapping) else ():
                found.setdefault(name, []).append(node)
        return found

    def child(self, name: str) -> Schema:
        """Schema of the property `name`."""
        nodes = self.declared.get(name)
        if not nodes:
            nodes = [variant.get("additionalProperties") for variant in self._variants]
        return self._join(nodes)

    def item(self, index: int) -> Schema:
        """Schema of the array's element `index`."""
        return self._join(list(self._items(index)))

    def _items(self, index: int) -> Iterator[Any]:
        for variant in self._variants:
            first, rest = variant.get("prefixItems"), variant.get("items")
            if isinstance(rest, list):  # drafts before 2020-12
                first, rest = rest, variant.get("additionalItems")
            yield first[index] if isinstance(first, list) and index < len(first) else rest

    def _join(self, nodes: Sequence[Any]) -> Schema:
        nodes = [node for node in nodes if isinstance(node, Mapping)]
        return Schema(nodes[0] if len(nodes) == 1 else {"anyOf": nodes}, self.root) if nodes else Schema()

    def takes_items(self, names: Sequence[str]) -> bool:
        """Whether children with these names are the elements of an array."""
        only_items = all(name == "item" for name in names)
        if "array" in self.kinds:
            return "object" not in self.kinds or (only_items and "item" not in self.declared)
        return "object" not in self.kinds and only_items

    def combine(self, values: Sequence[Value]) -> Value:
        """The value of a property that was given once or several times."""
        if len(values) == 1:
            return values[0]
        if "array" not in self.kinds:
            return [dump(value) for value in values]
        return [element for value in values for element in (value if isinstance(value, list) else [value])]

    def assemble(self, children: Sequence[tuple[str, Value]]) -> Value:
        """The array or object that the children make up."""
        if self.takes_items([name for name, _ in children]):
            return [dump(value) for _, value in children]
        return f"{{{', '.join(self.members(children))}}}"

    def members(self, children: Sequence[tuple[str, Value]]) -> list[str]:
        """JSON texts of the members of the object that the children make up."""
        grouped: dict[str, list[Value]] = {}
        for name, value in children:
            grouped.setdefault(name, []).append(value)
        return [f"{quote(name)}: {dump(self.child(name).combine(v))}" for name, v in grouped.items()]

    def read(self, text: str) -> Value:
        """The value that a text without children stands for.

        Where no declared type fits, the text itself, as a JSON string: nothing is lost and the tool can
        complain. Without a declared type only `true`, `false` and `null` are more than text, as in SGLang.
        """
        kinds, bare = self.kinds, text.strip()
        if text in self.choices:
            return self.choices[text]
        if not kinds:
            return bare if bare in ("true", "false", "null") else quote(text)
        if "null" in kinds and (bare in _NULLS or (not bare and "string" not in kinds)):
            return "null"
        if "string" in kinds:
            return quote(text)
        if "boolean" in kinds and bare.lower() in ("true", "false"):
            return bare.lower()
        if kinds & {"integer", "number"} and (number := _read_number(bare)):
            return number
        if kinds & {"array", "object"}:
            return self._read_container(text)
        return quote(text)

    def _read_container(self, text: str) -> Value:
        """Text where children belong: JSON, or nothing, or one element without its tag."""
        bare = text.strip()
        kind = _kind_of(bare) if bare[:1] in ("[", "{") else ""
        if kind in self.kinds:
            return bare
        if not bare:
            return "{}" if "object" in self.kinds else []
        return [dump(self.item(0).read(text))] if "array" in self.kinds else quote(text)


def _read_number(text: str) -> str:
    if _NUMBER.fullmatch(text):
        return text
    loose = _LOOSE_INTEGER.fullmatch(text)
    return f"{'-' if loose[1] == '-' else ''}{loose[2]}" if loose else ""


def _kind_of(text: str) -> str:
    """The JSON type of a JSON text; empty for any other text."""
    try:
        value = json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):  # the model's text, not ours
        return ""
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", dict: "object", list: "array", float: "number"}
    return kinds.get(type(value), "null")


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
