"""One row of the API's table: what a path takes and gives, and what it asks of its caller.

Knows no endpoint; routes.py holds the rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute

from gateway.callers.scopes import Scope

from .shapes import ErrorBody

Call = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter or header that a route reads. Those of the path come from `Route.path`."""

    name: str
    about: str
    type: Any = str
    where: Literal["query", "header"] = "query"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A row. Types are msgspec structs, unions of them, or what else msgspec can describe as JSON schema.

    `path` is aiohttp's (`/v1/runs/{id}/cancel`). `scope` is what the caller must have (callers/scopes.py).
    `verb` names it in the audit log; "" for what controls nothing. `body`: the type of the JSON body; None:
    it takes none. `answers`: the body's type, or a tuple of types, for each status of success; None: no body.
    `events`: what the data of a server-sent event may be, where the answer may be such a stream (of status
    200); `last_data`: the text that ends one. `error`: the type of the body of any failure, where that is not
    OpenAI's.

    Each API's module holds its rows as a tuple; routes.py joins them:

        ROUTES = (
            Route(
                method="POST",
                path="/v1/runs/{id}/cancel",
                call=post_cancel,
                scope="control",
                verb="cancel",
                summary="Ends a run, or its whole tree.",
                body=CancelRequest,
                answers={200: CancelAnswer},
            ),
            Route(
                method="GET",
                path="/v1/runs/{id}/events",
                call=get_events,
                scope="read",
                summary="The run's events, from the start or after one of them.",
                answers={},
                events=(PublicEvent,),
                parameters=(Parameter("after", "Id of the last event that was seen."),),
            ),
        )
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    call: Call
    scope: Scope
    summary: str
    verb: str = ""
    body: Any = None
    error: Any = ErrorBody
    is_body_optional: bool = False
    answers: Mapping[int, Any] = field(default_factory=lambda: {200: dict[str, Any]})
    events: tuple[Any, ...] = ()
    last_data: str | None = None
    parameters: tuple[Parameter, ...] = ()
    media: str = JSON  # of the answers
    is_limited: bool = True  # whether a token's calls per minute count it


MOUNTED = web.AppKey("mounted", dict[AbstractRoute, Route])


def mount(app: web.Application, routes: Iterable[Route]) -> None:
    """Adds the rows to the application. Where GET is, HEAD is too."""
    mounted: dict[AbstractRoute, Route] = {}
    for route in routes:
        resource = app.router.add_resource(route.path)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            mounted[resource.add_route(method, route.call)] = route
    app[MOUNTED] = mounted


def route_of(request: web.Request) -> Route | None:
    """The row that answers the request; None where no path or method fits."""
    return request.app[MOUNTED].get(request.match_info.route)
