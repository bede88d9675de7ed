"""Calls as Python writes them: `[name(key="value", other=[1, 2])]`. Parsed, never run."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

from .parts import Arguments, CallBegun, CallEnded, Part

MAX_CHARS = 65_536
_CONSTANTS = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> list[Part] | None:
    """The calls of a list expression; None when it is not one."""
    if len(text) > MAX_CHARS:
        return None
    try:
        expression = expression_of(text)
        if not isinstance(expression, ast.List) or not expression.elts:
            return None
        calls = [_call(element) for element in expression.elts]
        return [part for call in calls for part in call]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def expression_of(text: str) -> ast.expr:
    """Python's reading of an expression. Raises SyntaxError, ValueError, MemoryError or RecursionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes; they would show what the model wrote
        return ast.parse(text.strip(), mode="eval").body


def _call(node: ast.expr) -> list[Part]:
    """Raises ValueError for what is no call with keywords of literals."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keywords only")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an argument without a name of its own")
        arguments[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return [CallBegun(_name(node.func)), Arguments(text), CallEnded()]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")
    return node.id


class _Constants(ast.NodeTransformer):
    """Templates show JSON's true, false and null inside of containers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _CONSTANTS:
            return node
        return ast.copy_location(ast.Constant(_CONSTANTS[node.id]), node)
