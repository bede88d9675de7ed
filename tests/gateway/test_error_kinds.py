"""Every kind of error that is named has its place in the one table: none is told as a 500 by mistake."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.errors import KINDS, Conflict

ROOT = Path(__file__).parents[2]
NAMING = {"Conflict": 0, "GatewayError": 0, "TurnFailed": 0, "TurnRefused": 0, "Refuse": 1}
"""What is called with a kind, and as which argument."""


def named_kinds() -> Iterator[tuple[str, str]]:
    for path in [*ROOT.glob("gateway/**/*.py"), *ROOT.glob("workers/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMING:
                argument = node.args[NAMING[node.func.id] :][:1]
                if argument and isinstance(argument[0], ast.Constant):
                    yield path.name, str(argument[0].value)


def test_every_kind_that_is_named_is_in_the_table() -> None:
    named = list(named_kinds())
    assert len(named) > 20
    assert [(place, kind) for place, kind in named if kind not in KINDS] == []


@pytest.mark.parametrize(
    "kind",
    [
        "run_ended",
        "run_live",
        "run_gone",
        "no_input_required",
        "cannot_continue",
        "ids_gone",
        "idempotency_conflict",
    ],
)
def test_a_conflict_is_a_409(kind: str) -> None:
    assert Conflict(kind, "No.").status == 409
