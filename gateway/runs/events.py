"""The words that only gateways write into a run's stream, beside the engine's; and how both are read.

Each takes a new attempt's first id, so it fences what an older attempt may still say.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Raw, Struct

from workers.messages import KEY_PREFIX, VERSION, Event, Message

Cause = Literal["steer", "next_turn", "queue", "respond"]


class CallAsked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call that the caller is to answer. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


class TurnOpened(Message, frozen=True, kw_only=True):
    """The run goes on with another turn: all before it, the closed answer, then `added`, is its prompt."""

    turn: int  # from 2
    cause: Cause
    added: tuple[bytes, ...]  # chat messages, each a JSON object
    commands: tuple[str, ...] = ()  # the ids of the commands that it obeys
    kept_tokens: int = 0  # of what the turn before generated; what follows (an open call) is dropped
    dropped_call: str | None = None  # the open tool call's name; "" when it was not yet told
    prompt_tokens: int = 0
    turn_tokens: int = 0  # as in Submit
    request: Raw = Raw(b"\xc0")  # as in Accepted, for this turn's answer
    at: float = 0.0  # unix seconds


class InputRequired(Message, frozen=True, kw_only=True):
    """The turn has ended and the run waits for its caller: for the calls' results, or for text."""

    calls: tuple[CallAsked, ...] = ()
    at: float = 0.0


class Resumed(Message, frozen=True, kw_only=True):
    """A paused turn is to go on: it waits for a worker again."""

    commands: tuple[str, ...] = ()
    at: float = 0.0


GatewayEvent = TurnOpened | InputRequired | Resumed
AnyEvent = Event | GatewayEvent

_decode = msgspec.msgpack.Decoder(AnyEvent).decode


def decode(message: bytes) -> AnyEvent | None:
    """An event; None when it is of a newer version than ours, or none of ours at all."""
    try:
        event = _decode(message)
    except msgspec.MsgspecError:
        return None
    return event if event.v <= VERSION else None


def run_commands_key(run_id: str) -> str:
    """Stream of the commands given to one run and of their answers; ids are the store's own."""
    return f"{KEY_PREFIX}run:{run_id}:commands"


def gateway_inbox_key(gateway_id: str) -> str:
    """Stream of run ids whose commands that gateway is to look at."""
    return f"{KEY_PREFIX}gateway:{gateway_id}:inbox"
