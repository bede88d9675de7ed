"""GET /openapi.json: the table of routes as an OpenAPI document, its schemas out of the routes' own structs.

Knows no endpoint. Built once; callers that have it are told so by its ETag.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from .api import HIDDEN, INSTEAD, CommonRequest
from .route import JSON, Route

Object = dict[str, Any]

ABOUT = """\
Multi-agent inference for long contexts. Errors are told in the words of the API that was called, and
`x-should-retry` says whether the same call may work later. Unknown fields are ignored where a schema does
not forbid them, and null means absent. Every answer names its request in `x-request-id`. The schema of a
`text/event-stream` is that of each of its events: their fields, with JSON in `data`."""

COMPONENTS = "#/components/schemas/{name}"
EVENTS = "text/event-stream"
ANY = {"4XX": "The call cannot be taken as it is.", "5XX": "It cannot be answered now, or something broke."}
HEADERS = {
    "x-request-id": "The request, as its sender named it, else as this server does.",
    "request-id": "The same.",
    "x-tetrarch-run": "The run that answers, where there is one.",
}


class Description:
    """The document of one table of routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)

    @cached_property
    def body(self) -> bytes:
        """The document as JSON."""
        return msgspec.json.encode(document(self._routes))

    @cached_property
    def etag(self) -> str:
        """Changes with the document."""
        return hashlib.sha256(self.body).hexdigest()[:32]


DESCRIPTION = web.AppKey("description", Description)


async def get_openapi(request: web.Request) -> web.Response:
    """The document, or 304 for a caller that has it."""
    description = request.app[DESCRIPTION]
    known = request.if_none_match or ()
    is_known = any(tag.value in ("*", description.etag) for tag in known)
    response = (
        web.Response(status=304) if is_known else web.Response(body=description.body, content_type=JSON)
    )
    response.etag = description.etag
    response.headers["Cache-Control"] = "no-cache"
    return response


def document(routes: Iterable[Route]) -> Object:
    """The routes as an OpenAPI 3.1 document."""
    routes = tuple(routes)
    schemas = _Schemas(routes)
    paths: dict[str, Object] = {}
    for route in routes:
        paths.setdefault(public_path(route), {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.1",
        "info": {"title": "Tetrarch", "version": version("tetrarch"), "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "headers": {
                name: {"description": about, "schema": {"type": "string"}} for name, about in HEADERS.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def public_path(route: Route) -> str:
    """The path without aiohttp's patterns: `/v1/models/{model}`."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)


class _Schemas:
    """The JSON schemas of all types that routes name."""

    def __init__(self, routes: Iterable[Route]) -> None:
        types = {repr(found): found for route in routes for found in _types(route)}
        types |= {repr(found): found for found in INSTEAD.values()}
        schemas, self.components = msgspec.json.schema_components(types.values(), ref_template=COMPONENTS)
        self._by_type = dict(zip(types, schemas, strict=True))
        for found in types.values():
            if isinstance(found, type) and issubclass(found, CommonRequest):
                _hide(self.components[found.__name__])
        for kind, other in INSTEAD.items():
            shape = self.components[kind.__name__]
            self.components[kind.__name__] = {"title": shape["title"], "anyOf": [shape, self.of(other)]}

    def of(self, type_: Any) -> Object:
        """The schema, mostly a reference to a component."""
        return self._by_type[repr(type_)]


def _types(route: Route) -> Iterator[Any]:
    answers = [found for given in route.answers.values() for found in _each(given)]
    yield from (found for found in (route.body, *route.events, route.error, *answers) if found is not None)
    yield from (parameter.type for parameter in route.parameters)


def _each(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _hide(component: Object) -> None:
    """Fields that a body may not hold: the server fills them in."""
    for name in HIDDEN:
        component["properties"].pop(name, None)


def _operation(route: Route, schemas: _Schemas) -> Object:
    operation: Object = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", public_path(route))]),
        "summary": route.summary,
        "tags": [re.sub(r"^/(api/)?(v1/)?", "", route.path).partition("/")[0]],
        "description": f"Needs the scope `{route.scope}`.",
        "responses": _responses(route, schemas),
    }
    parameters = [*_path_parameters(route), *_parameters(route, schemas)]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {JSON: {"schema": schemas.of(route.body)}},
        }
    return operation


def _path_parameters(route: Route) -> Iterator[Object]:
    for name in re.findall(r"\{(\w+)\}", public_path(route)):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}


def _parameters(route: Route, schemas: _Schemas) -> Iterator[Object]:
    for parameter in route.parameters:
        yield {
            "name": parameter.name,
            "in": parameter.where,
            "description": parameter.about,
            "schema": schemas.of(parameter.type),
        }


def _responses(route: Route, schemas: _Schemas) -> Object:
    headers = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
    responses: Object = {}
    for status in sorted({*route.answers, *([200] if route.events else [])}):
        content = _content(route, status, schemas)
        responses[str(status)] = {"description": route.summary, "headers": headers}
        if content:
            responses[str(status)]["content"] = content
    for statuses, about in ANY.items():
        content = {JSON: {"schema": schemas.of(route.error)}}
        responses[statuses] = {"description": about, "headers": headers, "content": content}
    return responses


def _content(route: Route, status: int, schemas: _Schemas) -> Object:
    content: Object = {}
    if route.answers.get(status) is not None:
        content[route.media] = {"schema": _any_of(_each(route.answers[status]), schemas)}
    if status == 200 and route.events:
        content[EVENTS] = {"schema": _event(route, schemas)}
    return content


def _any_of(types: Iterable[Any], schemas: _Schemas) -> Object:
    shapes = [schemas.of(found) for found in types]
    return shapes[0] if len(shapes) == 1 else {"anyOf": shapes}


def _event(route: Route, schemas: _Schemas) -> Object:
    told = _any_of(route.events, schemas)
    data: Object = {"type": "string", "contentMediaType": JSON, "contentSchema": told}
    if route.last_data is not None:
        data = {"type": "string", "anyOf": [{"const": route.last_data}, data]}
    text = {"type": "string"}
    return {"type": "object", "properties": {"event": text, "id": text, "data": data}, "required": ["data"]}
