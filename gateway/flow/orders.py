"""One turn as the HTTP side has checked it, and as an engine is told of it. Knows no line and no bus."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.callers.hints import NO_HINTS, Hints, Names
from gateway.derail.tool_loops import PastCall
from workers.messages import EngineInfo, Grammar, Sampling, Submit

from .classes import NORMAL, FlowHints
from .directory import EngineView


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
    generated_tokens: int = 0  # as in Submit
    most_cached: int | None = None  # as in Submit
    grammar: Grammar | None = None  # as in Submit
    stops_derailed: bool = True  # as in Submit
    past_calls: tuple[PastCall, ...] = ()  # that its prompt's messages tell of
    flow: FlowHints = NORMAL
    prefers: str = ""  # the engine that holds the prompt's head; it goes there unless that costs seconds
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

    @property
    def tree(self) -> str:
        """What shares the tenant's seconds with its other trees: the session, or an agent that has none."""
        return self.names.session or self.names.agent

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
        generated_tokens=order.generated_tokens,
        most_cached=order.most_cached,
        grammar=order.grammar,
        stops_derailed=order.stops_derailed,
    )


def line_of(engine: EngineView) -> str:
    """The line of what this engine or an equal one may run."""
    return f"{engine.info.model_id} {engine.info.digest}"
