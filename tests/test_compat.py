"""A symbol that SGLang moved stops M3 servers with its name."""

from __future__ import annotations

import ast
import enum
import types
from pathlib import Path

import pytest

import sglang_m3
from sglang_m3 import compat


def symbol_id(symbol: compat.Symbol) -> str:
    return symbol.path.removeprefix("sglang.srt.")


def remove(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `path` unfindable, wherever it is inherited from."""
    parent, name = path.rsplit(".", 1)
    holder = compat.resolve(parent)
    if isinstance(holder, enum.EnumMeta):
        # Members cannot be deleted: an empty class takes the enumeration's place.
        monkeypatch.setattr(compat.resolve(parent.rsplit(".", 1)[0]), holder.__name__, type("Empty", (), {}))
        return
    if not isinstance(holder, type | types.ModuleType):
        holder = type(holder)
    for owner in holder.__mro__ if isinstance(holder, type) else (holder,):
        if owner is not object and name in vars(owner):
            monkeypatch.delattr(owner, name)


def test_the_pinned_sglang_has_every_symbol() -> None:
    assert compat.problems() == []


def test_the_pin_is_the_dependency() -> None:
    from importlib.metadata import requires

    assert f"sglang=={compat.PINNED_SGLANG}" in requires("sglang-m3")


@pytest.mark.parametrize("symbol", compat.SYMBOLS, ids=symbol_id)
def test_a_missing_symbol_is_named(symbol: compat.Symbol, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(symbol.path, monkeypatch)
    with pytest.raises(compat.MovedSymbolError, match=symbol.path.replace(".", r"\.")):
        compat.check()


WITH_PARAMETERS = [symbol for symbol in compat.SYMBOLS if symbol.parameters]


@pytest.mark.parametrize("symbol", WITH_PARAMETERS, ids=symbol_id)
def test_a_changed_signature_is_named(symbol: compat.Symbol, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, name = symbol.path.rsplit(".", 1)

    def moved() -> None: ...

    monkeypatch.setattr(compat.resolve(parent), name, moved)
    with pytest.raises(compat.MovedSymbolError, match=f"no longer takes {symbol.parameters[0]}"):
        compat.check()


def imported() -> set[str]:
    """Everything that the plugin imports from SGLang."""
    found = set()
    for path in Path(sglang_m3.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sglang."):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_import_from_sglang_is_in_the_table() -> None:
    known = {symbol.path for symbol in compat.SYMBOLS}
    missing = {
        name for name in imported() if not any(path == name or path.startswith(f"{name}.") for path in known)
    }
    assert not missing, f"add to compat.SYMBOLS: {sorted(missing)}"
