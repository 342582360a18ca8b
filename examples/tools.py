"""Two tools for an agent: read a file below a folder, and calculate."""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

READ_LINES = 200
"""Lines of a file that one call returns at most."""
LARGEST_POWER = 1000
"""Exponents and bit lengths above it are refused: they only burn time."""


class ToolError(ValueError):
    """A call that cannot be served; the message is for the model."""


def _tool(name: str, description: str, **properties: dict[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool(
        "read_file",
        f"At most {READ_LINES} lines of a text file, numbered.",
        path={"type": "string", "description": "Path relative to the working folder."},
        first_line={"type": "integer", "description": "First line to read, counted from 1."},
    ),
    _tool(
        "calculate",
        "The value of an arithmetic expression.",
        expression={"type": "string", "description": "Numbers, parentheses, + - * / // % and **."},
    ),
)
"""As the chat endpoint takes them; each tool's first parameter is required."""


def run_tool(root: Path, name: str, arguments: str) -> str:
    """What a call returns to the model: its result, or what is wrong with the call.

    Args:
        root: the folder whose files may be read.
        name: the function that was called, known or not.
        arguments: its arguments as the model wrote them, JSON or not.
    """
    try:
        return _run(root, name, arguments)
    except ToolError as error:
        return f"error: {error}"


def _run(root: Path, name: str, arguments: str) -> str:
    try:
        values = json.loads(arguments)
    except json.JSONDecodeError as error:
        raise ToolError(f"the arguments are no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ToolError("the arguments are no JSON object")
    if name == "read_file":
        return read_file(root, values.get("path"), values.get("first_line", 1))
    if name == "calculate":
        return calculate(values.get("expression"))
    raise ToolError(f"there is no tool {name}")


def read_file(root: Path, path: Any, first_line: Any = 1) -> str:
    """At most `READ_LINES` numbered lines. Raises ToolError where there is no such text below `root`."""
    if not isinstance(path, str) or not isinstance(first_line, int) or first_line < 1:
        raise ToolError("path must be text, first_line a number from 1 on")
    target = (root / path).resolve()
    if not target.is_relative_to(root.resolve()):
        raise ToolError(f"{path} is outside the working folder")
    try:
        lines = target.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ToolError(f"{path} cannot be read as text") from error
    shown = lines[first_line - 1 : first_line - 1 + READ_LINES]
    return "\n".join(f"{number} {line}" for number, line in enumerate(shown, first_line))


_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: Any) -> str:
    """The value of an arithmetic expression. Raises ToolError where it has none."""
    if not isinstance(expression, str):
        raise ToolError("expression must be text")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r} has no value: {error}") from error
    return repr(value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > LARGEST_POWER or abs(left) > LARGEST_POWER):
            raise ValueError("the power is too large")
        value = _OPERATORS[type(node.op)](left, right)
        if isinstance(value, complex) or not math.isfinite(value):
            raise ValueError("the result is no finite number")
        return value
    raise ValueError("only numbers and arithmetic are allowed")
