"""The page that Prometheus scrapes: valid text, every figure, no prompt text, over a real socket."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from gateway.flow.directory import EngineView
from gateway.flow.places import Order
from gateway.http.metrics_page import (
    DIRECTORY,
    INSTRUMENTS,
    RUNS,
    count_response,
    get_metrics,
    turn_observer,
    turn_sample,
)
from gateway.runs.run import Run
from gateway.runs.state import RunState
from metrics.exposition import CONTENT_TYPE
from metrics.instruments import Instruments
from workers.messages import (
    Cancelled,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    KVFacts,
    Sampling,
    StateFacts,
    Timings,
    TokenizerBundle,
    TurnEnd,
    Usage,
)

from .fake_runs import FakeRuns, words

KV = KVFacts(dtype="int8", bytes_per_token=12240.0, page_tokens=64, num_pages=100, pool_bytes=78_336_000)
USAGE = Usage(prompt_tokens=100, cached_tokens=80, completion_tokens=11)
TIMINGS = Timings(worker=1, queue_seconds=0.5, prefill_seconds=0.1, decode_seconds=1.0)


class BusyRuns(FakeRuns):
    """Five calls, three of them in line."""

    num_live = 5
    num_waiting = 3


@dataclass
class FakeDirectory:
    """Stands for the directory: a list of engines, no bus."""

    views: list[EngineView] = field(default_factory=list)

    def engines(self) -> list[EngineView]:
        return self.views


def an_engine(engine_id: str = "e0", *, alive: bool = True) -> EngineView:
    info = EngineInfo(
        engine_id=engine_id,
        incarnation=3,
        model_id="a model",
        digest="d",
        context_length=8192,
        num_workers=4,
        vocab_size=10,
        kv=KV,
        device="cpu",
        weights="float32",
        blas="openblas",
        created=1,
        states=StateFacts(dtype="float32", bytes_per_state=10, num_states=32, total_bytes=360),
    )
    stats = EngineStats(
        incarnation=3,
        ready=True,
        num_running=2,
        num_free_pages=60,
        num_evicted_pages=5,
        num_checkpoints=7,
        num_restored=9,
        missed_tokens={"diverged": 1200},
        num_derailed={"token_cycle": 3},
    )
    bundle = TokenizerBundle(tokenizer_json=b"{}", chat_template="")
    return EngineView(info=info, stats=stats, alive=alive, tokenizer=bundle)


async def get_busy(_request: web.Request) -> web.Response:
    raise web.HTTPTooManyRequests


def app_with(instruments: Instruments, *views: EngineView) -> web.Application:
    app = web.Application()
    app[INSTRUMENTS] = instruments
    app[DIRECTORY] = FakeDirectory(list(views))  # type: ignore[misc]
    app[RUNS] = BusyRuns(words())
    app.on_response_prepare.append(count_response)
    app.router.add_get("/metrics", get_metrics)
    app.router.add_get("/busy", get_busy)
    return app


async def scrape(instruments: Instruments, *views: EngineView) -> str:
    async with TestClient(TestServer(app_with(instruments, *views))) as client:
        assert (await client.get("/busy")).status == 429
        assert (await client.get("/nowhere")).status == 404
        response = await client.get("/metrics")
        assert response.status == 200
        assert response.headers["Content-Type"] == CONTENT_TYPE
        return await response.text()


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def busy_instruments() -> Instruments:
    instruments = Instruments()
    observe = turn_observer(instruments)
    ends: list[TurnEnd] = [
        Finished(reason="stop", usage=USAGE, timings=TIMINGS, stop_text="SECRET"),
        Finished(reason="length", usage=USAGE, timings=TIMINGS),
        Cancelled(usage=USAGE, timings=TIMINGS),
        Failed(error="engine_lost", message="SECRET"),
    ]
    for end in ends:
        observe(Run("run-1", RunState(engine_id="e0", turn_end=end), order=None))
    return instruments


async def test_the_page_parses_and_shows_turns_engines_and_responses() -> None:
    seen = values(await scrape(busy_instruments(), an_engine("e0"), an_engine("e1", alive=False)))

    def value(name: str, **labels: str) -> float:
        return seen[(f"tetrarch_{name}", frozenset(labels.items()))]

    assert value("turns_total", engine="e0", worker="1", reason="stop") == 1
    assert value("turns_total", engine="e0", worker="1", reason="cancelled") == 1
    assert value("turns_total", engine="e0", worker="none", reason="failed_engine_lost") == 1
    assert value("worker_decode_tokens_per_second", engine="e0", worker="1", quantile="0.5") == 10.0
    assert value("turn_prompt_tokens_computed_total", engine="e0", worker="1") == 60
    assert value("turn_prompt_tokens_cached_total", engine="e0", worker="1") == 240
    assert value("engine_up", engine="e0") == 1
    assert value("engine_up", engine="e1") == 0
    assert value("engine_ready", engine="e1") == 0
    assert value("engine_turns_running", engine="e1") == 0
    assert value("engine_kv_bytes_per_token", engine="e0") == 12240
    assert value("engine_pages_free", engine="e0") == 60
    assert value("engine_pages_evicted_total", engine="e0") == 5
    assert value("engine_states", engine="e0") == 32
    assert value("engine_checkpoints", engine="e0") == 7
    assert value("engine_turns_restored_total", engine="e0") == 9
    assert value("missed_tokens_total", engine="e0", cause="diverged") == 1200
    assert value("engine_turns_derailed_total", engine="e0", kind="token_cycle") == 3
    assert value("http_responses_total", status="4xx") == 2
    assert value("http_too_many_requests_total") == 1
    assert value("gateway_runs_live") == 5
    assert value("gateway_runs_waiting") == 3


def an_order() -> Order:
    return Order(engine=an_engine(), token_ids=b"", max_tokens=1, sampling=Sampling())


@pytest.mark.parametrize(("is_ours", "queued", "first"), [(True, 3.0, 4.0), (False, 0.5, 0.6)])
def test_waits_are_measured_from_the_call_where_it_came_in(
    is_ours: bool, queued: float, first: float
) -> None:
    end = Finished(reason="stop", usage=USAGE, timings=TIMINGS)
    run = Run("run-1", RunState(engine_id="e0", turn_end=end), order=an_order() if is_ours else None)
    run.asked_at, run.worker_at, run.token_at = 10.0, 13.0, 14.0
    sample = turn_sample(run, end)
    assert sample.queue_seconds == queued
    assert sample.first_token_seconds == pytest.approx(first)
    assert sample.prefill_seconds == 0.1


async def test_no_text_of_a_turn_is_on_the_page() -> None:
    assert "SECRET" not in await scrape(busy_instruments(), an_engine())


async def test_promtool_finds_nothing_to_complain_about() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: it is in the package prometheus)")
    text = await scrape(busy_instruments(), an_engine())
    checked = subprocess.run(  # noqa: ASYNC221 - a test may wait
        [promtool, "check", "metrics"], input=text.encode(), capture_output=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
