"""One engine: turns in, events out, a step at a time, all on one thread. Knows no bus and no gateway."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import structlog

from kvcache.cache import Cache

from .counters import EngineCounts
from .drafting import Drafter
from .errors import SettingsError, TurnRefused
from .line import LineRules
from .messages import Cancel, CancelAgents, Failed, Note, Pause, Submit
from .pace import Pace, PaceLimits
from .plan import GrammarSource, Runner, StepPlan, StepResult
from .scheduler import Scheduler
from .turn import Turn, TurnEvent, TurnRules, open_turn

log = structlog.get_logger(__name__)


class Engine:
    """Owns scheduler, cache and runner. Any thread may read step_started_at and step_predicted_seconds."""

    def __init__(  # noqa: PLR0913 - the parts of an engine, all but three by keyword
        self,
        runner: Runner,
        cache: Cache,
        rules: TurnRules,
        *,
        num_workers: int = 4,
        limits: PaceLimits | None = None,
        line: LineRules | None = None,
        drafter: Drafter | None = None,
        grammars: GrammarSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool_tokens = cache.stats().num_pages * cache.page_tokens
        if rules.context_length > pool_tokens:
            raise SettingsError(
                f"a context of {rules.context_length} tokens does not fit the pool of {pool_tokens}: "
                "lower context or raise pool_tokens"
            )
        self.step_started_at: float | None = None  # on `clock`; None between steps
        self.step_predicted_seconds: float | None = None  # None: nothing to predict from yet
        self._runner = runner
        self._cache = cache
        self._rules = rules
        self._grammars = grammars
        self._clock = clock
        self._pace = Pace(limits or PaceLimits())
        self._scheduler = Scheduler(cache, self._pace, num_workers=num_workers, rules=line, drafter=drafter)

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return self._scheduler.has_work

    @property
    def rest_seconds(self) -> float:
        """How long step() would find nothing to do although turns wait; usually 0."""
        return self._scheduler.rest_seconds(self._clock())

    @property
    def idle_seconds(self) -> float | None:
        """How long an engine without work may do nothing before `rest` is due; None: until somebody comes."""
        expiry = self._scheduler.pins.next_expiry
        return None if expiry == math.inf else max(expiry - self._clock(), 0.0)

    def rest(self) -> None:
        """Without work: let go of what is held for longer than it should be."""
        self._scheduler.pins.expire(self._clock())

    def submit(self, submit: Submit) -> None:
        """Queue a turn; one that cannot be accepted ends with Failed in the next step's events."""
        try:
            turn = self._open(submit)
        except TurnRefused as refused:
            failed = Failed(error=refused.kind, message=str(refused), retryable=refused.retryable)
            self._scheduler.refuse(submit.run_id, submit.attempt, failed)
        except Exception:  # the border of one turn: ends in its terminal event
            log.exception("a turn could not be opened", run=submit.run_id, attempt=submit.attempt)
            message = "the engine could not take this turn: send it again"
            failed = Failed(error="planning_failed", message=message, retryable=True)
            self._scheduler.refuse(submit.run_id, submit.attempt, failed)
        else:
            self._scheduler.submit(turn, self._clock())

    def _open(self, submit: Submit) -> Turn:
        """Raises TurnRefused."""
        turn = open_turn(submit, self._rules, self._clock())
        if submit.grammar is not None:
            if self._grammars is None:
                raise TurnRefused("grammar_error", "this engine takes no grammars: ask without a schema")
            turn.pending = self._grammars.begin(submit.grammar, turn.generated, self._clock())
        return turn

    def cancel(self, cancel: Cancel) -> None:
        """End a turn now; its Cancelled is among the next step's events."""
        self._scheduler.cancel(cancel, self._clock())

    def pause(self, pause: Pause) -> None:
        """End an attempt now, to be sent on later; its Paused is among the next step's events."""
        self._scheduler.pause(pause, self._clock())

    def note(self, note: Note) -> None:
        """Tell what a gateway has found of a turn among the next step's events."""
        self._scheduler.note(note)

    def cancel_agents(self, cancel: CancelAgents) -> None:
        """End every turn of an agent and of its descendants now."""
        self._scheduler.cancel_agents(cancel, self._clock())

    def step(self) -> list[TurnEvent]:
        """Run one step of all turns; also returns what was told since the step before."""
        plan = self._scheduler.plan(self._clock())
        if plan is not None:
            self._run(plan)
        return self._scheduler.take_events()

    def abandon(self) -> None:
        """Drop all turns silently (the lease was lost) and count from nothing; kept prefixes stay."""
        self._scheduler.abandon(self._clock())

    def check_integrity(self) -> None:
        """Raises an IntegrityError of this room or the cache's. Walks everything: for tests and idle time."""
        self._scheduler.check_integrity()
        self._cache.check_integrity()

    def stats(self) -> EngineCounts:
        """How the engine is doing. On the engine's thread."""
        return self._scheduler.counts()

    def _run(self, plan: StepPlan) -> None:
        self.step_predicted_seconds = self._pace.predicted_step_seconds(plan)
        self.step_started_at = self._clock()
        try:
            result = self._evaluated(plan)
            if result is None:
                self._scheduler.fail_step(self._clock())
                self._runner.rebuild()
            else:
                self._scheduler.commit(plan, result, self._clock())
        finally:
            self.step_started_at = None

    def _evaluated(self, plan: StepPlan) -> StepResult | None:
        """None: the step failed; its exception, whose frames keep the old pools alive, is gone by then."""
        try:
            return self._runner.run(plan)
        except Exception:  # the border of one step: ends in its turns' terminal events
            log.exception("a step failed", runs=self._scheduler.running_ids())
            return None
