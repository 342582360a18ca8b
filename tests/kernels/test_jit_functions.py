"""Kernels must compile beside SGLang, which replaces some of Triton's own helpers by plain functions."""

from __future__ import annotations

import ast
from pathlib import Path

import m3_kernels.triton
import pytest

FILES = sorted(Path(m3_kernels.triton.__file__).parent.glob("*.py"))


def jit_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list)
    ]


def helpers_of_triton(function: ast.FunctionDef) -> list[str]:
    """What its body uses of the module `triton` itself: `triton.next_power_of_2`, `triton.cdiv`."""
    body = [node for statement in function.body for node in ast.walk(statement)]
    return [
        ast.unparse(node)
        for node in body
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_kernel_uses_what_sglang_replaces(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {function.name: helpers_of_triton(function) for function in jit_functions(tree)}
    assert not any(found.values()), {name: used for name, used in found.items() if used}


def test_the_files_hold_kernels_and_a_helper_is_found() -> None:
    assert sum(len(jit_functions(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES) > 30
    (function,) = jit_functions(ast.parse("@triton.jit\ndef f(x):\n    y = triton.cdiv(x, 2)"))
    assert helpers_of_triton(function) == ["triton.cdiv"]
