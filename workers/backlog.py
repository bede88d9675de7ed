"""Events on their way to the bus: their ids, which may be sent now, and which may have to be sent again.

Owns sequence numbers and the joining of token events. Knows no thread, no clock and no bus.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from .messages import Event, Tokens, TurnEnd, encode, event_id

TOKEN_INTERVAL_SECONDS = 0.05
"""At most 20 token events a second and turn; the first goes at once."""

RESEND_SECONDS = 2.5
"""A bus with `appendfsync everysec` that dies forgets up to two seconds of what it acknowledged."""

BATCH_ENTRIES = 256


@dataclass(frozen=True, slots=True)
class TurnKey:
    """One turn as the bus names it."""

    run_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with its final id. `inbox_ids` are the messages that this event, a turn's last, answers."""

    key: TurnKey
    sequence: int
    payload: bytes
    inbox_ids: tuple[bytes, ...] = ()

    @property
    def id(self) -> str:
        """The stream id that it is written under, however often."""
        return event_id(self.key.attempt, self.sequence)


@dataclass(slots=True)
class _Turn:
    inbox_ids: list[bytes]
    sequence: int = 1  # the gateway's Dispatched
    held: list[Tokens] = field(default_factory=list)
    tokens_at: float | None = None  # when tokens were last let through
    is_cut: bool = False  # the bus refused it: nothing more is sent, only its end is awaited


class Backlog:
    """Ordered per turn. Times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._turns: dict[TurnKey, _Turn] = {}
        self._unsent: deque[Entry] = deque()
        self._sent: deque[tuple[float, Entry]] = deque()
        self.num_bytes = 0
        """Payload bytes that wait to be sent."""

    def open(self, key: TurnKey, inbox_id: bytes) -> bool:
        """A turn begins; False when it is already open (its Submit came twice)."""
        if key in self._turns:
            return False
        self._turns[key] = _Turn([inbox_id])
        return True

    def attach(self, key: TurnKey, inbox_id: bytes) -> bool:
        """Another message for an open turn, deleted with it; False when there is no such turn."""
        if key not in self._turns:
            return False
        self._turns[key].inbox_ids.append(inbox_id)
        return True

    def add(self, key: TurnKey, event: Event, now: float) -> None:
        """Takes the next event of a turn. Events of an unknown or cut turn vanish."""
        turn = self._turns.get(key)
        if turn is None:
            return
        if isinstance(event, TurnEnd):
            del self._turns[key]
        if turn.is_cut:
            return
        if isinstance(event, Tokens):
            turn.held.append(event)
            if turn.tokens_at is None or now - turn.tokens_at >= TOKEN_INTERVAL_SECONDS:
                self._let_through(key, turn, now)
            return
        self._let_through(key, turn, now)
        inbox_ids = tuple(turn.inbox_ids) if isinstance(event, TurnEnd) else ()
        self._append(key, turn, event, inbox_ids)

    def take(self, now: float) -> list[Entry]:
        """The next entries to send, oldest first. They stay until `settle` or `cut`."""
        for key, turn in self._turns.items():
            if turn.held and now - (turn.tokens_at or 0.0) >= TOKEN_INTERVAL_SECONDS:
                self._let_through(key, turn, now)
        return list(islice(self._unsent, BATCH_ENTRIES))

    def due_in(self, now: float) -> float | None:
        """Seconds until `take` has something; None: not before another event comes."""
        if self._unsent:
            return 0.0
        waits = [
            (turn.tokens_at or 0.0) + TOKEN_INTERVAL_SECONDS - now
            for turn in self._turns.values()
            if turn.held
        ]
        return max(0.0, min(waits)) if waits else None

    def settle(self, entries: Iterable[Entry], now: float) -> None:
        """These, the oldest unsent, are in their streams (or their turn was cut)."""
        for entry in entries:
            if self._unsent and self._unsent[0] is entry:  # a cut turn's are gone already
                self._unsent.popleft()
                self.num_bytes -= len(entry.payload)
                self._sent.append((now, entry))
        while self._sent and now - self._sent[0][0] > RESEND_SECONDS:
            self._sent.popleft()

    @property
    def has_sent(self) -> bool:
        """There is something to replay."""
        return bool(self._sent)

    def replay(self) -> None:
        """The bus may have restarted: what was sent lately goes out again, in order, before what waits."""
        for _, entry in reversed(self._sent):
            self._unsent.appendleft(entry)
            self.num_bytes += len(entry.payload)
        self._sent.clear()

    def cut(self, key: TurnKey) -> tuple[bytes, ...]:
        """The bus refused this turn: forget all that waits for it. Returns inbox entries to delete now."""
        inbox_ids = [inbox_id for entry in self._unsent if entry.key == key for inbox_id in entry.inbox_ids]
        self.num_bytes -= sum(len(entry.payload) for entry in self._unsent if entry.key == key)
        self._unsent = deque(entry for entry in self._unsent if entry.key != key)
        self._sent = deque(pair for pair in self._sent if pair[1].key != key)
        turn = self._turns.get(key)
        if turn is not None:
            turn.is_cut = True
            turn.held.clear()
            inbox_ids += turn.inbox_ids
            turn.inbox_ids.clear()
        return tuple(inbox_ids)

    def is_open(self, key: TurnKey) -> bool:
        """The engine still owes this turn's end."""
        return key in self._turns

    def open_turns(self) -> list[TurnKey]:
        """Turns whose end has not come, oldest first."""
        return list(self._turns)

    def _let_through(self, key: TurnKey, turn: _Turn, now: float) -> None:
        if turn.held:
            held, turn.held = turn.held, []
            turn.tokens_at = now
            self._append(key, turn, _joined(held))

    def _append(self, key: TurnKey, turn: _Turn, event: Event, inbox_ids: tuple[bytes, ...] = ()) -> None:
        turn.sequence += 1
        entry = Entry(key, turn.sequence, encode(event), inbox_ids)
        self._unsent.append(entry)
        self.num_bytes += len(entry.payload)


def _joined(held: list[Tokens]) -> Tokens:
    if len(held) == 1:
        return held[0]
    return Tokens(
        token_ids=b"".join(tokens.token_ids for tokens in held),
        text="".join(tokens.text for tokens in held),
        logprobs=tuple(logprob for tokens in held for logprob in tokens.logprobs),
    )
