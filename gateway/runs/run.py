"""One run as a gateway follows it: its state, what was said, what is wanted, and when it got how far.

Decides nothing: steps.py and caretaker.py do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

from gateway.flow.places import Order
from gateway.text.parsing import Said
from metrics.logs import about_run
from workers.messages import Derail, Dispatched, Paused, Started, Tokens, TurnEnd, Usage, run_events_key

from .commands import CancelRun
from .events import AnyEvent
from .limits import Accounts, Spent, cut_short, expired, overdrawn, overspent
from .state import Phase, RunState, advance
from .steps import View
from .talk import Conversation
from .transcript import Transcript, whole_calls
from .wishes import Left, Wishes

TREE_SECONDS = 0.4
"""How often a run asks again for what its tree has promised to others, and tells it what it has thought."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One entry of a run's stream. `id` (`<attempt>-<sequence>`) is what a client resumes from."""

    id: str
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class Counted:
    """What its tree was last told of a turn's thinking, and when (monotonic)."""

    turn: int
    thinking_tokens: int
    at: float


@dataclass(slots=True)
class Run:
    """One live run that this gateway follows; for this room only, not for the HTTP side."""

    run_id: str
    state: RunState
    order: Order | None  # of the present turn, its first attempt; None: it was started by another gateway
    transcript: Transcript = field(default_factory=Transcript)
    wishes: Wishes = field(default_factory=Wishes)
    conversation: Conversation | None = None  # None: it has one turn only
    tree: Spent = field(default_factory=Spent)  # what its tree had spent when we looked last
    counted: Counted | None = None  # None: nothing of it, by this gateway
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one writer
    task: asyncio.Task[None] | None = None
    num_followers: int = 0
    is_attended: bool = False  # started elsewhere, and this gateway stands in
    is_released: bool = False  # on its way from the line to an engine
    num_resent: int = 0  # attempts after an engine was lost
    cancel_requested: bool = False  # here, by the way of the call itself
    cancelled_attempt: int | None = None  # the attempt whose engine was sent a Cancel
    paused_attempt: int | None = None  # ... a Pause
    kept_attempt: int | None = None  # the attempt up to which ids and counts are kept
    derail: Derail | None = None  # what a detector here has found, until it is in the stream
    stopped_by: CancelRun | None = None  # a detector's
    examined_turn: int | None = None  # the last ended turn that detectors have seen
    untold: list[tuple[str, bytes]] = field(default_factory=list)  # event id, line: for the session's log
    is_flushing: bool = False  # they will be written in a moment
    noted: tuple[str, Usage] | None = None  # in the list of runs
    telling: asyncio.Lock = field(default_factory=asyncio.Lock)  # one writer of these
    since: float = field(default_factory=time.monotonic)  # adopted, left by its last follower, or cancelled
    tree_asked_at: float | None = None  # when its tree had too little left that was not promised
    asked_owner_at: float | None = None  # when we last asked whether its own gateway lives
    lost_since: float | None = None  # no engine can be expected to end it, or to take it
    asked_at: float = field(default_factory=time.monotonic)
    worker_at: float | None = None  # when the attempt got its worker, as seen here
    token_at: float | None = None  # when its first token came
    _said: tuple[int, int, Said] | None = None  # of a turn with so many tokens

    @property
    def key(self) -> str:
        """Its stream."""
        return run_events_key(self.run_id)

    @property
    def is_ours(self) -> bool:
        """Whether this gateway takes its steps."""
        return self.order is not None or self.is_attended

    @property
    def waits_for_tree(self) -> bool:
        """Whether it is too soon to ask its tree for tokens again."""
        return self.tree_asked_at is not None and time.monotonic() - self.tree_asked_at < TREE_SECONDS

    @property
    def waited_seconds(self) -> float:
        """How long its turn has waited for a worker by now; of what it waited at another gateway nothing."""
        return max(min(time.time() - self.state.waiting_since, time.monotonic() - self.asked_at), 0.0)

    @property
    def queue_seconds(self) -> float | None:
        """From the call to its worker; None: it has none, or the call came to another gateway."""
        return self._seconds_to(self.worker_at)

    @property
    def first_token_seconds(self) -> float | None:
        """From the call to its first token; None: there is none, or the call came to another gateway."""
        return self._seconds_to(self.token_at)

    @property
    def said(self) -> Said:
        """By the present turn so far."""
        key = (self.state.turn, self.state.turn_tokens)
        if self._said is None or self._said[:2] != key:
            self._said = (*key, self.transcript.current.said())
        return self._said[2]

    @property
    def left(self) -> Left:
        """What is still wanted of it."""
        left = self.wishes.left(self.state.obeyed)
        if not left.cancels_now and (self.cancel_requested or self.stopped_by is not None):
            left = replace(left, cancel=self.stopped_by or CancelRun(command=""))
        return left

    @property
    def drops_partial(self) -> bool:
        """Whether what it has said is not wanted, if it is cancelled."""
        cancel = self.left.cancel
        return cancel is not None and not cancel.keep_partial

    @property
    def untold_derail(self) -> Derail | None:
        """What was found here, or what a gateway that is gone had found when it asked for the run's end."""
        cancel = self.left.cancel
        before = cancel.derail if cancel is not None and self.state.derail is None else None
        return self.derail or before

    def accounts(self) -> Accounts:
        """What it has spent, and its tree."""
        state, transcript = self.state, self.transcript
        calls = whole_calls(self.said) if state.phase is Phase.TURN_ENDED else 0
        thinking = transcript.current.thinking_tokens
        return Accounts(
            own=_spent(state.usage, transcript.thinking_tokens, transcript.past_calls + calls),
            tree=self.tree,
            tree_budget=state.spec.tree_budget,
            turn=_spent(state.turn_usage, thinking, calls),
            uncounted_thinking=self._uncounted_thinking(),
        )

    def is_count_due(self, thinking_tokens: int) -> bool:
        """Whether its tree should hear that its present turn has thought so much."""
        counted = self.counted
        if counted is None or counted.turn != self.state.turn:
            return thinking_tokens > 0
        is_more = thinking_tokens > counted.thinking_tokens
        return is_more and time.monotonic() - counted.at >= TREE_SECONDS

    def _uncounted_thinking(self) -> int:
        """Of the present turn. A gateway that has counted nothing yet cannot know what another has."""
        if self.counted is None or not self.state.is_on_engine:
            return 0
        before = self.counted.thinking_tokens if self.counted.turn == self.state.turn else 0
        return max(self.transcript.current.thinking_tokens - before, 0)

    def view(self, now: float) -> View:
        """For the next step; `now` in unix seconds."""
        accounts, has_ended = self.accounts(), self.state.phase is Phase.TURN_ENDED
        return View(
            state=self.state,
            left=self.left,
            over=expired(self.state, now) or overspent(self.state, accounts),
            short=cut_short(self.state, accounts) if has_ended else None,
            overdrawn=overdrawn(self.state, accounts) if has_ended else None,
            said=self.said if has_ended else None,
            can_continue=self.conversation is not None,
            can_fork=self.order is not None,
        )

    def advance(self, entry_id: str, event: AnyEvent) -> None:
        """One more event of its stream."""
        self.state = advance(self.state, entry_id, event)
        self.transcript.advance(event)
        match event:
            case Dispatched():
                self.worker_at = None
            case Started():
                self.worker_at = time.monotonic()
            case Tokens() if self.token_at is None:
                self.token_at = time.monotonic()

    def in_logs(self) -> contextlib.AbstractContextManager[None]:
        """Lines inside are about this run."""
        return about_run(self.run_id, self.order.names.session if self.order is not None else "")

    def _seconds_to(self, moment: float | None) -> float | None:
        return None if moment is None or self.order is None else moment - self.asked_at


def _spent(usage: Usage, thinking_tokens: int, tool_calls: int) -> Spent:
    return Spent(usage.prompt_tokens, usage.completion_tokens, thinking_tokens, tool_calls)


def closes_turn(event: AnyEvent) -> bool:
    """Whether a turn ends with it: a paused one goes on."""
    return isinstance(event, TurnEnd) and not isinstance(event, Paused)
