"""The gateway's web application: its parts. Its paths are in routes.py, the index of the HTTP side."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from aiohttp import web

from gateway.aliases import parse_aliases
from gateway.audit import AUDIT_FILE, AuditLog
from gateway.callers.tokens import TokenStore
from gateway.flow.directory import Directory
from gateway.runs.runs import Runs
from gateway.settings import GatewaySettings
from gateway.store.store import Store
from gateway.text.prompts import PromptLibrary
from metrics.instruments import Instruments

from .continuing import ChatTalk
from .metrics_page import DIRECTORY, INSTRUMENTS, RUNS, count_response
from .middleware import MIDDLEWARES, name_response
from .openapi import DESCRIPTION, Description
from .responses.background import keep_background
from .route import mount
from .routes import ROUTES
from .state import STATE, Followers, State


@dataclass(frozen=True, slots=True)
class Parts:
    """What the application is put together from, each with a life of its own."""

    runs: Runs
    directory: Directory
    tokens: TokenStore
    instruments: Instruments
    store: Store
    is_bus_up: Callable[[], bool] = lambda: True


def build_app(settings: GatewaySettings, parts: Parts) -> web.Application:
    """The application. Run it with `handler_cancellation=True`: that is how a leaving client is noticed.

    The audit log is in the settings' home folder; without one there is none.
    """
    app = web.Application(middlewares=MIDDLEWARES, client_max_size=settings.body_limit_bytes)
    library = PromptLibrary(normalises=settings.normalise_prompts)
    aliases = parse_aliases(settings.aliases)
    parts.runs.talk = ChatTalk(parts.directory, library, aliases)
    app[STATE] = State(
        settings,
        parts.runs,
        parts.directory,
        parts.tokens,
        Followers(parts.runs),
        parts.is_bus_up,
        library,
        parts.store,
        aliases=aliases,
        audit=_audit_log(settings),
    )
    app[DIRECTORY], app[RUNS], app[INSTRUMENTS] = parts.directory, parts.runs, parts.instruments
    mount(app, ROUTES)
    app[DESCRIPTION] = Description(ROUTES)
    app.on_response_prepare.append(count_response)
    app.on_response_prepare.append(name_response)
    app.cleanup_ctx.append(_finish)
    app.cleanup_ctx.append(keep_background)
    return app


def _audit_log(settings: GatewaySettings) -> AuditLog | None:
    return AuditLog(settings.home / AUDIT_FILE, settings.audit_file_bytes) if settings.home else None


async def _finish(app: web.Application) -> AsyncIterator[None]:
    yield
    state = app[STATE]
    await state.followers.close()
    if state.audit is not None:
        await state.audit.close()
