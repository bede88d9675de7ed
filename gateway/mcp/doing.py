"""What the MCP server's tools do, through the client of orchestrators. Knows no protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from gateway.client import Client, InvalidRequest, RunBody, RunFields, Waited

from .answers import (
    ListAnswer,
    Spawned,
    VerbAnswer,
    WaitAnswer,
    listed,
    uri_of,
    verb_answer,
    wait_answer,
)
from .tools import Arguments, Cancel, List, SendInput, Spawn, Wait

PROGRESS_SECONDS = 2.0
MAX_SHOWN = 4
"""So many of those that still run are named in a progress message."""

Answer = Spawned | WaitAnswer | VerbAnswer | ListAnswer
Report = Callable[[float, float, str], Awaitable[None]]
"""Progress: seconds that have gone, of how many, and words."""


async def do(client: Client, session: str, arguments: Arguments, report: Report) -> Answer:
    """One call of a tool. `session`: of those that name none. Raises TetrarchError."""
    match arguments:
        case Spawn():
            return await _spawn(client, session, arguments)
        case Wait():
            return await _wait(client, arguments, report)
        case SendInput():
            return await _send_input(client, arguments)
        case Cancel(run=run, tree=tree):
            told = await client.cancel(run, "graceful" if arguments.graceful else "now", tree=tree)
            return verb_answer(told)
        case List():
            return await _list(client, session, arguments)
    raise TypeError(f"{type(arguments).__name__} is no tool's arguments")


async def _spawn(client: Client, session: str, asked: Spawn) -> Spawned:
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    fields = RunFields(
        messages=[*messages, {"role": "user", "content": asked.prompt}],
        on_end="await_input" if asked.keep_open else "complete",
    )
    if not asked.parent_run and not asked.fork_from:  # they tell the session
        fields["session"] = asked.session or session
    elif asked.session:
        fields["session"] = asked.session
    if asked.agent:
        fields["agent"] = asked.agent
    if asked.parent_run:
        fields["parent_run"] = asked.parent_run
    if asked.flow_class:
        fields["flow_class"] = asked.flow_class
    if asked.model:
        fields["model"] = asked.model
    if asked.max_output_tokens:
        fields["budget"] = {"output_tokens": asked.max_output_tokens}
    if asked.deadline_seconds:
        fields["deadline_ms"] = max(1, round(1000 * asked.deadline_seconds))
    if asked.result_schema is not None:
        fields["result_schema"] = asked.result_schema
    made = client.fork(asked.fork_from, **fields) if asked.fork_from else client.spawn(**fields)
    created = (await made).created
    assert created is not None
    return Spawned(
        run=created.id,
        status=created.status,
        session=created.session,
        agent=created.agent,
        resource=uri_of(created.id),
    )


async def _wait(client: Client, asked: Wait, report: Report) -> WaitAnswer:
    """In pieces, so that whoever waits hears in between that it goes on."""
    started = time.monotonic()
    waited = Waited([], list(dict.fromkeys(asked.runs)), timed_out=True)
    while True:
        left = started + asked.timeout_seconds - time.monotonic()
        more = await client.wait(waited.pending, asked.mode, seconds=min(PROGRESS_SECONDS, max(0.0, left)))
        waited = Waited([*waited.done, *more.done], more.pending, more.timed_out)
        if not waited.timed_out or left <= PROGRESS_SECONDS:
            break
        seconds = time.monotonic() - started
        await report(seconds, max(seconds, asked.timeout_seconds), await _words(client, waited))
    order = {run_id: number for number, run_id in enumerate(asked.runs)}
    done = sorted(waited.done, key=lambda run: order[run.id])
    return wait_answer(Waited(done, waited.pending, waited.timed_out), asked.max_chars)


async def _words(client: Client, waited: Waited) -> str:
    """How far they are, in our words and numbers only."""
    shown = await asyncio.gather(*(client.read(run_id) for run_id in waited.pending[:MAX_SHOWN]))
    num_all = len(waited.done) + len(waited.pending)
    return "; ".join([f"{len(waited.done)} of {num_all} done", *_states(shown)])


def _states(runs: Sequence[RunBody]) -> list[str]:
    return [f"{run.id} {run.status}, {run.usage.completion_tokens} tokens" for run in runs]


async def _send_input(client: Client, asked: SendInput) -> VerbAnswer:
    if bool(asked.text) == bool(asked.outputs):
        message = "Give either 'text' or 'outputs', the results of the calls that it waits for: one of them."
        raise InvalidRequest("invalid_field", message, status=400, param="text")
    if asked.outputs:
        return verb_answer(await client.respond(asked.run, asked.outputs))
    run = await client.read(asked.run)
    if run.status == "input_required":
        return verb_answer(await client.respond(asked.run, text=asked.text))
    return verb_answer(await client.steer(asked.run, asked.text, asked.when))


async def _list(client: Client, session: str, asked: List) -> ListAnswer:
    named = asked.session or session
    filters = {"session": named} | ({"status": asked.status} if asked.status else {})
    lines = [line async for line in client.runs(asked.limit, **filters)]
    return ListAnswer(session=named, runs=[listed(line) for line in lines])
