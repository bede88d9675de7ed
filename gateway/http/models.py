"""GET /v1/models: what living engines serve, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.errors import UnknownModel
from gateway.flow.directory import EngineView

from .state import STATE
from .stream import json_response


async def get_models(request: web.Request) -> web.Response:
    """All models."""
    return json_response({"object": "list", "data": list(_models(request).values())})


async def get_model(request: web.Request) -> web.Response:
    """One model. Raises UnknownModel."""
    models = _models(request)
    name = request.match_info["model"]
    if name not in models:
        raise UnknownModel(name, sorted(models))
    return json_response(models[name])


def _models(request: web.Request) -> dict[str, dict[str, Any]]:
    engines = [view for view in request.app[STATE].directory.engines() if view.alive]
    return {view.info.model_id: _model(view) for view in engines}


def _model(view: EngineView) -> dict[str, Any]:
    return {
        "id": view.info.model_id,
        "object": "model",
        "created": view.info.created,
        "owned_by": "tetrarch",
        "context_length": view.info.context_length,
        "max_model_len": view.info.context_length,  # vLLM's name, which many clients read
    }
