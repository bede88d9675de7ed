"""The orchestrator's client against a gateway with all its parts, where told over a way that breaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from gateway.bus import BusLost
from gateway.client import (
    ENDINGS,
    Budget,
    Client,
    Conflict,
    EventStream,
    InvalidRequest,
    NotFound,
    Patience,
    PublicEvent,
    Refused,
    RunHandle,
    TetrarchError,
    TokenText,
    Unreachable,
)
from gateway.client.fields import RunFields
from gateway.errors import Overloaded, StillWaiting
from gateway.runs.told import Gap, RunAccepted, RunCompleted, RunProgress, RunResumed, RunSteered
from tests.conftest import ValkeyServer

from .flaky_proxy import FlakyProxy, flaky_proxy
from .native_client import NativeClient
from .native_gateway import native_gateway
from .samples import TOOLS
from .talking_engine import TalkingEngine
from .test_native_real import FIRST, SECOND, answers, serving

IMPATIENT = Patience(seconds=1, first_seconds=0.01, most_seconds=0.05)
PATIENT = Patience(seconds=20, first_seconds=0.01, most_seconds=0.2)


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[TalkingEngine]:
    async with TalkingEngine(valkey.url, answers) as talking:
        yield talking


@pytest.fixture
async def gateway(engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path) -> AsyncIterator[NativeClient]:
    async with serving(valkey.url, tmp_path) as started:
        yield started


@pytest.fixture
async def client(gateway: NativeClient) -> AsyncIterator[Client]:
    async with Client(gateway.url, patience=PATIENT) as opened:
        yield opened


def text_of(events: list[PublicEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenText))


async def read_all(stream: EventStream) -> list[PublicEvent]:
    async with asyncio.timeout(30), stream as events:
        return [event async for event in events]


async def decodes(run: RunHandle, num_tokens: int) -> None:
    async with asyncio.timeout(10):
        while (await run.read()).usage.completion_tokens < num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_run_is_spawned_streamed_and_waited_for(client: Client) -> None:
    run = await client.spawn("Hi", session="s", agent="a", flow_class="bulk", label="a label")
    events = await read_all(run.stream())
    assert text_of(events) == FIRST
    assert isinstance(events[0], RunAccepted) and isinstance(events[-1], RunCompleted)
    result = await run.result()
    assert result.result is not None
    assert (result.status, result.result.text, result.flow_class) == ("completed", FIRST, "bulk")
    assert await client.models() == [result.model]
    listed = [line async for line in client.runs(session="s", flow_class="bulk")]
    assert [(line.id, line.label) for line in listed] == [(run.id, "a label")]
    tree = await client.tree("s")
    assert tree.agents[0].usage.total_tokens == result.usage.total_tokens
    await run.delete()
    await run.delete()
    with pytest.raises(NotFound, match=r"no run '.*Runs are kept for a week"):
        await run.read()


async def test_every_verb_of_a_run(client: Client, engine: TalkingEngine) -> None:
    engine.allowed = 3
    run = await client.spawn("Hi", budget={"output_tokens": 400}, heartbeat_ms=60_000)
    await decodes(run, 3)
    assert (await run.budget()).left == Budget(output_tokens=397)
    assert (await run.heartbeat()).due_ms == 60_000
    assert (await run.pause(hold_ms=5000)).status == "paused"
    fork = await run.fork(input="And you?", agent="child")
    assert fork.created is not None and fork.created.parent_tokens is not None
    assert (await run.resume()).recomputed_tokens == 0
    assert (await run.steer("Brief.")).applied == "now"
    engine.allowed = None
    done = await client.wait([run, fork.id], seconds=20)
    assert [body.id for body in done.done] == [run.id, fork.id] and not done.timed_out
    assert done.done[0].result is not None and done.done[0].result.text == SECOND
    assert done.done[1].parent_run == run.id
    assert any(isinstance(event, RunSteered) for event in await read_all(run.stream(follow=False)))
    with pytest.raises(Conflict, match="Start a new run, or fork this one") as refused:
        await run.steer("Too late")
    assert refused.value.kind == "run_ended"
    assert (await run.cancel()).status == "completed"


async def test_calls_are_answered_by_their_ids(client: Client) -> None:
    run = await client.spawn("Read", tools=TOOLS)
    asked = (await run.result(seconds=10)).input_required
    assert asked is not None
    assert (await run.respond({asked.calls[0].id: "contents"})).turn == 2
    result = (await run.result(seconds=10)).result
    assert result is not None and result.text == "done"


async def test_a_key_makes_one_run_and_another_body_under_it_is_refused(client: Client) -> None:
    first = await client.spawn("Hi", key="job 7")
    second = await client.spawn("Hi", key="job 7")
    assert first.id == second.id
    assert second.created is not None and second.created.replayed
    with pytest.raises(Conflict, match="or choose a new key"):
        await client.spawn("Ho", key="job 7")


async def test_a_wait_for_any_returns_with_the_first_and_a_wait_ends_in_time(
    client: Client, engine: TalkingEngine
) -> None:
    engine.allowed = 2
    stuck = await client.spawn("Hi")
    await decodes(stuck, 2)
    await stuck.pause()
    engine.allowed = None
    quick = await client.spawn("Hi", max_tokens=1)
    waited = await client.wait([stuck, quick], "any", seconds=10)
    assert ([run.id for run in waited.done], waited.pending, waited.timed_out) == (
        [quick.id],
        [stuck.id],
        False,
    )
    engine.allowed = 0
    held = await client.spawn("Hi")
    waited = await client.wait([held], seconds=0.1)
    assert (waited.done, waited.pending, waited.timed_out) == ([], [held.id], True)
    with pytest.raises(TimeoutError, match="has not ended within"):
        await held.result(seconds=0.05)
    assert (await client.wait([])).done == []


async def test_a_batch_tells_for_each_run_what_became_of_it(client: Client) -> None:
    good, bad, last = await client.batch(
        [{"input": "Hi"}, {"input": "Hi", "priority": 9999}, {"input": "Ho"}]
    )
    assert isinstance(good, RunHandle) and isinstance(last, RunHandle)
    assert isinstance(bad, Refused) and bad.param == "runs[1].priority"
    with pytest.raises(InvalidRequest, match=r"runs\[1\]"):
        await client.batch([{"input": "Hi"}, {"input": ""}], all_or_nothing=True)


async def test_a_batch_asks_again_for_those_without_a_place_when_it_was_told_to(
    valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with native_gateway(valkey.url, tmp_path) as native:
        native.verbs.refusals = [None, Overloaded(1)]
        begun = time.monotonic()
        async with Client(native.url, patience=PATIENT) as client:
            runs = await client.batch([{"input": "Hi"}, {"input": "Ho"}])
        assert all(isinstance(run, RunHandle) for run in runs)
        assert time.monotonic() - begun >= 1
        native.verbs.refusals = [Overloaded(300)]
        async with Client(native.url, patience=PATIENT) as client:
            (refused,) = await client.batch([{"input": "Hi"}])
        assert isinstance(refused, Refused) and refused.retry_after == 300, "beyond its patience"


@pytest.mark.parametrize("refusal", [StillWaiting("Not yet."), BusLost()])
async def test_a_batch_makes_no_second_child_where_the_first_may_be_under_way(
    valkey: ValkeyServer, tmp_path: Path, refusal: Exception
) -> None:
    async with native_gateway(valkey.url, tmp_path, claim_seconds=0.1) as native:
        parent = await native.create()
        native.verbs.refusals = [refusal]
        async with Client(native.url, patience=PATIENT) as client:
            asked = cast(RunFields, {"input": "Hi", "fork": {"run": parent}})
            fork, other = await client.batch([asked, {"input": "Ho"}])
        assert isinstance(fork, RunHandle) and isinstance(other, RunHandle)
        assert native.verbs.children == [fork.id, fork.id]
        assert native.verbs.num_created == 3


async def test_a_batch_may_be_longer_than_one_request(client: Client) -> None:
    runs = await client.batch([{"input": f"Hi {number}", "max_tokens": 1} for number in range(70)])
    ids = [run.id for run in runs if isinstance(run, RunHandle)]
    assert len(set(ids)) == 70
    waited = await client.wait(ids, seconds=30)
    assert [run.id for run in waited.done] == ids


async def test_a_sessions_events_tell_each_run_once(client: Client) -> None:
    runs = [await client.spawn(f"Hi {number}", session="s") for number in range(3)]
    await client.wait(runs, seconds=10)
    ends: list[str] = []
    async with asyncio.timeout(10), client.events("s") as events:
        async for event in events:
            ends += [event.run] if isinstance(event, ENDINGS) else []
            if len(ends) == 3:
                break
    assert sorted(ends) == sorted(run.id for run in runs)
    rest = await read_all(client.events("s", events.last_id, follow=False))
    assert not [event for event in rest if isinstance(event, ENDINGS)]
    assert await client.cancel_session("s") == 0
    with pytest.raises(NotFound):
        await client.tree("nobody's")


async def test_a_run_is_kept_alive_by_heartbeats(client: Client, engine: TalkingEngine) -> None:
    engine.allowed = 2
    run = await client.spawn("Hi", heartbeat_ms=400, orphan="cancel")
    async with run.heartbeats():
        await asyncio.sleep(1.2)
        assert (await run.read()).status == "decoding"
    assert (await run.result(seconds=10)).status == "cancelled"


# A way that breaks.


async def spawn_and_read(client: Client, number: int) -> tuple[str, list[PublicEvent]]:
    run = await client.spawn(f"Hi {number}", session="s", agent=f"a{number}")
    return run.id, await read_all(run.stream())


@pytest.mark.parametrize("seed", [1, 2])
async def test_thirty_runs_over_a_breaking_way_are_each_made_once_and_read_whole(
    gateway: NativeClient, engine: TalkingEngine, seed: int
) -> None:
    engine.seconds_per_token = 0.002
    async with flaky_proxy(gateway.url, seed) as proxy, Client(proxy.url, patience=PATIENT) as client:
        told = await asyncio.gather(*(spawn_and_read(client, number) for number in range(30)))
        assert proxy.num_cuts > 30
    async with Client(gateway.url) as direct:
        listed = [line async for line in direct.runs(session="s")]
        assert sorted(line.id for line in listed) == sorted(run_id for run_id, _ in told), "each once"
        for run_id, events in told:
            whole = await read_all(direct.stream(run_id, follow=False))
            assert without_progress(events) == without_progress(whole)
            assert text_of(events) == FIRST


def without_progress(events: list[PublicEvent]) -> list[PublicEvent]:
    return [event for event in events if not isinstance(event, RunProgress)]


async def test_a_cut_stream_goes_on_where_it_was(gateway: NativeClient, engine: TalkingEngine) -> None:
    engine.allowed = 4
    async with flaky_proxy(gateway.url) as proxy, Client(proxy.url, patience=PATIENT) as client:
        run = await client.spawn("Hi")
        events: list[PublicEvent] = []
        async with asyncio.timeout(20), run.stream() as stream:
            async for event in stream:
                events.append(event)
                if len(text_of(events)) > 2 and not proxy.num_cuts:
                    proxy.cut_all()
                    engine.allowed = None
        assert stream.num_resumed == 1
        assert text_of(events) == FIRST


async def test_a_stream_goes_on_at_the_gateway_that_comes_next(
    engine: TalkingEngine, valkey: ValkeyServer, tmp_path: Path
) -> None:
    engine.allowed = 3
    async with flaky_proxy("http://127.0.0.1:1") as proxy, Client(proxy.url, patience=PATIENT) as client:
        async with serving(valkey.url, tmp_path, "g1") as first:
            lead_to(proxy, first)
            run = await client.spawn("Hi")
            reading = asyncio.create_task(read_all(run.stream()))
            await decodes(run, 3)
            proxy.is_down = True
            proxy.cut_all()
        engine.allowed = None
        async with serving(valkey.url, tmp_path, "g2") as second:
            lead_to(proxy, second)
            proxy.is_down = False
            events = await reading
        assert text_of(events) == FIRST
        assert isinstance(events[-1], RunCompleted)


def lead_to(proxy: FlakyProxy, gateway: NativeClient) -> None:
    _, _, port = gateway.url.rpartition(":")
    proxy.target = ("127.0.0.1", int(port))


async def test_a_verb_that_was_cut_is_taken_once(gateway: NativeClient, engine: TalkingEngine) -> None:
    engine.allowed = 3
    async with flaky_proxy(gateway.url) as proxy, Client(proxy.url, patience=PATIENT) as client:
        run = await client.spawn("Hi", on_end="await_input")
        await decodes(run, 3)
        proxy.num_answers_to_swallow = 2
        steered = await run.steer("Brief.")
        assert (steered.applied, steered.turn, proxy.num_answers_to_swallow) == ("now", 2, 0)
        engine.allowed = None
        assert (await run.result(seconds=10)).turn == 2


async def test_a_server_that_is_away_is_told_with_its_address() -> None:
    async with flaky_proxy("http://127.0.0.1:1") as proxy, Client(proxy.url, patience=IMPATIENT) as client:
        proxy.is_down = True
        with pytest.raises(Unreachable, match=r"http://127.0.0.1:\d+ cannot be reached: .*tetrarch serve"):
            await client.spawn("Hi")
        with pytest.raises(Unreachable):
            await read_all(client.stream("run-" + "0" * 32))
        assert proxy.num_connections > 5


async def test_an_unknown_run_is_told_and_not_tried_again(client: Client) -> None:
    unknown = "run-" + "0" * 32
    with pytest.raises(NotFound):
        await asyncio.wait_for(read_all(client.stream(unknown)), 2)
    with pytest.raises(NotFound):
        await asyncio.wait_for(client.wait([unknown]), 2)


# Servers that are not as they should be.


class Script:
    """A server that answers as told, one after the other."""

    def __init__(self, *answers: web.Response) -> None:
        self.answers = list(answers)
        self.heard: list[web.BaseRequest] = []

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.heard.append(request)
        return self.answers.pop(0)


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Script, Client]]:
    script = Script()
    runner = web.ServerRunner(web.Server(script.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with Client(f"http://{host}:{port}", "a token", patience=IMPATIENT) as client:
        yield script, client
    await runner.cleanup()


def error(status: int, kind: str, **headers: str) -> web.Response:
    body = {"error": {"message": "No.", "type": "t", "param": None, "code": kind}}
    return web.json_response(body, status=status, headers=headers)


CREATED = {
    "id": "run-" + "0" * 32, "status": "queued", "session": "", "agent": "", "replayed": False,
    "links": {"self": "", "events": "", "tree": None}, "a field of later days": 1,
}  # fmt: skip


async def test_a_refused_spawn_is_sent_again_under_its_key_and_with_the_token(
    scripted: tuple[Script, Client],
) -> None:
    script, client = scripted
    script.answers = [
        error(429, "overloaded", **{"Retry-After": "0"}),
        error(503, "no_engine"),
        web.Response(status=502, text="<html>"),
        web.json_response(CREATED, status=202),
    ]
    assert (await client.spawn("Hi")).id == CREATED["id"]
    assert len({request.headers["Idempotency-Key"] for request in script.heard}) == 1
    assert {request.headers["Authorization"] for request in script.heard} == {"Bearer a token"}


async def test_a_token_follows_no_redirect(scripted: tuple[Script, Client]) -> None:
    script, client = scripted
    script.answers = [web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})]
    with pytest.raises(Refused) as refused:
        await client.spawn("Hi")
    assert (refused.value.status, len(script.heard)) == (307, 1)


async def test_a_server_of_another_kind_is_told(scripted: tuple[Script, Client]) -> None:
    script, client = scripted
    script.answers = [web.Response(text="<html>hello")]
    with pytest.raises(TetrarchError, match=r"did not answer as .* does: .*Is the address right"):
        await client.spawn("Hi")


def sse(*lines: str) -> web.Response:
    return web.Response(text="".join(f"{line}\n" for line in lines), content_type="text/event-stream")


async def test_what_one_step_tells_is_told_whole_or_again_but_not_twice(
    scripted: tuple[Script, Client],
) -> None:
    """The stream ends between two events of one step: the first of them is not yet a place to go on from."""
    script, client = scripted
    one = 'data: {"type":"token","run":"r","turn":1,"text":"one"}'
    two = 'data: {"type":"token","run":"r","turn":1,"text":"two"}'
    usage = '{"prompt_tokens":1}'
    end = f'data: {{"type":"run.completed","run":"r","usage":{usage},"turns":1,"error":null,"message":null}}'
    unknown = 'data: {"type":"of later days","run":"r"}'
    script.answers = [
        sse("event: token", one, "", "event: token"),
        sse(one, "", "id: 1-2", two, "", 'data: {"type":"keepalive"}', "", one),
        sse("event: error", 'data: {"type":"error","error":{"message":"m","code":"bus_unavailable"}}', ""),
        sse(one, "", "id: 1-3", unknown, "", "id: 9-9", end, ""),
    ]
    events = await read_all(client.stream("run-" + "0" * 32))
    assert text_of(events) == "onetwoone"
    assert [request.headers["Last-Event-ID"] for request in script.heard] == ["0-0", "0-0", "1-2", "1-2"]


async def test_a_streams_failure_that_would_come_again_is_raised(scripted: tuple[Script, Client]) -> None:
    script, client = scripted
    script.answers = [sse("event: error", 'data: {"type":"error","error":{"message":"m","code":"gone"}}', "")]
    with pytest.raises(Refused, match="m"):
        await read_all(client.stream("run-" + "0" * 32))


async def test_a_sessions_gap_is_told_once_over_cuts(scripted: tuple[Script, Client]) -> None:
    script, client = scripted
    gap = 'data: {"type":"gap","run":"","after":"5-1","before":"7-1"}'
    paused = 'data: {"type":"run.resumed","run":"r","turn":1}'
    script.answers = [sse(gap, ""), sse(gap, "", "id: 7-1", paused, ""), error(404, "not_found")]
    heard: list[PublicEvent] = []
    with pytest.raises(NotFound):
        async for event in client.events("s", "5-1"):
            heard.append(event)  # noqa: PERF401 - it raises in the end
    assert [type(event) for event in heard] == [Gap, RunResumed]
    assert script.heard[2].headers["Last-Event-ID"] == "7-1"


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(RuntimeError, match="async with Client"):
        await Client("http://127.0.0.1:1").models()
