"""A turn's place: in a line of this gateway, then at an engine. Joins who goes next (admission.py), where to
(router.py) and which engines live (directory.py). Knows no stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from gateway.callers.hints import NO_HINTS, Hints, Names
from workers.messages import EngineInfo, Sampling, Submit

from .admission import Admission, Ticket, retry_after_seconds
from .directory import Directory, EngineView
from .router import Candidate, Memory, Route, pick


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One call as the HTTP side has checked it. `engine` made the tokens; an equal one may run the turn."""

    engine: EngineView
    token_ids: bytes  # prompt, little-endian uint32
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tenant: str = ""
    namespace: str = ""  # as in Submit
    hints: Hints = NO_HINTS  # with the names that the agent has in the end, inferred or told
    system_tokens: int = 0  # as in Submit
    turn_tokens: int = 0
    request: bytes = b"\xc0"  # one msgpack value: what a resuming gateway needs to shape the answer

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.token_ids) // 4

    @property
    def names(self) -> Names:
        """Where the call belongs."""
        return self.hints.names

    @property
    def agent(self) -> str:
        """The agent, for lines and routes: unique over tenants and sessions; "" for one without a name."""
        return self._unique(self.names.agent) if self.names.agent else ""

    @property
    def parent(self) -> str:
        """The agent that called it, likewise."""
        return self._unique(self.names.parent) if self.names.parent else ""

    @property
    def session(self) -> str:
        """Its session, likewise: no agent has that name."""
        return self._unique("") if self.names.session else ""

    def _unique(self, agent: str) -> str:
        return "\0".join((self.tenant, self.names.session, agent))

    @property
    def line(self) -> str:
        """Orders of one line may go to the same engines."""
        return line_of(self.engine)


def submit_of(order: Order, run_id: str, attempt: int, engine: EngineInfo) -> Submit:
    """The turn as that engine is told of it."""
    hints, names = order.hints, order.names
    return Submit(
        run_id=run_id,
        attempt=attempt,
        incarnation=engine.incarnation,
        digest=engine.digest,
        token_ids=order.token_ids,
        max_tokens=order.max_tokens,
        sampling=order.sampling,
        stop=order.stop,
        stop_token_ids=order.stop_token_ids,
        ignore_eos=order.ignore_eos,
        tenant=order.tenant,
        namespace=order.namespace,
        session=names.session,
        agent=names.agent,
        parent=names.parent,
        fork_tokens=min(hints.fork_tokens, order.prompt_tokens),
        expects=hints.expects,
        is_final=hints.is_final,
        retain=hints.retain,
        system_tokens=order.system_tokens,
        turn_tokens=order.turn_tokens,
        explain=hints.explain,
    )


def line_of(engine: EngineView) -> str:
    """The line of what this engine or an equal one may run."""
    return f"{engine.info.model_id} {engine.info.digest}"


@dataclass(frozen=True, slots=True)
class Release:
    """A turn that goes to an engine now."""

    run_id: str
    engine: EngineView


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


class Places:
    """The places of all turns of this gateway."""

    def __init__(self, directory: Directory, max_waiting: int) -> None:
        self._directory = directory
        self._admission = Admission(max_waiting)
        self._memory = Memory()
        self._orders: dict[str, Order] = {}
        self._uncached: dict[str, int] = {}  # prompt tokens that a released turn has still to prefill

    @property
    def num_waiting(self) -> int:
        """Turns in line here."""
        return self._admission.num_waiting

    def reserve(self, engine: EngineView) -> Reservation:
        """A place for a turn that will `enter`, for this engine or an equal one. Raises Overloaded."""
        engines = self._directory.like(engine)
        seconds = retry_after_seconds(
            self._admission.waiting(line_of(engine)),
            sum(engine.stats.prefill_tokens_per_second for engine in engines),
            sum(engine.stats.decode_tokens_per_second for engine in engines),
        )
        room = sum(self._room(engine) for engine in engines)
        self._admission.reserve(room=room, retry_after_seconds=seconds)
        return Reservation(self._admission.unreserve)

    def enter(self, run_id: str, order: Order) -> None:
        """Into the line."""
        self._orders[run_id] = order
        self._admission.enter(Ticket(run_id, order.line, order.agent, order.prompt_tokens, order.max_tokens))

    def releases(self) -> Iterator[Release]:
        """Moves those next in line to the engines that have room."""
        for line in self._admission.lines():
            while (ticket := self._admission.first(line)) is not None:
                engine = self._route(ticket.run_id, self._orders[ticket.run_id])
                if engine is None:
                    break
                self._admission.release(ticket, engine.info.engine_id)
                yield Release(ticket.run_id, engine)

    def move(self, run_id: str, engine: EngineView) -> None:
        """The released turn is sent (once more) to that engine."""
        self._admission.move(run_id, engine.info.engine_id)

    def note_prefilled(self, run_id: str) -> None:
        """The turn has its first token: nobody waits for its prefill any more."""
        self._uncached.pop(run_id, None)

    def leave(self, run_id: str) -> bool:
        """Forgets the turn. True when it was still in line."""
        self._orders.pop(run_id, None)
        self._uncached.pop(run_id, None)
        return self._admission.leave(run_id)

    def is_waiting(self, run_id: str) -> bool:
        """Whether the turn is in line here."""
        return self._admission.is_waiting(run_id)

    def others(self, order: Order) -> list[EngineView]:
        """Living, ready engines that could take the order."""
        return [engine for engine in self._directory.like(order.engine) if engine.stats.ready]

    def living(self) -> list[str]:
        """The ids of all living engines."""
        return [engine.info.engine_id for engine in self._directory.engines() if engine.alive]

    def _room(self, engine: EngineView) -> int:
        return self._admission.room(engine.info.engine_id, engine.info.num_workers)

    def _route(self, run_id: str, order: Order) -> EngineView | None:
        engines = {engine.info.engine_id: engine for engine in self.others(order) if self._room(engine)}
        candidates = [self._candidate(engine, order) for engine in engines.values()]
        route = pick(
            order.prompt_tokens,
            candidates,
            self._memory.last_engine((order.agent, order.parent, order.session)),
        )
        if route is None:
            return None
        self._note(run_id, order, route, engines[route.engine_id])
        return engines[route.engine_id]

    def _note(self, run_id: str, order: Order, route: Route, engine: EngineView) -> None:
        self._uncached[run_id] = route.uncached_tokens
        incarnation = engine.info.incarnation
        self._memory.note(order.agent, route.engine_id, incarnation, order.token_ids, cold=route.cold)
        self._memory.place((order.agent, order.session), route.engine_id)

    def _candidate(self, engine: EngineView, order: Order) -> Candidate:
        engine_id, incarnation = engine.info.engine_id, engine.info.incarnation
        released = self._admission.released(engine_id)
        return Candidate(
            engine_id=engine_id,
            covered_tokens=self._memory.covered_tokens(engine_id, incarnation, order.token_ids),
            queued_tokens=sum(self._uncached.get(ticket.run_id, 0) for ticket in released),
            num_turns=len(released),
            prefill_tokens_per_second=engine.stats.prefill_tokens_per_second,
            decode_tokens_per_second=engine.stats.decode_tokens_per_second,
            last_cold=self._memory.last_cold(engine_id),
        )
