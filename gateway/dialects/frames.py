"""What a dialect is: how one client API tells an answer, piece by piece, whole, and when it fails. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.errors import GatewayError
from gateway.text.parsing import Part
from workers.messages import Tokens

from .answer import Answer

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event. `data`: an object to encode, or bytes as they are."""

    data: Mapping[str, Any] | bytes
    event: str | None = None  # the `event:` line, for APIs that have one


@dataclass(frozen=True, slots=True)
class Silence:
    """What is sent after a long silence: a comment, data, or both."""

    comment: str = ""
    frames: Sequence[Frame] = ()


class Voice(Protocol):
    """What a stream needs of whoever tells it."""

    def silence(self) -> Silence:
        """A keep-alive."""

    def fail(self, error: GatewayError) -> list[Frame]:
        """It ended without an answer. Nothing follows."""


class Teller(Voice, Protocol):
    """Tells one `Answer`, which is fed before each call. A resumed stream is told again from the start, so
    that equal events must make equal frames. A whole body is told in the same way, its frames unused.
    """

    def begin(self) -> list[Frame]:
        """The run was accepted."""

    def more(self, parts: Sequence[Part], tokens: Tokens | None) -> list[Frame]:
        """Further parts of the answer; `tokens` is the event that brought them, if it was one of tokens."""

    def end(self) -> list[Frame]:
        """The run ended with an answer."""

    def body(self) -> Body:
        """The whole answer of a run that ended with one, for callers that do not stream."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One client API: its teller, and how it words an error before any stream is open."""

    teller: Callable[[Answer], Teller]
    error: Callable[[GatewayError, str], Body]  # the error, the request's id
