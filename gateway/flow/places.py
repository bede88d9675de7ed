"""A turn's place: in a line of this gateway, then at an engine. Joins who goes next (admission.py), what it
costs (rates.py), where to (router.py) and which engines live (directory.py). Knows no stream.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType

from gateway.errors import Overloaded
from workers.messages import Finished, TurnEnd

from .admission import Admission, Charge, Refusal, Ticket
from .classes import CLASSES, NORMAL, Classes, FlowClass, FlowHints
from .directory import Directory, EngineView
from .orders import Order, line_of, submit_of
from .outlook import NO_OUTLOOK, Ahead, Outlook, at_engine, in_line
from .rates import AnswerLengths, MovingMean, Rates, retry_after_seconds, together
from .router import Candidate, Memory, Reason, Route, pick
from .watch import FlowWatch, Unwatched

__all__ = ["Order", "Places", "Release", "Reservation", "submit_of"]

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Release:
    """A turn that goes to an engine now, which is believed to have so much of its prompt."""

    run_id: str
    engine: EngineView
    reason: Reason
    cached_tokens: int = 0


class Reservation:
    """A place in line for a call that is being prepared. `close` gives it back, once."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def close(self) -> None:
        """To be called just before the turn enters the line, or instead of that."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Sent:
    """What a released turn was taken to cost."""

    order: Order
    rates: Rates  # of its engine then
    uncached_tokens: int  # of its prompt, still to be prefilled
    output_tokens: int  # expected
    num_workers: int  # of its engine
    wait_seconds: float | None  # in line; None once that is told
    forget_prompt: Callable[[], None]  # where it was not sent: no engine has it


class Places:
    """The places of all turns of this gateway. `clock` in seconds."""

    def __init__(
        self,
        directory: Directory,
        max_waiting: int,
        *,
        classes: Classes | None = None,
        watch: FlowWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._admission = Admission(classes or Classes(), max_waiting, clock)
        self._watch = watch or Unwatched()
        self._memory = Memory()
        self._answers = AnswerLengths()
        self._computed = MovingMean(1.0)  # share of their prompts that turns computed lately
        self._orders: dict[str, Order] = {}
        self._sent: dict[str, _Sent] = {}
        self._clock = clock
        self._costs: dict[str, tuple[float, float]] = {}  # line -> looked at when, a ticket's mean

    @property
    def num_waiting(self) -> int:
        """Turns in line here."""
        return self._admission.num_waiting

    def reserve(self, engine: EngineView, flow: FlowHints = NORMAL) -> Reservation:
        """A place for a turn that will `enter`, for this engine or an equal one. Raises Overloaded."""
        engines, line, flow_class = self._directory.like(engine), line_of(engine), flow.flow_class
        room = sum(self._room(engine, line, flow_class) for engine in engines)
        reason = self._admission.refusal(flow_class, room)
        if reason is not None:
            self._watch.refused(flow_class, reason)
            raise Overloaded(self._retry_after(engines, line, flow_class, reason))
        self._admission.reserve(flow_class)
        return Reservation(lambda: self._admission.unreserve(flow_class))

    def enter(self, run_id: str, order: Order, waited: float = 0.0) -> None:
        """Into the line, after so many seconds in which the turn waited elsewhere, or in it before."""
        expected = self._answers.expected(
            order.agent, order.max_tokens - order.generated_tokens, order.flow.expected_output_tokens
        )
        self._orders[run_id] = order
        self._admission.enter(
            Ticket(
                run_id=run_id,
                line=order.line,
                prompt_tokens=order.prompt_tokens,
                output_tokens=expected,
                tenant=order.tenant,
                tree=order.tree,
                flow=order.flow,
                waited=waited,
            )
        )
        self._show_waiting(order.flow.flow_class)

    def releases(self) -> Iterator[Release]:
        """Moves those next in line to the engines that have room."""
        for promoted in self._admission.promote():
            self._watch.promoted(promoted.flow.flow_class)
        for line in self._admission.lines():
            while (release := self._next(line)) is not None:
                yield release

    def expired(self) -> list[str]:
        """Turns that have waited longer than their class lets them, each told once: their runs shall end in
        `queue_timeout`. They stay in line until they `leave`.
        """
        expired = self._admission.expired()
        for ticket in expired:
            self._watch.refused(ticket.flow.flow_class, "queue_timeout")
        return [ticket.run_id for ticket in expired]

    def timeout_seconds(self, flow_class: FlowClass) -> float:
        """How long a turn of the class may wait in line."""
        return self._admission.classes.rules(flow_class).timeout_seconds

    def is_late(self, order: Order, waited: float) -> bool:
        """Whether a turn that was taken back has waited too long to come into the line again; told as those
        that wait too long in it.
        """
        flow = order.flow
        if flow.has_own_limit or waited < self.timeout_seconds(flow.flow_class):
            return False
        self._watch.refused(flow.flow_class, "queue_timeout")
        return True

    def retry_after(self, order: Order) -> float:
        """When a turn that waited too long may come again: as those that its class has no room for."""
        engines = self._directory.like(order.engine)
        return self._retry_after(engines, order.line, order.flow.flow_class, "queue_full")

    def move(self, run_id: str, engine: EngineView) -> None:
        """The released turn is sent (once more) to that engine."""
        self._admission.move(run_id, engine.info.engine_id)
        sent = self._sent.get(run_id)
        if sent is not None and sent.wait_seconds is not None:
            self._watch.released(sent.order.flow.flow_class, sent.wait_seconds)
            sent.wait_seconds = None

    def note_prefilled(self, run_id: str) -> None:
        """The turn has its first token: nobody waits for its prefill any more."""
        sent = self._sent.get(run_id)
        if sent is not None:
            sent.uncached_tokens = 0

    def settle(self, run_id: str, end: TurnEnd) -> None:
        """The turn has ended like that, and has still to `leave`: its tree pays what it really took, nothing
        when no worker had it, and its agent's next answer is expected to be as long.
        """
        sent = self._sent.get(run_id)
        if sent is None:
            return
        usage, before = end.usage, sent.order.generated_tokens
        has_run = end.timings.worker is not None
        computed, generated = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens - before
        seconds = sent.rates.seconds(max(computed, 0), max(generated, 0)) if has_run else 0.0
        self._admission.settle(run_id, seconds)
        if has_run and usage.prompt_tokens:
            self._computed.note(computed / usage.prompt_tokens)
        if isinstance(end, Finished):
            self._answers.note(sent.order.agent, usage.completion_tokens)

    def leave(self, run_id: str) -> bool:
        """Forgets the turn. True when it was still in line."""
        order = self._orders.pop(run_id, None)
        self._sent.pop(run_id, None)
        was_waiting = self._admission.leave(run_id)
        if was_waiting and order is not None:
            self._show_waiting(order.flow.flow_class)
        return was_waiting

    def take_back(self, run_id: str) -> None:
        """Forgets a released turn that was not sent: it costs its tree nothing, its prompt is nowhere."""
        sent = self._sent.get(run_id)
        if sent is not None:
            sent.forget_prompt()
        self._admission.settle(run_id, 0.0)
        self.leave(run_id)

    def is_waiting(self, run_id: str) -> bool:
        """Whether the turn is in line here."""
        return self._admission.is_waiting(run_id)

    def outlook(self, run_id: str, left_tokens: int | None = None) -> Outlook:
        """When the turn's answer may begin. `left_tokens`: of its prompt, where a worker is at that."""
        if self._admission.is_waiting(run_id):
            return self._outlook_in_line(run_id, self._orders[run_id])
        sent = self._sent.get(run_id)
        if sent is None or not sent.uncached_tokens:
            return NO_OUTLOOK
        if left_tokens is not None:
            return Outlook(seconds=sent.rates.seconds(left_tokens, 0))
        before = [self._sent.get(ticket.run_id) for ticket in self._admission.sent_before(run_id)]
        ahead = [Ahead(one.uncached_tokens, one.output_tokens) for one in before if one is not None]
        return Outlook(seconds=at_engine(sent.rates, ahead, sent.num_workers, sent.uncached_tokens))

    def others(self, order: Order) -> list[EngineView]:
        """Living, ready engines that could take the order."""
        return [engine for engine in self._directory.like(order.engine) if engine.stats.ready]

    def holding(self, engine_id: str | None, incarnation: int | None) -> EngineView | None:
        """That very engine, if it lives."""
        for engine in self._directory.engines():
            if engine.alive and (engine.info.engine_id, engine.info.incarnation) == (engine_id, incarnation):
                return engine
        return None

    def living(self) -> list[str]:
        """The ids of all living engines."""
        return [engine.info.engine_id for engine in self._directory.engines() if engine.alive]

    def _outlook_in_line(self, run_id: str, order: Order) -> Outlook:
        engines, num_before = self.others(order), self._admission.num_before(run_id)
        rates = [_rates_of(engine) for engine in engines]
        held = [one for engine in engines for one in self._admission.released(engine.info.engine_id)]
        seconds = in_line(
            rates,
            sum(one.charge.seconds for one in held),
            num_before * self._mean_seconds(order.line, rates),
            self._computed.value * order.prompt_tokens,
        )
        return Outlook(num_before + 1, seconds)

    def _mean_seconds(self, line: str, rates: Iterable[Rates]) -> float:
        """What a ticket of that line takes of all engines; looked at once a second, whoever asks."""
        now = self._clock()
        seen = self._costs.get(line)
        if seen is None or now - seen[0] >= LOOK_SECONDS:
            waiting = self._admission.all_waiting(line)
            seen = self._costs[line] = (now, self._seconds(waiting, together(rates)) / max(len(waiting), 1))
        return seen[1]

    def _room(self, engine: EngineView, line: str, flow_class: FlowClass) -> int:
        return self._admission.room(engine.info.engine_id, engine.info.num_workers, line, flow_class)

    def _next(self, line: str) -> Release | None:
        """Sends one turn on. The first that has a place, but whose pages no engine has beside those that it
        gave away, holds up those behind it: smaller ones would pass it for ever.
        """
        for flow_class in CLASSES:
            ticket = self._admission.first(line, flow_class)
            if ticket is None:
                continue
            order = self._orders[ticket.run_id]
            engines = [engine for engine in self.others(order) if self._room(engine, line, flow_class)]
            if not engines:
                continue
            options = {engine.info.engine_id: (engine, self._candidate(engine, order)) for engine in engines}
            fitting = [c for engine, c in options.values() if self._fits(engine, c, ticket)]
            kin = (order.agent, order.parent, order.session)
            sticky = order.prefers or self._memory.last_engine(kin)
            route = pick(order.prompt_tokens, fitting, sticky)
            if route is None:
                return None
            engine, _ = options[route.engine_id]
            forget_prompt = self._memory.note(
                order.agent, route.engine_id, engine.info.incarnation, order.token_ids, cold=route.cold
            )
            self._memory.place((order.agent, order.session), route.engine_id)
            self._send(ticket, order, engine, route.uncached_tokens, forget_prompt)
            cached = order.prompt_tokens - route.uncached_tokens
            return Release(ticket.run_id, engine, _reason(order, route), cached)
        return None

    def _send(
        self,
        ticket: Ticket,
        order: Order,
        engine: EngineView,
        uncached_tokens: int,
        forget_prompt: Callable[[], None],
    ) -> None:
        rates = _rates_of(engine)
        charge = Charge(
            rates.seconds(uncached_tokens, ticket.output_tokens), _pages(engine, uncached_tokens, ticket)
        )
        self._sent[ticket.run_id] = _Sent(
            order,
            rates,
            uncached_tokens,
            ticket.output_tokens,
            engine.info.num_workers,
            self._admission.release(ticket.run_id, engine.info.engine_id, charge),
            forget_prompt,
        )
        self._show_waiting(order.flow.flow_class)

    def _fits(self, engine: EngineView, candidate: Candidate, ticket: Ticket) -> bool:
        """Whether the engine has its pages beside those of the turns that it holds; alone it always goes."""
        if not candidate.num_turns:
            return True
        uncached = max(ticket.prompt_tokens - candidate.covered_tokens, 1)
        taken = self._admission.pages(engine.info.engine_id)
        return taken + _pages(engine, uncached, ticket) <= engine.info.kv.num_pages

    def _candidate(self, engine: EngineView, order: Order) -> Candidate:
        engine_id, incarnation = engine.info.engine_id, engine.info.incarnation
        held = self._admission.released(engine_id)
        sent = [self._sent[one.ticket.run_id] for one in held if one.ticket.run_id in self._sent]
        return Candidate(
            engine_id=engine_id,
            covered_tokens=self._memory.covered_tokens(engine_id, incarnation, order.token_ids),
            queued_tokens=sum(one.uncached_tokens for one in sent),
            num_turns=len(held),
            prefill_tokens_per_second=engine.stats.prefill_tokens_per_second,
            decode_tokens_per_second=engine.stats.decode_tokens_per_second,
            last_cold=self._memory.last_cold(engine_id),
        )

    def _retry_after(
        self, engines: Iterable[EngineView], line: str, flow_class: FlowClass, reason: Refusal
    ) -> float:
        rates = together(_rates_of(engine) for engine in engines)
        seconds = {name: self._seconds(self._admission.waiting(line, name), rates) for name in CLASSES}
        if reason == "all_full":
            return retry_after_seconds(0.0, sum(seconds.values()), 0.0)
        above = CLASSES[: CLASSES.index(flow_class)]
        floor = self._admission.classes.rules(flow_class).floor
        return retry_after_seconds(sum(seconds[name] for name in above), seconds[flow_class], floor)

    def _seconds(self, tickets: Iterable[Ticket], rates: Rates) -> float:
        share = self._computed.value
        return sum(rates.seconds(share * one.prompt_tokens, one.output_tokens) for one in tickets)

    def _show_waiting(self, flow_class: FlowClass) -> None:
        self._watch.waiting(flow_class, self._admission.num_waiting_of(flow_class))


def _reason(order: Order, route: Route) -> Reason:
    if route.is_sticky:
        return "held" if order.prefers else "kin"
    return "cold" if route.cold else "cost"


def _rates_of(engine: EngineView) -> Rates:
    stats = engine.stats
    return Rates.measured(stats.prefill_tokens_per_second, stats.decode_tokens_per_second)


def _pages(engine: EngineView, uncached_tokens: int, ticket: Ticket) -> int:
    """What the turn needs of the engine's pool and does not find there; a page has a fixed size in bytes."""
    return math.ceil((uncached_tokens + ticket.output_tokens) / engine.info.kv.page_tokens)
