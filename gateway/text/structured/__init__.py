"""Structured output: what callers demand of an answer's shape becomes a grammar for the engine.

`check_schema` at the door, `grammar_for` with what is known of the model, `GrammarChecks` before anything is
sent; `problem_with` looks at a result. Knows no HTTP and no engine.
"""

from __future__ import annotations

from .checks import GrammarChecks
from .grammars import grammar_for
from .results import problem_with
from .schemas import Checked, Schema, SchemaLimits, check_schema
from .wants import ANY_OBJECT, CallForm, Thought, WantedTool, Wants

__all__ = [
    "ANY_OBJECT",
    "CallForm",
    "Checked",
    "GrammarChecks",
    "Schema",
    "SchemaLimits",
    "Thought",
    "WantedTool",
    "Wants",
    "check_schema",
    "grammar_for",
    "problem_with",
]
