"""What a response repeats of its request, kept small in the run's first event, and the names of its tools.

Knows no events.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
from msgspec import Struct

MAX_ECHO_BYTES = 32 << 20


class CalledAs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a call of a flattened tool is told to the client: it finds tools by namespace and name."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # its input is text, not a JSON object


class Echo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one request. `shown`: fields of the response object as they stand in it, each as JSON."""

    shown: dict[str, msgspec.Raw] = {}
    tools: dict[str, CalledAs] = {}  # by the name the model calls; only those told in another way
    is_stored: bool = False
    is_background: bool = False
    shows_summary: bool = False  # reasoning is told as summary, not as content
    is_encrypted: bool = False  # reasoning items carry their text in opaque form as well
    shows_logprobs: bool = False

    def called_as(self, name: str) -> CalledAs:
        """How the client knows the tool that the model calls so."""
        return self.tools.get(name) or CalledAs(name=name)


def pack(echo: Echo) -> dict[str, Any]:
    """For AnswerShape.echo. Tool schemas are long and alike, so they are packed: the bus keeps them."""
    return {"background": echo.is_background, "packed": zlib.compress(_encode(echo), 1)}


def unpack(packed: dict[str, Any]) -> Echo:
    """What was packed; of a newer gateway's, what is understood."""
    data = packed.get("packed")
    if not isinstance(data, bytes):
        return Echo()
    try:
        return _decode(zlib.decompressobj().decompress(data, MAX_ECHO_BYTES))
    except (zlib.error, msgspec.MsgspecError):
        return Echo()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Echo).decode
