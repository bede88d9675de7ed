from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator

import msgspec
import pytest

from kvcache.cache import Cache
from kvcache.errors import IntegrityError
from tests.conftest import Logged, ValkeyServer
from tests.fakes import FakeClock, FakeModel, FakeRunner, fake_rules, fake_submit
from tests.workers.engine_bench import resumed
from tests.workers.test_bus import BUNDLE, INFO, Desk, wait_for
from workers.engine import Engine
from workers.errors import BusError
from workers.loop import EngineLoop, Memory, Parts, why_stuck
from workers.messages import (
    Cancel,
    Cancelled,
    EngineStats,
    Failed,
    Finished,
    Pause,
    Paused,
    Sampling,
    TurnEnd,
    decode_stats,
    engine_key,
    engine_lease_key,
)
from workers.plan import StepPlan, StepResult

NUM_PAGES = 64


class SlowRunner(FakeRunner):
    """Takes real time, so that a test can come in between."""

    seconds = 0.0
    gate: threading.Event | None = None

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(self.seconds)
        if self.gate is not None:
            self.gate.wait(10)
        return super().run(plan)


class Rig:
    """An engine with a fake runner on a real bus, in a thread."""

    def __init__(self, server: ValkeyServer, desk: Desk) -> None:
        self.desk = desk
        self.runner = SlowRunner(NUM_PAGES, FakeClock(), page_tokens=64, model=FakeModel(end_every=0))
        self.engine = Engine(self.runner, Cache(NUM_PAGES), fake_rules(), num_workers=4)
        memory = Memory(active_bytes=7, peak_bytes=8)
        self.loop = EngineLoop(Parts(self.engine, INFO, BUNDLE, lambda: memory), server.url)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        wait_for(self.desk.lease)

    def stop(self) -> None:
        self.loop.stop()
        self.join()

    def join(self) -> None:
        self._thread.join(timeout=10)
        assert not self._thread.is_alive()

    def call(self, run_id: str, prompt: bytes, *, max_tokens: int = 8, incarnation: int = 1) -> None:
        self.desk.create(run_id)
        submit = fake_submit(run_id, list(prompt), max_tokens=max_tokens)
        self.desk.send(msgspec.structs.replace(submit, digest="d1", incarnation=incarnation))

    def stats(self) -> EngineStats:
        return decode_stats(self.desk.client.hget(engine_key("left"), "stats"))

    def ends(self, run_id: str) -> list[object]:
        found = self.desk.events(run_id).values()
        return [event for event in found if isinstance(event, TurnEnd)]

    def token_ids(self, run_id: str) -> list[int]:
        events = self.desk.events(run_id).values()
        return array("I", b"".join(getattr(event, "token_ids", b"") for event in events)).tolist()

    def _run(self) -> None:
        try:
            self.loop.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failure = error


@pytest.fixture
def rig(valkey: ValkeyServer) -> Iterator[Rig]:
    with valkey.client() as client:
        rig = Rig(valkey, Desk(client))
        rig.start()
        try:
            yield rig
        finally:
            rig.stop()


def test_lines_about_a_turn_carry_its_run_and_session(rig: Rig, logged: Logged) -> None:
    rig.desk.create("run-1")
    submit = fake_submit("run-1", list(b"too long a prompt") * 1000)
    rig.desk.send(msgspec.structs.replace(submit, digest="d1", incarnation=1, agent="a7"))
    wait_for(lambda: logged.lines("turn failed"))
    (taken,) = logged.lines("taken")
    assert (taken["run"], taken["session"]) == ("run-1", "a7")
    (failed,) = logged.lines("turn failed")
    assert failed["run"] == "run-1"
    assert failed["error"]


def test_four_turns_over_the_bus_give_what_each_gives_alone(rig: Rig) -> None:
    prompts = {f"run-{number}": f"prompt {number}".encode() for number in range(4)}
    for run_id, prompt in prompts.items():
        rig.call(run_id, prompt, max_tokens=12)
    wait_for(lambda: all(rig.ends(run_id) for run_id in prompts))
    assert all(isinstance(rig.ends(run_id)[0], Finished) for run_id in prompts), rig.ends("run-0")
    for run_id, prompt in prompts.items():
        submit = fake_submit(run_id, list(prompt), sampling=Sampling(temperature=0.0))
        assert rig.token_ids(run_id) == rig.runner.model.generate(submit, 12)
    wait_for(lambda: rig.desk.num_inbox_entries() == 0)
    wait_for(lambda: rig.stats().generated_tokens == 48)
    assert (rig.stats().active_memory_bytes, rig.stats().peak_memory_bytes) == (7, 8)
    assert rig.stats().ready


def test_a_cancel_ends_a_running_turn(rig: Rig) -> None:
    rig.runner.seconds = 0.02
    rig.call("run-1", b"abc", max_tokens=500)
    wait_for(lambda: len(rig.desk.events("run-1")) > 3)
    rig.desk.send(Cancel(run_id="run-1", attempt=1))
    wait_for(lambda: rig.ends("run-1"))
    (end,) = rig.ends("run-1")
    assert isinstance(end, Cancelled)
    wait_for(lambda: rig.desk.num_inbox_entries() == 0)


