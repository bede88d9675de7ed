"""Tools whose input is free text: to a model they are functions with one string."""

from __future__ import annotations

from typing import Any

import msgspec

PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's whole input, as it is."}},
    "required": ["input"],
}


def custom_function(name: str, description: str | None, grammar: object) -> dict[str, Any]:
    """Its grammar, if it has one, is told to the model in words: the client checks what comes back."""
    told = f"The input follows this grammar:\n{grammar}" if isinstance(grammar, str) else None
    whole = "\n\n".join(filter(None, [description, told]))
    return {"name": name, "description": whole, "parameters": PARAMETERS}


def custom_arguments(text: str) -> str:
    """The arguments of the function call that stands for a call with this input."""
    return msgspec.json.encode({"input": text}).decode()
