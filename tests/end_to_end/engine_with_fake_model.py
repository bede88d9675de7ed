"""An engine process without a model, for tests that need signals: `python -m ...engine_with_fake_model`."""

from __future__ import annotations

import sys
import time

from kvcache.cache import Cache
from tests.fakes import FakeClock, FakeModel, FakeRunner, fake_rules
from tests.workers.test_bus import BUNDLE, INFO
from workers.engine import Engine
from workers.loop import Parts
from workers.plan import StepPlan, StepResult
from workers.process import run_engine
from workers.settings import EngineSettings, load_settings

NUM_PAGES = 64
LOAD_SECONDS = {"slow-to-load": 30.0}
STEP_SECONDS = {"stuck": 60.0}


class PacedRunner(FakeRunner):
    """Takes 20 ms a step, or much more."""

    seconds = 0.02

    def run(self, plan: StepPlan) -> StepResult:
        time.sleep(self.seconds)
        return super().run(plan)


def load(settings: EngineSettings) -> Parts:
    """The setting `model` says what goes wrong."""
    time.sleep(LOAD_SECONDS.get(settings.model or "", 0.0))
    runner = PacedRunner(NUM_PAGES, FakeClock(), page_tokens=64, model=FakeModel(end_every=0))
    runner.seconds = STEP_SECONDS.get(settings.model or "", 0.02)
    engine = Engine(runner, Cache(NUM_PAGES), fake_rules(), num_workers=4)
    return Parts(engine, INFO, BUNDLE)


if __name__ == "__main__":
    sys.stdout.write("ready to load\n")
    sys.stdout.flush()
    sys.exit(run_engine(load_settings(None, {}), load))
