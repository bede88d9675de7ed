"""The engine over a runner with page memory, against a naive generator that runs each turn alone."""

from __future__ import annotations

import codecs
from array import array
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.cache import Cache
from tests.fakes import END_ID, FakeClock, FakeModel, FakeRunner, fake_rules, fake_submit
from tests.workers.engine_bench import resumed
from workers import cuts, leaving, line, misses, sharing
from workers.engine import Engine
from workers.messages import (
    Cancel,
    CancelAgents,
    Event,
    Failed,
    Finished,
    Pause,
    Paused,
    Progress,
    Sampling,
    Started,
    Submit,
    Tokens,
    TurnEnd,
)
from workers.pace import PaceLimits

PAGE_TOKENS = 4
SMALL = (
    (cuts, "MIN_SHARED_TOKENS", 4),
    (cuts, "_MERGE_TOKENS", 3),
    (sharing, "MIN_SHARED_TOKENS", 4),
    (leaving, "MIN_BORDER_TOKENS", 2),
    (line, "_RIVAL_TOKENS", 6),
    (misses, "MIN_MISSED_TOKENS", 3),
    (misses, "_NEAR_TOKENS", 2),
)
"""What is worth a checkpoint, a wait or a word in these small contexts."""
HINTS = st.fixed_dictionaries(
    {},
    optional={
        "session": st.sampled_from(["", "s", "s"]),
        "parent": st.sampled_from(["a", "b"]),
        "expects": st.sampled_from(["", "search"]),
        "is_final": st.booleans(),
        "retain": st.sampled_from(["session", "ephemeral", "pin"]),
        "fork_tokens": st.integers(0, 9),
        "system_tokens": st.integers(0, 9),
        "turn_tokens": st.integers(0, 20),
        "explain": st.booleans(),
    },
)
HOLDS = st.sampled_from([0.0, 1.0, 100.0, 600.0])
STOPS = ((), ("ab",), ("é", "cab"), ("abc", "b"))


class Injected(Exception):
    """What a test breaks a call with."""


class FaultyCache(Cache):
    """A cache whose next call of one kind raises before it changes anything."""

    faulty: str | None = None  # the method

    def _break(self, name: str) -> None:
        if self.faulty == name:
            self.faulty = None
            raise Injected(name)


def _breaking(name: str) -> Callable[..., Any]:
    def method(self: FaultyCache, *args: Any, **settings: Any) -> Any:
        self._break(name)
        return getattr(Cache, name)(self, *args, **settings)

    return method


FAULTY_METHODS = (
    "open",
    "probe",
    "reserve",
    "commit",
    "publish",
    "close",
    "poison",
    "evict",
    "kept",
    "pin",
    "unpin",
    "retire",
    "drop",
    "reserve_state",
    "drop_state",
    "keep_state",
)
for _name in FAULTY_METHODS:
    setattr(FaultyCache, _name, _breaking(_name))


