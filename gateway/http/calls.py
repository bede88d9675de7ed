"""The road of each generating call: check, admit, prepare, name, start; before headers are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

import msgspec
import structlog
from aiohttp import web

from gateway.callers.hints import Caller, read_hints
from gateway.callers.lineage import PromptShape, Turn
from gateway.dialects.answer import Answer
from gateway.flow.directory import EngineView
from gateway.flow.places import Order
from gateway.runs.making import spec_of
from gateway.runs.spec import RunSpec
from gateway.text.prompts import PromptLibrary, is_small
from gateway.text.tokenizer import pack_token_ids

from .access import access_of
from .api import ChatRequest, Request, parse
from .continuing import ChatConversation, kept_body
from .requests import Prepared, find_engine
from .state import STATE, State
from .stream import Following, Told, answer_run

Prepare = Callable[[Request, Caller, EngineView, PromptLibrary], Awaitable[Prepared]]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call on its way. `turn`: None when its agent has a name, so that nothing need be inferred."""

    state: State
    prepared: Prepared
    order: Order
    turn: Turn | None

    async def learn(self, answer: Answer) -> None:
        """The whole answer, before the client has seen its end and can send the next call."""
        await self.prepared.learn(answer)
        if self.turn is not None:
            if answer.turn == 1:  # a steered call's last answer stands behind another prompt
                self.state.lineage.answered(self.turn, pack_token_ids(answer.token_ids))
            self.close()

    def close(self) -> None:
        """The call is over, however."""
        if self.turn is not None:
            self.state.lineage.leave(self.turn, is_final=self.order.hints.is_final)


@dataclass(frozen=True, slots=True)
class Started:
    """A call whose run is in line. `learn` is to hear its whole answer."""

    run_id: str
    learn: Callable[[Answer], Awaitable[None]]

    async def on_end(self, told: Told) -> None:
        """`learn`, for a follower of the run."""
        await self.learn(told.answer)


async def answer_call(
    request: web.Request, parser: Callable[[bytes], Request], prepare: Prepare[Request]
) -> web.StreamResponse:
    """Starts a run and follows it to its end. Raises GatewayError for what cannot be taken."""
    asked = await parse(parser, await request.read())
    async with started_call(request, asked, prepare) as call:
        return await answer_run(request, call.run_id, Following(is_ours=True, on_end=call.on_end))


@asynccontextmanager
async def started_call(
    request: web.Request, asked: Request, prepare: Prepare[Request]
) -> AsyncIterator[Started]:
    """Starts a run; inside, its agent is known to be at work. Raises GatewayError for what is refused."""
    state = request.app[STATE]
    access = access_of(request)
    hints = read_hints(request.headers, asked)
    access.class_of(hints.flow_class)
    caller = Caller(access.tenant, hints, access.namespace, access.flow_class)
    told = caller.hints.names
    if told.session or told.agent:
        structlog.contextvars.bind_contextvars(session=told.session or told.agent)
    engine = find_engine(state.directory, asked.model, state.aliases)
    with state.runs.reserve(engine, caller.flow) as place:
        prepared = await prepare(asked, caller, engine, state.prompts)
        call = _named(state, prepared)
        with _closing(call):
            chat = ChatConversation.of(asked, prepared) if isinstance(asked, ChatRequest) else None
            spec = await _spec_of(call.order, asked, prepared.result_schema)
            run_id = await state.followers.start(call.order, place, spec, chat)
            place.close()
            yield Started(run_id, call.learn)


async def _spec_of(order: Order, asked: Request, result_schema: bytes) -> RunSpec:
    """What the call asks for. One in the background brings its body along, so that another gateway can take
    it over.
    """
    spec = msgspec.structs.replace(spec_of(order), result_schema=result_schema)
    if not (isinstance(asked, ChatRequest) and asked.echoed.get("background")):
        return spec
    if is_small(asked.raw_messages, asked.raw_tools):
        body = kept_body(asked)
    else:
        body = await asyncio.to_thread(kept_body, asked)
    return msgspec.structs.replace(spec, is_background=bool(body), body=body)


@contextmanager
def _closing(call: _Call) -> Iterator[None]:
    try:
        yield
    finally:
        call.close()


def _named(state: State, prepared: Prepared) -> _Call:
    """The call under its agent's and session's names: as told, or as its prompt tells."""
    order, turn = prepared.order, None
    names = state.kin.settle(order.tenant, order.hints.names)
    if not names.agent:
        realm = (order.tenant, order.line)
        shape = PromptShape.of(order.token_ids, order.system_tokens, order.turn_tokens)
        turn = state.lineage.join(realm, names, shape)
        names = turn.names
    state.kin.note(order.tenant, names)
    order = replace(order, hints=replace(order.hints, names=names))
    return _Call(state, prepared, order, turn)
