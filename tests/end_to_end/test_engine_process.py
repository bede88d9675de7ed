"""One engine process against signals, a supervisor that dies, and its own death. The model is a fake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from tests.conftest import ValkeyServer
from tests.fakes import fake_submit
from tests.workers.test_bus import Desk, wait_for
from workers.messages import Dispatched, Failed, Finished, Tokens, event_id

pytestmark = pytest.mark.end_to_end

ROOT = Path(__file__).parents[2]
LONG = 900


class EngineProcess:
    """Starts `engine_with_fake_model`; its supervisor is this object's end of a pipe."""

    def __init__(self, server: ValkeyServer, model: str = "") -> None:
        self.lines: list[str] = []
        read_end, self._supervisor = os.pipe()
        variables = {
            "TETRARCH_REDIS_URL": server.url,
            "TETRARCH_ENGINE_ID": "left",
            "TETRARCH_MODEL": model,
            "TETRARCH_SUPERVISOR_FD": str(read_end),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.engine_with_fake_model"],
            cwd=ROOT,
            env=os.environ | variables,
            pass_fds=[read_end],
            stdout=subprocess.PIPE,
        )
        os.close(read_end)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready to load\n"

    def lose_supervisor(self) -> None:
        if self._supervisor >= 0:
            os.close(self._supervisor)
            self._supervisor = -1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.lose_supervisor()


class Stage:
    """A bus, a gateway by hand, and the engines that a test starts."""

    def __init__(self, server: ValkeyServer, desk: Desk) -> None:
        self.server = server
        self.desk = desk
        self.engines: list[EngineProcess] = []

    def engine(self, model: str = "") -> EngineProcess:
        engine = EngineProcess(self.server, model)
        self.engines.append(engine)
        return engine

    def serving(self, model: str = "") -> EngineProcess:
        engine = self.engine(model)
        wait_for(lambda: self.desk.lease() == str(self.desk.incarnation()).encode())
        return engine

    def call(self, run_id: str, *, attempt: int = 1, max_tokens: int = LONG) -> None:
        incarnation = self.desk.incarnation()
        self.desk.create(run_id)
        self.desk.write(run_id, event_id(attempt, 1), Dispatched(engine_id="left", incarnation=incarnation))
        submit = fake_submit(run_id, [1, 2, 3], max_tokens=max_tokens, attempt=attempt)
        self.desk.send(msgspec.structs.replace(submit, digest="d1", incarnation=incarnation))

    def last(self, run_id: str) -> object:
        return next(reversed(self.desk.events(run_id).values()), None)

    def is_finished(self, run_id: str) -> bool:
        return isinstance(self.last(run_id), Finished)


@pytest.fixture
def stage(valkey: ValkeyServer) -> Iterator[Stage]:
    with valkey.client() as client:
        stage = Stage(valkey, Desk(client))
        yield stage
        for engine in stage.engines:
            engine.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_running_turns_clearly_and_exits_0(stage: Stage, number: signal.Signals) -> None:
    engine = stage.serving()
    stage.call("run-1")
    wait_for(lambda: len(stage.desk.events("run-1")) > 3)
    engine.process.send_signal(number)
    assert engine.process.wait(5) == 0
    end = stage.last("run-1")
    assert isinstance(end, Failed)
    assert (end.error, end.retryable) == ("engine_stopping", True)
    assert stage.desk.lease() is None
    assert stage.desk.num_inbox_entries() == 0


def test_it_ends_with_its_supervisor(stage: Stage) -> None:
    engine = stage.serving()
    engine.lose_supervisor()
    assert engine.process.wait(5) == 0
    assert stage.desk.lease() is None


@pytest.mark.parametrize("how", ["signal", "supervisor"])
def test_a_stop_while_the_model_loads_needs_no_patience(stage: Stage, how: str) -> None:
    engine = stage.engine("slow-to-load")
    time.sleep(0.5)
    if how == "signal":
        engine.process.send_signal(signal.SIGTERM)
    else:
        engine.lose_supervisor()
    assert engine.process.wait(5) == 0


def test_a_stuck_step_does_not_hold_the_exit(stage: Stage) -> None:
    engine = stage.serving("stuck")
    stage.call("run-1")
    time.sleep(0.5)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(25) == 1


def test_sleep_longer_than_the_lease_starts_a_new_incarnation_and_repeats_no_token(stage: Stage) -> None:
    engine = stage.serving()
    stage.call("run-1")
    wait_for(lambda: len(stage.desk.events("run-1")) > 3)
    engine.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: stage.desk.lease() is None)
    verdict = Failed(error="engine_lost", message="", retryable=True)
    stage.desk.write("run-1", "2-1", verdict)
    before = stage.desk.events("run-1")
    engine.process.send_signal(signal.SIGCONT)
    wait_for(lambda: stage.desk.lease() == b"2")
    stage.call("run-2", max_tokens=5)
    wait_for(lambda: stage.is_finished("run-2"))
    assert stage.desk.events("run-1") == before
    assert stage.last("run-1") == verdict


def test_after_kill_9_the_next_start_serves(stage: Stage) -> None:
    engine = stage.serving()
    stage.call("run-1")
    wait_for(lambda: len(stage.desk.events("run-1")) > 3)
    engine.process.kill()
    engine.process.wait()
    stage.engine()
    wait_for(lambda: stage.desk.lease() == b"2")
    stage.call("run-2", max_tokens=5)
    wait_for(lambda: stage.is_finished("run-2"))
    assert all(not isinstance(event, Finished) for event in stage.desk.events("run-1").values())


def test_a_bus_that_is_killed_under_four_turns_costs_no_token(own_valkey: ValkeyServer) -> None:
    with own_valkey.client() as client:
        stage = Stage(own_valkey, Desk(client))
        try:
            stage.serving()
            runs = [f"run-{number}" for number in range(4)]
            for run_id in runs:
                stage.call(run_id, max_tokens=200)
            time.sleep(1.5)  # the dispatches are on disk
            own_valkey.kill()
            time.sleep(0.5)
            own_valkey.start()
            for run_id in runs:
                wait_for(partial(stage.is_finished, run_id), 20)
                events = stage.desk.events(run_id)
                assert [int(key.partition("-")[2]) for key in events] == list(range(2, 2 + len(events)))
                num_tokens = sum(len(e.token_ids) // 4 for e in events.values() if isinstance(e, Tokens))
                assert num_tokens == 200
            assert stage.desk.incarnation() == 1
        finally:
            for engine in stage.engines:
                engine.close()