def test_a_turn_is_paused_and_sent_on_over_the_bus(rig: Rig) -> None:
    rig.runner.seconds = 0.01
    rig.call("run-1", b"a prompt of more than one page, " * 4, max_tokens=60)
    wait_for(lambda: len(rig.desk.events("run-1")) > 3)
    rig.desk.send(Pause(run_id="run-1", attempt=1))
    wait_for(lambda: rig.ends("run-1"))
    assert isinstance(rig.ends("run-1")[0], Paused)
    wait_for(lambda: rig.desk.num_inbox_entries() == 0)
    wait_for(lambda: rig.stats().num_pinned_pages > 0)
    submit = fake_submit("run-1", list(b"a prompt of more than one page, " * 4), max_tokens=60)
    second = msgspec.structs.replace(resumed(submit, rig.token_ids("run-1")), digest="d1")
    rig.desk.send(second)
    wait_for(lambda: len(rig.ends("run-1")) == 2)
    assert isinstance(rig.ends("run-1")[1], Finished)
    assert rig.token_ids("run-1") == rig.runner.model.generate(submit, 60)
    wait_for(lambda: rig.stats().num_pinned_pages == 0)


def test_a_late_cancel_lets_go_of_what_a_paused_run_holds(rig: Rig) -> None:
    rig.runner.seconds = 0.01
    rig.call("run-1", b"a prompt of more than one page, " * 4, max_tokens=200)
    wait_for(lambda: len(rig.desk.events("run-1")) > 3)
    rig.desk.send(Pause(run_id="run-1", attempt=1))
    wait_for(lambda: rig.stats().num_pinned_pages > 0)
    rig.desk.send(Cancel(run_id="run-1", attempt=1))
    wait_for(lambda: rig.stats().num_pinned_pages == 0)
    assert [type(end) for end in rig.ends("run-1")] == [Paused]
    wait_for(lambda: rig.desk.num_inbox_entries() == 0)


def test_a_stop_ends_running_turns_with_a_retryable_error(rig: Rig) -> None:
    rig.runner.seconds = 0.02
    rig.call("run-1", b"abc", max_tokens=500)
    wait_for(lambda: len(rig.desk.events("run-1")) > 2)
    rig.stop()
    (end,) = rig.ends("run-1")
    assert isinstance(end, Failed)
    assert (end.error, end.retryable) == ("engine_stopping", True)
    assert rig.desk.lease() is None
    assert (rig.stats().ready, rig.stats().reason) == (False, "stopping")
    assert rig.desk.num_inbox_entries() == 0
    assert rig.failure is None


def test_a_lost_lease_drops_the_turns_and_serves_on(rig: Rig) -> None:
    rig.runner.seconds = 0.02
    rig.call("run-1", b"abc", max_tokens=900)
    wait_for(lambda: len(rig.desk.events("run-1")) > 2)
    rig.desk.client.delete(engine_lease_key("left"))
    wait_for(lambda: rig.desk.lease() == b"2")
    num_events = len(rig.desk.events("run-1"))
    rig.call("run-2", b"xyz", max_tokens=4, incarnation=2)
    wait_for(lambda: rig.ends("run-2"))
    assert len(rig.desk.events("run-1")) == num_events
    assert rig.ends("run-1") == []
    wait_for(lambda: rig.stats().incarnation == 2 and rig.stats().num_steps > 0)
    assert rig.stats().generated_tokens <= 4, "a new incarnation counts from nothing"


def test_a_step_in_flight_is_told_while_it_runs(rig: Rig) -> None:
    rig.runner.gate = threading.Event()
    rig.call("run-1", b"abc", max_tokens=2)
    wait_for(lambda: rig.stats().step_age_seconds > 0.5)
    assert rig.stats().ready, "a first step may take long"
    rig.runner.gate.set()
    wait_for(lambda: rig.ends("run-1"))
    wait_for(lambda: rig.stats().step_age_seconds == 0.0)


def test_an_idle_engine_checks_its_accounts_and_leaves_when_they_are_wrong(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        rig = Rig(valkey, Desk(client))
        rig.start()
        rig.call("run-1", b"abc", max_tokens=2)
        wait_for(lambda: rig.ends("run-1"))
        rig.engine._cache._pool._free.pop()
        rig.join()
        assert isinstance(rig.failure, IntegrityError)
        assert rig.desk.lease() is None


def test_an_idle_engine_lets_go_of_pins_that_run_out(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.loop.IDLE_CHECK_SECONDS", 0.05)
    monkeypatch.setattr("workers.gaps._TOOL_SECONDS", 2.5)
    rig.desk.create("run-1")
    prompt = list(b"a prompt that fills more than one page of sixty-four tokens, and some more")
    submit = fake_submit("run-1", prompt, max_tokens=2, session="s", agent="a", expects="search")
    rig.desk.send(msgspec.structs.replace(submit, digest="d1", incarnation=1))
    wait_for(lambda: rig.stats().num_pinned_pages > 0)
    wait_for(lambda: rig.stats().num_pinned_pages == 0)
    assert rig.ends("run-1") and rig.failure is None


def test_a_broken_thread_ends_the_engine_and_its_turns(valkey: ValkeyServer) -> None:
    with valkey.client() as client:
        rig = Rig(valkey, Desk(client))
        rig.start()
        rig.runner.seconds = 0.02
        rig.call("run-1", b"abc", max_tokens=900)
        wait_for(lambda: len(rig.desk.events("run-1")) > 2)
        rig.engine.stats = lambda: None  # type: ignore[method-assign, assignment, return-value]
        rig.join()
        assert isinstance(rig.failure, BusError) and "lease" in str(rig.failure)
        (end,) = rig.ends("run-1")
        assert isinstance(end, Failed) and (end.error, end.retryable) == ("engine_failed", True)


@pytest.mark.parametrize(
    ("age", "predicted", "is_ready"),
    [
        (0.0, None, True),
        (50.0, None, True),
        (61.0, None, False),
        (4.0, 0.1, True),
        (5.5, 0.1, False),
        (20.0, 3.0, True),
        (31.0, 3.0, False),
    ],
)
def test_a_step_is_stuck_after_ten_times_its_prediction(
    age: float, predicted: float | None, is_ready: bool
) -> None:
    assert (why_stuck(age, predicted) == "") is is_ready
