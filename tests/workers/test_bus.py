from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from redis import Redis
from structlog.testing import capture_logs

from tests.conftest import Logged, ValkeyServer
from tests.cutting_proxy import cutting_proxy
from workers.backlog import TurnKey
from workers.bus import COMMAND_SECONDS, Bus, connect
from workers.errors import BusError
from workers.inbox import BLOCK_SECONDS
from workers.messages import (
    ENGINES_KEY,
    EVENT_FIELD,
    LEASE_SECONDS,
    RUN_END_ID,
    Accepted,
    Cancel,
    Dispatched,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Finished,
    KVFacts,
    Message,
    Pause,
    RunEnded,
    Started,
    Submit,
    Timings,
    ToEngine,
    TokenizerBundle,
    Tokens,
    Usage,
    decode_event,
    decode_info,
    decode_stats,
    decode_tokenizer,
    encode,
    engine_incarnation_key,
    engine_key,
    engine_lease_key,
    event_id,
    inbox_key,
    run_events_key,
    tokenizer_key,
)
from workers.outbox import Outbox
from workers.turn import TurnEvent

BUNDLE = TokenizerBundle(tokenizer_json=b"{}", chat_template="")
INFO = EngineInfo(
    engine_id="left",
    incarnation=0,
    model_id="tiny",
    digest="d1",
    context_length=128,
    num_workers=4,
    vocab_size=32,
    kv=KVFacts(dtype="int8", bytes_per_token=1.0, page_tokens=64, num_pages=8, pool_bytes=512),
    device="cpu",
    weights="float32",
    blas="none",
    created=0,
)
END = Finished(reason="stop", usage=Usage(), timings=Timings())
STARTED = Started(worker=0, cached_tokens=0)


class Desk:
    """A gateway's side, by hand."""

    def __init__(self, client: Redis) -> None:
        self.client: Any = client

    def dispatch(self, run_id: str, attempt: int = 1, *, incarnation: int, digest: str = "d1") -> None:
        self.create(run_id)
        self.write(run_id, event_id(attempt, 1), Dispatched(engine_id="left", incarnation=incarnation))
        self.send(
            Submit(
                run_id=run_id,
                attempt=attempt,
                incarnation=incarnation,
                digest=digest,
                token_ids=b"\1\0\0\0",
                max_tokens=4,
            )
        )

    def create(self, run_id: str) -> None:
        if not self.client.exists(run_events_key(run_id)):
            self.write(run_id, "0-1", Accepted(model="tiny", engine_id="left", created=0, prompt_tokens=1))

    def write(self, run_id: str, entry_id: str, event: Event) -> None:
        self.client.xadd(run_events_key(run_id), {EVENT_FIELD: encode(event)}, id=entry_id)

    def send(self, message: object) -> None:
        self.client.xadd(inbox_key("left"), {EVENT_FIELD: encode(message)})

    def events(self, run_id: str) -> dict[str, Event]:
        """What the engine wrote, by stream id."""
        entries = self.client.xrange(run_events_key(run_id))
        found = {entry_id.decode(): decode_event(fields[EVENT_FIELD]) for entry_id, fields in entries}
        return {key: value for key, value in found.items() if not isinstance(value, Accepted | Dispatched)}

    def text(self, run_id: str) -> str:
        return "".join(e.text for e in self.events(run_id).values() if isinstance(e, Tokens))

    def num_inbox_entries(self) -> int:
        return int(self.client.xlen(inbox_key("left")))

    def lease(self) -> bytes | None:
        value = self.client.get(engine_lease_key("left"))
        return bytes(value) if value is not None else None

    def incarnation(self) -> int:
        return int(self.client.get(engine_incarnation_key("left")) or 0)


def stats(incarnation: int) -> EngineStats:
    return EngineStats(incarnation=incarnation, ready=True)


def told(run_id: str, event: Event, attempt: int = 1) -> TurnEvent:
    return TurnEvent(run_id, attempt, event)


def tokens(text: str) -> Tokens:
    return Tokens(token_ids=text.encode(), text=text)


