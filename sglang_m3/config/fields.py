"""Strict reading of single fields: the right type, in range, or an error with the field's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LARGEST_INTEGER = 2**31 - 1
"""Sizes and counts are int32 somewhere in every engine."""


class ConfigError(ValueError):
    """A config.json that cannot be served.

    Attributes:
        field: the field at fault, with the names of the objects around it: `text_config.head_dim`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class Fields:
    """The fields of one JSON object. Null and absent are the same.

    Every reading method takes a field's name and a `default` for an absent field; without one it is required.

    Raises:
        ConfigError: absent though required, of the wrong type, or out of range.
    """

    def __init__(self, values: Any, path: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(path or "config.json", f"must be an object, not {describe(values)}")
        self._values = values
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def names(self) -> list[str]:
        """Names of the fields that are present."""
        return [name for name in self._values if name in self]

    def path(self, name: str) -> str:
        """The field's name with the names of the objects around it."""
        return f"{self._path}.{name}" if self._path else name

    def error(self, name: str, problem: str) -> ConfigError:
        """The error that the field `name` has `problem`."""
        return ConfigError(self.path(name), problem)

    def object(self, name: str) -> Fields:
        """An object of its own."""
        return Fields(self._get(name, ...), self.path(name))

    def integer(self, name: str, default: Any = ..., *, minimum: int = 1) -> Any:
        """An integer from `minimum` to 2^31 - 1."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be an integer, not {describe(value)}")
        if not minimum <= value <= LARGEST_INTEGER:
            raise self.error(name, f"is {value}; it must be {minimum} at least and below 2^31")
        return value

    def number(self, name: str, default: Any = ..., *, minimum: float = 0.0) -> Any:
        """A finite number above `minimum`, as a float."""
        value = self._get(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, not {describe(value)}")
        if not minimum < value < 1e30:
            raise self.error(name, f"is {value}; it must be a number above {minimum:g}")
        return float(value)

    def boolean(self, name: str, default: Any = ...) -> Any:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool) and value is not default:
            raise self.error(name, f"must be true or false, not {describe(value)}")
        return value

    def string(self, name: str, default: Any = ...) -> Any:
        """A string."""
        value = self._get(name, default)
        if not isinstance(value, str) and value is not default:
            raise self.error(name, f"must be a string, not {describe(value)}")
        return value

    def fixed(self, name: str, served: Any) -> None:
        """Check that a field which only one value is served of has it, if it is there."""
        value = self._get(name, served)
        if type(value) is not type(served) or value != served:
            raise self.error(name, f"is {value!r}; sglang-m3 serves {served!r} only")

    def per_layer(self, name: str, layers: int, values: Mapping[Any, bool], default: Any = ...) -> Any:
        """The layer numbers that a list of one entry per layer marks; `values` says which entries mark."""
        entries = self._get(name, default)
        if entries is default:
            return entries
        if isinstance(entries, str) or not isinstance(entries, Sequence):
            raise self.error(name, f"must be a list with an entry per layer, not {describe(entries)}")
        if len(entries) != layers:
            raise self.error(name, f"has {len(entries)} entries; num_hidden_layers is {layers}")
        for layer, entry in enumerate(entries):
            if not isinstance(entry, int | str) or entry not in values:
                served = ", ".join(repr(value) for value in values)
                raise self.error(name, f"is {describe(entry)} for layer {layer}; it must be one of {served}")
        return tuple(layer for layer, entry in enumerate(entries) if values[entry])

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is ...:
            raise self.error(name, "is missing")
        return default


def describe(value: Any) -> str:
    """A JSON value in a few words."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
