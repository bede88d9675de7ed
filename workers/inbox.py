"""Reads what gateways send to one incarnation of an engine and hands the engine thread only what it can use.

Owns the thread that reads. Refuses old incarnations, other tokenizers and newer messages; runs nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from redis import Redis
from redis.exceptions import RedisError

from metrics.logs import about_run

from .backlog import TurnKey
from .errors import TurnRefused
from .messages import (
    EVENT_FIELD,
    VERSION,
    Cancel,
    CancelAgents,
    EngineInfo,
    Failed,
    Submit,
    ToEngine,
    decode_to_engine,
    inbox_key,
)
from .outbox import Outbox
from .threads import watched_thread

BLOCK_SECONDS = 1.0
_BATCH_MESSAGES = 64
_RETRY_SECONDS = 0.2

log = structlog.get_logger(__name__)


class _Envelope(msgspec.Struct, frozen=True):
    """What must be readable of any version, to answer a message that is not."""

    kind: str = ""
    v: int = 1
    run_id: str | None = None
    attempt: int | None = None
    incarnation: Any = None


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode

Deliveries = queue.SimpleQueue[ToEngine | None]
"""To the engine thread; None only wakes it."""


class Inbox:
    """One incarnation's reader, which closes its client; that one must wait for longer than BLOCK_SECONDS."""

    def __init__(
        self,
        client: Redis,
        info: EngineInfo,
        outbox: Outbox,
        deliveries: Deliveries,
        *,
        on_broken: Callable[[str], None],
    ) -> None:
        self._client = client
        self._info = info
        self._outbox = outbox
        self._deliveries = deliveries
        self._key = inbox_key(info.engine_id)
        self._closed = threading.Event()
        self._thread = watched_thread("inbox", self._run, on_broken)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def close(self) -> None:
        """Delivers nothing more; the thread ends with the read that it is in."""
        self._closed.set()

    def _run(self) -> None:
        with self._client:
            self._read_on()

    def _read_on(self) -> None:
        last_id = b"0"
        while not self._closed.is_set():
            try:
                reply: Any = self._client.xread(
                    {self._key: last_id}, count=_BATCH_MESSAGES, block=int(1000 * BLOCK_SECONDS)
                )
            except (RedisError, OSError):
                self._closed.wait(_RETRY_SECONDS)  # the lease's thread tells of a lost bus
                continue
            for _, entries in reply or ():
                for inbox_id, fields in entries:
                    last_id = inbox_id
                    if not self._closed.is_set():
                        self._receive(inbox_id, fields.get(EVENT_FIELD, b""))

    def _receive(self, inbox_id: bytes, payload: bytes) -> None:
        try:
            envelope = _decode_envelope(payload)
        except _UNREADABLE as error:
            log.error("inbox message is not readable", inbox_id=inbox_id.decode(), error=str(error))
            self._outbox.delete([inbox_id])
            return
        try:
            message = _read(envelope, payload)
        except TurnRefused as refused:
            with about_run(envelope.run_id or ""):
                self._refuse(inbox_id, envelope, refused)
        else:
            run_id = "" if isinstance(message, CancelAgents) else message.run_id
            with about_run(run_id, message.agent if isinstance(message, Submit) else ""):
                self._sort(inbox_id, message)

    def _sort(self, inbox_id: bytes, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._receive_submit(inbox_id, message)
        elif isinstance(message, CancelAgents):
            self._deliveries.put(message)
            self._outbox.delete([inbox_id])
        elif self._outbox.attach(TurnKey(message.run_id, message.attempt), inbox_id):
            self._deliveries.put(message)
        else:
            if isinstance(message, Cancel):  # what a paused run's earlier attempt left is let go
                self._deliveries.put(message)
            self._outbox.delete([inbox_id])

    def _receive_submit(self, inbox_id: bytes, submit: Submit) -> None:
        key = TurnKey(submit.run_id, submit.attempt)
        if submit.incarnation != self._info.incarnation or not self._outbox.open(key, inbox_id):
            self._outbox.delete([inbox_id])
        elif submit.digest != self._info.digest:
            message = "the prompt was tokenised for another model: send the call again"
            self._outbox.post(key, Failed(error="digest_mismatch", message=message, retryable=True))
        else:
            self._deliveries.put(submit)

    def _refuse(self, inbox_id: bytes, envelope: _Envelope, refused: TurnRefused) -> None:
        """A turn that can be named ends with the reason; anything else is deleted."""
        log.error(
            "inbox message is of no use", error_kind=refused.kind, error=str(refused.__cause__ or refused)
        )
        is_ours = not isinstance(envelope.incarnation, int) or envelope.incarnation == self._info.incarnation
        is_turn = envelope.kind not in ("cancel", "pause")
        if envelope.run_id is None or envelope.attempt is None or not is_turn or not is_ours:
            self._outbox.delete([inbox_id])
            return
        key = TurnKey(envelope.run_id, envelope.attempt)
        if self._outbox.open(key, inbox_id):
            self._outbox.post(key, Failed(error=refused.kind, message=str(refused)))
        else:
            self._outbox.delete([inbox_id])


def _read(envelope: _Envelope, payload: bytes) -> ToEngine:
    """The whole message. Raises TurnRefused."""
    if envelope.v > VERSION:
        raise TurnRefused(
            "upgrade_engine",
            f"the message has version {envelope.v}, this engine reads up to {VERSION}: upgrade the engine",
        )
    try:
        return decode_to_engine(payload)
    except _UNREADABLE as error:
        raise TurnRefused(
            "invalid_request",
            "the engine cannot read this turn's message: is its gateway of the same version?",
        ) from error
