"""GET /metrics, the only exposition: the gateway's instruments, and the engines' figures from the bus."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.flow.directory import Directory, EngineView
from gateway.runs.runs import Run, Runs
from metrics.engine_figures import EngineSample
from metrics.exposition import CONTENT_TYPE, render
from metrics.instruments import NOBODY, Instruments, TurnSample
from workers.messages import Cancelled, Failed, Finished, TurnEnd

INSTRUMENTS = web.AppKey("instruments", Instruments)
DIRECTORY = web.AppKey("directory", Directory)
RUNS = web.AppKey("runs", Runs)


async def get_metrics(request: web.Request) -> web.Response:
    """Every series in Prometheus's text format."""
    instruments = request.app[INSTRUMENTS]
    engines = request.app[DIRECTORY].engines()
    instruments.observe_engines({view.info.engine_id: engine_sample(view) for view in engines})
    runs = request.app[RUNS]
    instruments.observe_runs(num_live=runs.num_live, num_waiting=runs.num_waiting)
    return web.Response(body=render(instruments.registry), headers={"Content-Type": CONTENT_TYPE})


async def count_response(request: web.Request, response: web.StreamResponse) -> None:
    """For `on_response_prepare`: once for each response, streams and errors too."""
    request.app[INSTRUMENTS].observe_response(response.status)


def turn_observer(instruments: Instruments) -> Callable[[Run], None]:
    """For `Runs.on_turn_end`: counts the turn that just ended."""

    def on_turn_end(run: Run) -> None:
        if run.state.turn_end is not None:
            instruments.observe_turn(run.state.engine_id or NOBODY, turn_sample(run, run.state.turn_end))

    return on_turn_end


def turn_sample(run: Run, event: TurnEnd) -> TurnSample:
    """A terminal event as the instruments take it. Waits as measured here; those of a call that came to
    another gateway as the engine measured them, without that gateway's line.
    """
    match event:
        case Finished(reason=reason):
            pass
        case Cancelled():
            reason = "cancelled"
        case Failed(error=error):
            reason = f"failed_{error}"
    usage, timings = event.usage, event.timings
    queued, first = run.queue_seconds, run.first_token_seconds
    return TurnSample(
        reason=reason,
        worker=timings.worker,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.completion_tokens,
        queue_seconds=timings.queue_seconds if queued is None else queued,
        first_token_seconds=timings.queue_seconds + timings.prefill_seconds if first is None else first,
        prefill_seconds=timings.prefill_seconds,
        decode_seconds=timings.decode_seconds,
    )


def engine_sample(view: EngineView) -> EngineSample:
    """An engine as last seen; a dead one runs nothing."""
    info, stats = view.info, view.stats
    return EngineSample(
        incarnation=info.incarnation,
        is_up=view.alive,
        is_ready=view.alive and stats.ready,
        num_workers=info.num_workers,
        num_running=stats.num_running if view.alive else 0,
        num_waiting=stats.num_waiting if view.alive else 0,
        num_pages=info.kv.num_pages,
        num_free_pages=stats.num_free_pages,
        num_tree_pages=stats.num_tree_pages,
        num_live_pages=stats.num_live_pages,
        num_tree_nodes=stats.num_tree_nodes,
        num_evicted_pages=stats.num_evicted_pages,
        prompt_tokens_computed=stats.prompt_tokens_computed,
        prompt_tokens_cached=stats.prompt_tokens_cached,
        generated_tokens=stats.generated_tokens,
        num_steps=stats.num_steps,
        num_preempted=stats.num_preempted,
        step_age_seconds=stats.step_age_seconds,
        active_memory_bytes=stats.active_memory_bytes,
        peak_memory_bytes=stats.peak_memory_bytes,
        kv_bytes_per_token=info.kv.bytes_per_token,
        kv_pool_bytes=info.kv.pool_bytes,
        num_pinned_pages=stats.num_pinned_pages,
        num_states=info.states.num_states if info.states is not None else 0,
        num_free_states=stats.num_free_states,
        num_small_states=info.states.num_small_states if info.states is not None else 0,
        num_free_small_states=stats.num_free_small_states,
        num_checkpoints=stats.num_checkpoints,
        num_restored=stats.num_restored,
        num_evicted_states=stats.num_evicted_states,
        state_bytes=info.states.total_bytes if info.states is not None else 0,
        missed_tokens=stats.missed_tokens,
        num_derailed=stats.num_derailed,
    )