def wait_for(condition: Callable[[], object], seconds: float = 8.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def receive(bus: Bus, seconds: float = 5.0) -> ToEngine:
    """Exactly one message."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if messages := bus.receive(0.1):
            assert len(messages) == 1
            return messages[0]
    raise AssertionError("nothing was delivered")


@contextmanager
def running(server: ValkeyServer, url: str | None = None) -> Iterator[tuple[Bus, Desk]]:
    bus = Bus(url or server.url, INFO, BUNDLE, stats)
    with server.client() as client:
        try:
            bus.begin()
            yield bus, Desk(client)
        finally:
            bus.stop()
            bus.close()


@pytest.fixture
def pair(valkey: ValkeyServer) -> Iterator[tuple[Bus, Desk]]:
    with running(valkey) as pair:
        yield pair


def test_a_start_publishes_who_it_is(pair: tuple[Bus, Desk]) -> None:
    _, desk = pair
    found = desk.client.hgetall(engine_key("left"))
    info = decode_info(found[b"info"])
    assert info == msgspec.structs.replace(INFO, incarnation=1, created=info.created)
    assert decode_stats(found[b"stats"]) == stats(1)
    assert decode_tokenizer(desk.client.get(tokenizer_key("d1"))) == BUNDLE
    assert desk.client.smembers(ENGINES_KEY) == {b"left"}
    assert desk.lease() == b"1"
    assert 0 < desk.client.pttl(engine_lease_key("left")) <= LEASE_SECONDS * 1000


def test_a_turn_from_dispatch_to_end(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    submit = receive(bus)
    assert isinstance(submit, Submit)
    assert submit.run_id == "run-1"
    assert desk.num_inbox_entries() == 1, "kept until the turn ends"
    bus.send([told("run-1", STARTED), told("run-1", tokens("a")), told("run-1", END)])
    wait_for(lambda: desk.num_inbox_entries() == 0)
    assert desk.events("run-1") == {"1-2": STARTED, "1-3": tokens("a"), "1-4": END}


def test_a_cancel_is_delivered_and_deleted_with_its_turn(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    desk.send(Cancel(run_id="run-1", attempt=1))
    assert receive(bus) == Cancel(run_id="run-1", attempt=1)
    assert desk.num_inbox_entries() == 2
    bus.send([told("run-1", END)])
    wait_for(lambda: desk.num_inbox_entries() == 0)


def test_a_cancel_of_an_ended_turn_is_handed_on_as_its_run_may_be_paused_and_deleted(
    pair: tuple[Bus, Desk],
) -> None:
    bus, desk = pair
    desk.send(Cancel(run_id="run-9", attempt=1))
    assert receive(bus) == Cancel(run_id="run-9", attempt=1)
    wait_for(lambda: desk.num_inbox_entries() == 0)


def test_a_pause_of_an_unknown_turn_is_deleted(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.send(Pause(run_id="run-9", attempt=1))
    wait_for(lambda: desk.num_inbox_entries() == 0)
    assert bus.receive(0) == []


def test_the_same_submit_twice_runs_once(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    entries = desk.client.xrange(inbox_key("left"))
    desk.client.xadd(inbox_key("left"), entries[0][1])
    wait_for(lambda: desk.num_inbox_entries() == 1)
    assert bus.receive(0) == []


def test_tokens_are_joined_to_twenty_events_a_second(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    started = time.monotonic()
    for number in range(60):
        bus.send([told("run-1", tokens(chr(65 + number)))])
        time.sleep(0.005)
    bus.send([told("run-1", END)])
    elapsed = time.monotonic() - started
    wait_for(lambda: END in desk.events("run-1").values())
    written = desk.events("run-1")
    assert desk.text("run-1") == "".join(chr(65 + number) for number in range(60))
    assert written["1-2"] == tokens("A"), "the first goes alone and at once"
    assert len(written) <= 20 * elapsed + 4


def test_an_older_attempt_is_fenced_and_cancelled(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    bus.send([told("run-1", tokens("a"))])
    wait_for(lambda: desk.text("run-1") == "a")
    desk.write("run-1", "2-1", Failed(error="engine_lost", message="", retryable=True))
    bus.send([told("run-1", tokens("b"))])
    assert receive(bus) == Cancel(run_id="run-1", attempt=1)
    wait_for(lambda: desk.num_inbox_entries() == 0)
    bus.send([told("run-1", tokens("c")), told("run-1", END)])
    desk.dispatch("run-2", incarnation=1)
    receive(bus)
    bus.send([told("run-2", END)])
    wait_for(lambda: desk.events("run-2"))
    assert desk.text("run-1") == "a"
    assert END not in desk.events("run-1").values()


def test_an_ended_run_fences_its_turn_without_an_error(pair: tuple[Bus, Desk], logged: Logged) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    desk.write("run-1", RUN_END_ID, RunEnded(state="failed"))
    before = desk.events("run-1")
    bus.send([told("run-1", STARTED)])
    assert receive(bus) == Cancel(run_id="run-1", attempt=1)
    bus.send([told("run-1", END)])
    wait_for(lambda: desk.num_inbox_entries() == 0)
    assert desk.events("run-1") == before
    (fenced,) = logged.lines("turn fenced by the bus")
    assert fenced["run"] == "run-1"
    assert not logged.lines("the bus refused an event")


def test_two_attempts_of_a_run_are_two_turns(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", 1, incarnation=1)
    receive(bus)
    desk.dispatch("run-1", 2, incarnation=1)
    receive(bus)
    bus.send([told("run-1", END, attempt=1), told("run-1", tokens("z"), 2), told("run-1", END, 2)])
    wait_for(lambda: desk.num_inbox_entries() == 0)
    assert list(desk.events("run-1")) == ["2-2", "2-3"]


def test_a_stream_that_is_gone_cancels_its_turn(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    desk.client.delete(run_events_key("run-1"))
    bus.send([told("run-1", tokens("a"))])
    assert receive(bus) == Cancel(run_id="run-1", attempt=1)
    assert not desk.client.exists(run_events_key("run-1")), "never made again"
    wait_for(lambda: desk.num_inbox_entries() == 0)


def test_a_message_from_the_future_fails_its_turn_alone(pair: tuple[Bus, Desk]) -> None:
    class Resume(Message, frozen=True):
        run_id: str
        attempt: int
        incarnation: int

    bus, desk = pair
    desk.create("run-1")
    desk.send(Resume(v=2, run_id="run-1", attempt=1, incarnation=1))
    wait_for(lambda: desk.events("run-1"))
    (failed,) = desk.events("run-1").values()
    assert isinstance(failed, Failed)
    assert failed.error == "upgrade_engine"
    wait_for(lambda: desk.num_inbox_entries() == 0)
    desk.dispatch("run-2", incarnation=1)
    receive(bus)


@pytest.mark.parametrize("kind", [Cancel, Pause])
def test_a_word_from_the_future_about_a_turn_does_not_end_it(
    pair: tuple[Bus, Desk], kind: type[Cancel | Pause]
) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    num_events = len(desk.events("run-1"))
    desk.send(kind(v=2, run_id="run-1", attempt=1))
    wait_for(lambda: desk.num_inbox_entries() == 1)
    assert bus.receive(0) == [] and len(desk.events("run-1")) == num_events


@pytest.mark.parametrize("payload", [b"", b"\xff", b"\x81\xa4kind\xa6dragon", encode({"kind": "submit"})])
def test_what_cannot_be_read_is_deleted(pair: tuple[Bus, Desk], payload: bytes) -> None:
    bus, desk = pair
    desk.client.xadd(inbox_key("left"), {EVENT_FIELD: payload})
    desk.client.xadd(inbox_key("left"), {b"other": b"x"})
    wait_for(lambda: desk.num_inbox_entries() == 0)
    desk.dispatch("run-1", incarnation=1)
    receive(bus)


@pytest.mark.parametrize("payload", [b"\x91" * 100_000, b"\x81\xa1x" + b"\x91" * 100_000])
def test_a_message_nested_too_deeply_is_deleted(pair: tuple[Bus, Desk], payload: bytes) -> None:
    test_what_cannot_be_read_is_deleted(pair, payload)


@pytest.mark.parametrize(
    "broken",
    [{"token_ids": "text"}, {"max_tokens": None}, {"incarnation": "one"}, {"sampling": {"top_k": 0.5}}],
)
def test_a_turn_whose_body_cannot_be_read_fails(pair: tuple[Bus, Desk], broken: dict[str, Any]) -> None:
    bus, desk = pair
    desk.create("run-1")
    whole = {"kind": "submit", "run_id": "run-1", "attempt": 1, "incarnation": 1, "digest": "d1"}
    desk.send({**whole, "token_ids": b"\1\0\0\0", "max_tokens": 4, **broken})
    wait_for(lambda: desk.events("run-1"))
    (failed,) = desk.events("run-1").values()
    assert isinstance(failed, Failed)
    assert (failed.error, failed.retryable) == ("invalid_request", False)
    wait_for(lambda: desk.num_inbox_entries() == 0)
    desk.dispatch("run-2", incarnation=1)
    receive(bus)


def test_a_turn_for_another_incarnation_is_ignored(pair: tuple[Bus, Desk]) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=7)
    wait_for(lambda: desk.num_inbox_entries() == 0)
    assert bus.receive(0) == []
    assert desk.events("run-1") == {}


def test_another_tokenizers_prompt_is_refused(pair: tuple[Bus, Desk]) -> None:
    _, desk = pair
    desk.dispatch("run-1", incarnation=1, digest="d0")
    wait_for(lambda: desk.events("run-1"))
    (failed,) = desk.events("run-1").values()
    assert isinstance(failed, Failed)
    assert (failed.error, failed.retryable) == ("digest_mismatch", True)


def test_a_start_discards_what_was_meant_for_its_predecessor(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        Desk(client).dispatch("run-1", incarnation=1)
    with running(valkey) as (bus, desk):
        assert desk.num_inbox_entries() == 0
        assert bus.receive(0.1) == []


def test_a_close_writes_the_last_events_and_gives_the_lease_back(valkey: ValkeyServer) -> None:
    with running(valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        bus.send([told("run-1", tokens("a")), told("run-1", tokens("b"))])
        bus.fail_open_turns("engine_stopping", "send the call again")
    with valkey.client() as client:
        desk = Desk(client)
        last = list(desk.events("run-1").values())[-1]
        assert isinstance(last, Failed)
        assert (last.error, last.retryable) == ("engine_stopping", True)
        assert desk.text("run-1") == "ab"
        assert desk.lease() is None
        assert desk.num_inbox_entries() == 0


def test_a_dead_predecessors_lease_is_waited_out(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        client.set(engine_lease_key("left"), "41", px=600)
        client.set(engine_incarnation_key("left"), "41")
    with running(valkey) as (_, desk):
        assert desk.lease() == b"42"


def test_a_second_process_with_the_same_name_is_refused(pair: tuple[Bus, Desk], valkey: ValkeyServer) -> None:
    bus, desk = pair
    second = Bus(valkey.url, INFO, BUNDLE, stats)
    with pytest.raises(BusError, match="--engine-id"):
        second.begin()
    second.close()
    assert not bus.is_lost
    assert desk.lease() == b"1"


def test_no_bus_is_said_in_one_line(own_valkey: ValkeyServer) -> None:
    own_valkey.kill()
    bus = Bus(own_valkey.url, INFO, BUNDLE, stats)
    with pytest.raises(BusError, match="cannot be used"):
        bus.begin()
    bus.close()


def test_a_lost_lease_starts_a_new_incarnation_and_the_old_events_are_refused(
    pair: tuple[Bus, Desk],
) -> None:
    bus, desk = pair
    desk.dispatch("run-1", incarnation=1)
    receive(bus)
    desk.client.delete(engine_lease_key("left"))
    wait_for(lambda: bus.is_lost)
    assert bus.receive(None) == [], "the engine thread is woken"
    bus.send([told("run-1", tokens("late"))])
    bus.begin_again()
    assert desk.lease() == b"2"
    bus.send([told("run-1", tokens("later")), told("run-1", END)])
    desk.dispatch("run-2", incarnation=2)
    assert isinstance(receive(bus), Submit)
    bus.send([told("run-2", END)])
    wait_for(lambda: desk.events("run-2"))
    assert desk.events("run-1") == {}


@pytest.mark.parametrize("command", [b"GET", b"EXEC"])
def test_a_connection_that_fails_while_the_lease_is_watched_loses_no_lease(
    own_valkey: ValkeyServer, command: bytes
) -> None:
    with cutting_proxy(own_valkey.socket) as proxy, running(own_valkey, proxy.url) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        proxy.cut_at(b"\r\n%s\r\n" % command)
        wait_for(lambda: proxy.num_cuts == 1)
        time.sleep(1.5)  # the beat after it
        assert not bus.is_lost
        assert desk.lease() == b"1"
        bus.send([told("run-1", END)])
        wait_for(lambda: END in desk.events("run-1").values())


def test_an_engine_that_its_bus_forgot_by_name_is_listed_again(pair: tuple[Bus, Desk]) -> None:
    _, desk = pair
    desk.client.srem(ENGINES_KEY, "left")
    wait_for(lambda: desk.client.sismember(ENGINES_KEY, "left"))


def test_a_bus_killed_and_restarted_loses_no_event(own_valkey: ValkeyServer) -> None:
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        time.sleep(1.2)  # everysec: the dispatch is on disk, the last events need not be
        bus.send([told("run-1", STARTED), told("run-1", tokens("a"))])
        wait_for(lambda: desk.text("run-1") == "a")
        own_valkey.kill()
        for text in "bcd":
            bus.send([told("run-1", tokens(text))])
            time.sleep(0.06)
        own_valkey.start()
        bus.send([told("run-1", END)])
        wait_for(lambda: END in desk.events("run-1").values())
        assert desk.text("run-1") == "abcd"
        sequence = [int(entry_id.partition("-")[2]) for entry_id in desk.events("run-1")]
        assert sequence == list(range(2, 2 + len(sequence))), "no hole"
        wait_for(lambda: desk.num_inbox_entries() == 0)
        assert not bus.is_lost
        assert desk.incarnation() == 1


def test_events_acknowledged_and_lost_while_the_engine_was_idle_come_back(own_valkey: ValkeyServer) -> None:
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        own_valkey.remember()
        bus.send([told("run-1", STARTED), told("run-1", tokens("a")), told("run-1", END)])
        wait_for(lambda: desk.num_inbox_entries() == 0)
        own_valkey.kill()
        own_valkey.roll_back()
        own_valkey.start()
        wait_for(lambda: list(desk.events("run-1").values()) == [STARTED, tokens("a"), END])
        wait_for(lambda: desk.num_inbox_entries() == 0)
        assert not bus.is_lost
        desk.dispatch("run-2", incarnation=1)
        assert isinstance(receive(bus), Submit)


def test_a_later_event_does_not_overtake_those_that_a_restart_lost(own_valkey: ValkeyServer) -> None:
    """Written at once, before anything can have noticed the restart but the connection itself."""
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        own_valkey.remember()
        bus.send([told("run-1", STARTED), told("run-1", tokens("a"))])
        wait_for(lambda: desk.text("run-1") == "a")
        own_valkey.kill()
        own_valkey.roll_back()
        own_valkey.start()
        bus.send([told("run-1", tokens("b")), told("run-1", END)])
        wait_for(lambda: END in desk.events("run-1").values())
        assert list(desk.events("run-1").values()) == [STARTED, tokens("a"), tokens("b"), END]
        assert bus.receive(0) == [], "nothing was fenced"


def test_a_thread_that_breaks_ends_the_engine_with_its_name(valkey: ValkeyServer) -> None:
    num_calls = 0

    def breaking_stats(incarnation: int) -> EngineStats:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise TypeError("a bug")
        return stats(incarnation)

    bus = Bus(valkey.url, INFO, BUNDLE, breaking_stats)
    bus.begin()
    with capture_logs() as lines, pytest.raises(BusError, match="lease thread broke"):
        bus.receive(None)
    assert [(line["thread"], line["exc_info"]) for line in lines if line["log_level"] == "error"] == [
        ("lease", True)
    ]
    with pytest.raises(BusError, match="lease thread broke"):
        bus.receive(0)
    bus.wait_for_room()
    num_calls = -10
    bus.close()


def test_a_broken_outbox_is_told(own_valkey: ValkeyServer) -> None:
    broken: queue.Queue[str] = queue.Queue()

    def may_write() -> bool:
        raise LookupError("a bug")

    with own_valkey.client() as client:
        outbox = Outbox(
            client,
            lambda on_connect: connect(own_valkey.url, 2.0, on_connect=on_connect),
            "left",
            may_write=may_write,
            on_refused=lambda key: None,
            on_broken=broken.put,
        )
        outbox.start()
        outbox.open(TurnKey("run-1", 1), b"1-0")
        outbox.post(TurnKey("run-1", 1), STARTED)
        assert broken.get(timeout=5) == "outbox"


def test_a_blocking_read_without_an_answer_is_given_up(own_valkey: ValkeyServer) -> None:
    with running(own_valkey) as (_, desk):

        def readers() -> set[str]:
            return {client["id"] for client in desk.client.client_list() if client["cmd"] == "xread"}

        wait_for(readers)
        before = readers()
        own_valkey.signal(signal.SIGSTOP)
        time.sleep(BLOCK_SECONDS + COMMAND_SECONDS + 0.3)
        own_valkey.signal(signal.SIGCONT)
        wait_for(lambda: readers() - before)


def test_a_retried_write_is_harmless(own_valkey: ValkeyServer) -> None:
    """The server stops after it took the events and before it answers: they are sent twice, written once."""
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        bus.send([told("run-1", tokens("a"))])
        wait_for(lambda: desk.text("run-1") == "a")
        own_valkey.signal(signal.SIGSTOP)
        bus.send([told("run-1", tokens("b"))])
        time.sleep(2.4)  # the write has timed out
        own_valkey.signal(signal.SIGCONT)
        bus.send([told("run-1", END)])
        wait_for(lambda: END in desk.events("run-1").values())
        assert desk.text("run-1") == "ab"
        assert list(desk.events("run-1")) == ["1-2", "1-3", "1-4"]


def test_a_bus_that_comes_back_empty_starts_a_new_incarnation(own_valkey: ValkeyServer) -> None:
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        own_valkey.kill()
        own_valkey.forget()
        own_valkey.start()
        wait_for(lambda: bus.is_lost)
        bus.begin_again()
        assert desk.lease() == b"2", "a number that no gateway has seen"
        assert desk.client.exists(tokenizer_key("d1"))
        bus.send([told("run-1", END)])
        time.sleep(0.1)
        assert not desk.client.exists(run_events_key("run-1"))


def test_the_engine_pauses_when_too_much_is_kept_back(own_valkey: ValkeyServer) -> None:
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        time.sleep(1.2)
        own_valkey.kill()
        bus.send([told("run-1", STARTED)])
        time.sleep(0.3)
        bus.wait_for_room()  # a little is kept without a pause
        for _ in range(18):
            bus.send([told("run-1", Tokens(token_ids=b"x" * (1 << 20), text=""))])
            time.sleep(0.051)
        bus.send([told("run-1", END)])
        pause = threading.Thread(target=bus.wait_for_room)
        pause.start()
        pause.join(timeout=0.5)
        assert pause.is_alive()
        own_valkey.start()
        pause.join(timeout=8)
        assert not pause.is_alive()
        wait_for(lambda: END in desk.events("run-1").values())


def test_a_full_bus_delays_events_and_loses_none(own_valkey: ValkeyServer) -> None:
    with running(own_valkey) as (bus, desk):
        desk.dispatch("run-1", incarnation=1)
        receive(bus)
        desk.client.config_set("maxmemory", "1")
        bus.send([told("run-1", STARTED), told("run-1", tokens("a"))])
        time.sleep(1.5)
        bus.send([told("run-1", tokens("b")), told("run-1", END)])
        assert desk.events("run-1") == {}
        assert not bus.is_lost
        desk.client.config_set("maxmemory", "0")
        wait_for(lambda: desk.num_inbox_entries() == 0)
        assert list(desk.events("run-1").values()) == [STARTED, tokens("a"), tokens("b"), END]


def test_a_stop_ends_a_pause(own_valkey: ValkeyServer) -> None:
    bus = Bus(own_valkey.url, INFO, BUNDLE, stats)
    bus.begin()
    bus.stop()
    bus.wait_for_room()
    assert bus.receive(None) == []
    own_valkey.kill()
    bus.close()
