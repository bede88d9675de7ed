"""Typed reading of a GGUF file's metadata as `mx.load` returns it. Knows neither tensors nor what keys mean.

Format: docs/gguf.md of the ggml project.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ModelError


class Metadata:
    """Values by key; a missing or ill-typed one raises ModelError that names the file and the key."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self._source = source
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, default: str | None = None) -> str:
        """The string under a key."""
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        """The array of strings under a key."""
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The scalar under a key, as a float."""
        value = self._scalar(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        """The scalar under a key, as an int."""
        return int(self.number(key, default))

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under a key."""
        value = self._scalar(key, default)
        if not isinstance(value, bool | int):
            raise self._wrong(key, "true or false")
        return bool(value)

    def numbers(self, key: str) -> list[float]:
        """The array of numbers under a key."""
        value = self._scalar(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of numbers")
        return [float(item) for item in value]

    def _scalar(self, key: str, default: float | None) -> Any:
        value = self._values.get(key, default)
        return value.tolist() if hasattr(value, "tolist") else value

    def _wrong(self, key: str, kind: str) -> ModelError:
        found = "is missing" if key not in self._values else f"is not {kind}"
        return ModelError(f"{self._source}: the metadata {key!r} {found}; the file is broken or incomplete")
