"""How a run's prompts are made and go on: what the HTTP side gives to runs, which know no template.

Protocols only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.flow.places import Order

from .spec import RunSpec


class Conversation(Protocol):
    """One run's way of going on."""

    async def extend(self, order: Order, token_ids: bytes, added: Sequence[bytes]) -> Order:
        """`order` for another turn: its prompt is `token_ids`, the end of an assistant's turn, `added` (chat
        messages as JSON objects) and the beginning of an answer. Raises InvalidField.
        """
        ...

    def kept_tokens(self, token_ids: bytes, text: str) -> int:
        """How many of an answer's first tokens read `text` or less of it: whole tokens, no part of one."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A run's first turn, and how it goes on."""

    order: Order
    conversation: Conversation
    result_schema: bytes = b""  # that its answers are held to, as JSON; b"": none


class Talk(Protocol):
    """Makes runs out of what was asked for."""

    async def begin(self, spec: RunSpec, parent_ids: bytes | None) -> Begun:
        """The first turn of a run, behind its parent's ids if it is a fork. Raises GatewayError for a body
        that cannot be taken, UnknownModel or NoEngine.
        """
        ...
