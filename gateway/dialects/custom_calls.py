"""Calls whose input is text: the model writes it as the one string of an object. Pure."""

from __future__ import annotations

import msgspec


def custom_input(arguments: str) -> str:
    """The text; what is no such object is told as the model wrote it."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return arguments
    given = decoded.get("input") if isinstance(decoded, dict) else None
    return given if isinstance(given, str) else arguments
