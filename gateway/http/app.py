"""The gateway's web application: its parts and routes. The index of the room's HTTP side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from aiohttp import web

from gateway.callers.tokens import TokenStore
from gateway.flow.directory import Directory
from gateway.runs.runs import Runs
from gateway.settings import GatewaySettings
from gateway.text.prompts import PromptLibrary
from metrics.instruments import Instruments

from .chat import post_chat
from .completions import post_completion
from .health import get_health, get_ready
from .metrics_page import DIRECTORY, INSTRUMENTS, RUNS, count_response, get_metrics
from .middleware import MIDDLEWARES, name_response
from .models import get_model, get_models
from .sessions import post_cancel
from .state import STATE, Followers, State
from .stream import get_run


def build_app(
    settings: GatewaySettings,
    runs: Runs,
    directory: Directory,
    tokens: TokenStore,
    *,
    instruments: Instruments | None = None,
    is_bus_up: Callable[[], bool] = lambda: True,
) -> web.Application:
    """The application. Run it with `handler_cancellation=True`: that is how a leaving client is noticed.

    `instruments`: None leaves /metrics out.
    """
    app = web.Application(middlewares=MIDDLEWARES, client_max_size=settings.body_limit_bytes)
    library = PromptLibrary(normalises=settings.normalise_prompts)
    app[STATE] = State(settings, runs, directory, tokens, Followers(runs), is_bus_up, library)
    app.add_routes(
        [
            web.post("/v1/chat/completions", post_chat),
            web.get("/v1/chat/completions/{id}", get_run),
            web.post("/v1/completions", post_completion),
            web.get("/v1/completions/{id}", get_run),
            web.post("/v1/sessions/{session}/cancel", post_cancel),
            web.get("/v1/models", get_models),
            web.get("/v1/models/{model:.+}", get_model),
            web.get("/health", get_health),
            web.get("/ready", get_ready),
        ]
    )
    if instruments is not None:
        app[DIRECTORY], app[RUNS], app[INSTRUMENTS] = directory, runs, instruments
        app.router.add_get("/metrics", get_metrics)
        app.on_response_prepare.append(count_response)
    app.on_response_prepare.append(name_response)
    app.cleanup_ctx.append(_finish_cancels)
    return app


async def _finish_cancels(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[STATE].followers.close()