class Engines(RuleBasedStateMachine):
    """Random arrivals, pauses, cancels, faults and failed steps over a small pool."""

    @initialize(
        num_pages=st.sampled_from([8, 12, 16, 40]),
        num_workers=st.integers(1, 4),
        max_rows=st.sampled_from([3, 8, 64]),
        keep_prefixes=st.sampled_from([True, True, True, False]),
        num_states=st.sampled_from([None, 0, 1, 2, 4, 4, 16]),
        num_small_states=st.sampled_from([0, 1, 3, 16]),
    )
    def start(
        self,
        num_pages: int,
        num_workers: int,
        max_rows: int,
        keep_prefixes: bool,
        num_states: int | None,
        num_small_states: int,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        for module, name, value in SMALL:
            self.patch.setattr(module, name, value)
        self.context_length = min(num_pages * PAGE_TOKENS, 48)
        self.model = FakeModel(b"ab\xc3\xa9c", end_every=30)
        clock = FakeClock()
        self.runner = FakeRunner(
            num_pages,
            clock,
            page_tokens=PAGE_TOKENS,
            model=self.model,
            num_states=num_states,
            num_small_states=num_small_states,
        )
        self.cache = FaultyCache(
            num_pages,
            page_tokens=PAGE_TOKENS,
            keep_prefixes=keep_prefixes,
            num_states=num_states,
            num_small_states=num_small_states,
        )
        self.engine = Engine(
            self.runner,
            self.cache,
            fake_rules(context_length=self.context_length),
            num_workers=num_workers,
            limits=PaceLimits(min_rows=2, min_idle_rows=3, max_rows=max_rows),
            clock=clock,
        )
        self.clock = clock
        self.submits: dict[str, list[Submit]] = {}  # a run's attempts, which go on from each other
        self.events: dict[str, list[Event]] = defaultdict(list)  # of all its attempts
        self.attempts: dict[tuple[str, int], list[Event]] = defaultdict(list)
        self.answers: list[list[int]] = [[]]

    @rule(
        head=st.sampled_from([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 9) * 4]),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=9),
        answer=st.integers(0, 50),
        max_tokens=st.sampled_from([1, 5, 12, 30, 50]),
        seed=st.sampled_from([None, None, 1, 2]),
        stop=st.sampled_from(STOPS),
        ignore_eos=st.booleans(),
        tenant=st.sampled_from(["", "", "other"]),
        agent=st.sampled_from(["", "a", "a", "b", "c", "d"]),
        hints=HINTS,
    )
    def submit(
        self,
        head: tuple[int, ...],
        tail: list[int],
        answer: int,
        max_tokens: int,
        seed: int | None,
        stop: tuple[str, ...],
        ignore_eos: bool,
        tenant: str,
        agent: str,
        hints: dict[str, Any],
    ) -> None:
        run_id = f"run{len(self.submits)}"
        history = self.answers[answer % len(self.answers)]
        sampling = Sampling(temperature=0.0 if seed is None else 1.0, seed=seed)
        submit = fake_submit(
            run_id,
            [*head, *history, *tail],
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
            tenant=tenant,
            agent=agent,
            **hints,
        )
        self.submits[run_id] = [submit]
        self.engine.submit(submit)

    @rule(session=st.sampled_from(["", "s"]), agent=st.sampled_from(["", "a", "b", "c"]))
    def cancel_agents(self, session: str, agent: str) -> None:
        self.engine.cancel_agents(CancelAgents(session=session, agent=agent))

    @rule(method=st.sampled_from(FAULTY_METHODS), num_steps=st.integers(1, 3))
    def steps_with_a_cache_that_breaks(self, method: str, num_steps: int) -> None:
        self.cache.faulty = method
        for _ in range(num_steps):
            self._step()
        self.cache.faulty = None

    @rule(seconds=st.sampled_from([1.0, 70.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.submits)
    @rule(index=st.integers(0, 100))
    def cancel(self, index: int) -> None:
        submit = self._recent(index)
        self.engine.cancel(Cancel(run_id=submit.run_id, attempt=submit.attempt))

    @precondition(lambda self: self.submits)
    @rule(index=st.integers(0, 100), hold_seconds=HOLDS)
    def pause_what_may_be_over(self, index: int, hold_seconds: float) -> None:
        submit = self._recent(index)
        self.engine.pause(Pause(run_id=submit.run_id, attempt=submit.attempt, hold_seconds=hold_seconds))

    @precondition(lambda self: self._at_work())
    @rule(index=st.integers(0, 100), hold_seconds=HOLDS, num_steps=st.integers(0, 6))
    def pause(self, index: int, hold_seconds: float, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()
        if at_work := self._at_work():
            submit = at_work[-1 - index % len(at_work)]
            self.engine.pause(Pause(run_id=submit.run_id, attempt=submit.attempt, hold_seconds=hold_seconds))
            self._step()

    @precondition(lambda self: self._paused())
    @rule(index=st.integers(0, 100), num_steps=st.integers(0, 6))
    def resume(self, index: int, num_steps: int) -> None:
        paused = self._paused()
        before = paused[-1 - index % len(paused)]
        submit = resumed(before, self._token_ids(self.events[before.run_id]))
        self.submits[submit.run_id].append(submit)
        self.engine.submit(submit)
        for _ in range(num_steps):
            self._step()

    def _recent(self, index: int) -> Submit:
        """The last attempt of one of the runs, the newest first."""
        return list(self.submits.values())[-1 - index % len(self.submits)][-1]

    def _at_work(self) -> list[Submit]:
        """Last attempts that have not ended."""
        last = [attempts[-1] for attempts in self.submits.values()]
        return [one for one in last if not any(isinstance(e, TurnEnd) for e in self._told(one))]

    def _paused(self) -> list[Submit]:
        """Last attempts that others may follow."""
        last = [attempts[-1] for attempts in self.submits.values()]
        return [one for one in last if any(isinstance(e, Paused) for e in self._told(one))]

    def _told(self, submit: Submit) -> list[Event]:
        return self.attempts[submit.run_id, submit.attempt]

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @rule(worker=st.sampled_from([0, 1, 2, 3, None, None, None, None]), are_rows_spoiled=st.booleans())
    def step_with_a_faulty_row(self, worker: int | None, are_rows_spoiled: bool) -> None:
        self.runner.are_rows_spoiled = are_rows_spoiled
        self.runner.fault_of = lambda segment: "not a number" if segment.worker == worker else None
        self._step()
        self.runner.fault_of = lambda segment: None

    @rule(error=st.sampled_from([RuntimeError("gone"), KeyError("no"), None, None, None, None]))
    def step_that_fails(self, error: Exception | None) -> None:
        self.runner.fail_next = error
        self._step()
        self.runner.fail_next = None

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self._come_to_an_end()
        finally:
            self.patch.undo()

    def _come_to_an_end(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work, "the engine does not come to an end"
        counts = self.engine.stats()
        assert (counts.num_running, counts.num_waiting, counts.num_live_pages) == (0, 0, 0)
        for run_id, attempts in self.submits.items():
            self._check_run(attempts[0], self.events[run_id])
            for attempt in attempts:
                self._check_attempt(self._told(attempt))
        self.engine.cancel_agents(CancelAgents(session="s"))
        for run_id in self.submits:
            self.engine.cancel(Cancel(run_id=run_id, attempt=1))
        self.clock.advance(4000.0)
        self.engine.rest()
        assert self.engine.stats().num_pinned_pages == 0

    def _step(self) -> None:
        self.clock.advance(self.engine.rest_seconds)
        for told in self.engine.step():
            self.events[told.run_id].append(told.event)
            self.attempts[told.run_id, told.attempt].append(told.event)
            if isinstance(told.event, Finished):
                self.answers.append(self._token_ids(self.events[told.run_id])[:20])
        self.engine.check_integrity()

    def _token_ids(self, events: list[Event]) -> list[int]:
        return list(array("I", b"".join(event.token_ids for event in events if isinstance(event, Tokens))))

    def _check_run(self, submit: Submit, events: list[Event]) -> None:
        end = events[-1]
        assert isinstance(end, TurnEnd), "no terminal event"
        sent = self._token_ids(events)
        text = "".join(event.text for event in events if isinstance(event, Tokens))
        assert end.usage.completion_tokens == len(sent)
        if isinstance(end, Failed) and end.error == "context_exceeded":
            assert len(submit.token_ids) // 4 >= self.context_length
            return
        expected, expected_text, reason = self._naive(submit)
        if isinstance(end, Finished):
            assert (sent, text, end.reason) == (expected, expected_text, reason), submit
            return
        assert expected[: len(sent)] == sent
        if isinstance(end, Failed):
            assert end.error in (
                "row_fault",
                "step_failed",
                "planning_failed",
                "cancel_failed",
                "pause_failed",
            )
        if isinstance(end, Failed | Paused):
            assert expected_text.startswith(text), (expected_text, text)

    def _check_attempt(self, events: list[Event]) -> None:
        assert [isinstance(event, TurnEnd) for event in events[-2:]] in ([True], [False, True])
        assert sum(isinstance(event, TurnEnd) for event in events) == 1
        kinds = [type(event) for event in events[:-1]]
        order = [Started, Progress, Tokens]
        assert kinds == sorted(kinds, key=order.index) and kinds.count(Started) <= 1

    def _naive(self, submit: Submit) -> tuple[list[int], str, str]:
        num_tokens = min(submit.max_tokens, self.context_length - len(submit.token_ids) // 4)
        generated = self.model.generate(submit, num_tokens)
        if END_ID in generated and not submit.ignore_eos:
            generated, reason = generated[: generated.index(END_ID)], "stop"
        else:
            reason = "length"
        for end in range(len(generated) + 1):
            certain = codecs.getincrementaldecoder("utf-8")("replace")
            text = certain.decode(bytes(token_id for token_id in generated[:end] if token_id != END_ID))
            found = [stop for stop in submit.stop if text.endswith(stop)]
            if found:
                return generated[:end], text[: -len(max(found, key=len))], "stop"
        whole = bytes(token_id for token_id in generated if token_id != END_ID).decode(errors="replace")
        return generated, whole, reason


TestEngines = Engines.TestCase
