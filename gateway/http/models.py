"""GET /v1/models: what living engines serve, in one shape that OpenAI's and Anthropic's clients both read.

Also GET /api/v1/models, which Hermes asks first: whatever answers it is taken for LM Studio, so that is whose
words the answer has. Knows no request's body.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.flow.directory import EngineView

from .requests import find_engine
from .state import STATE
from .stream import json_response


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What only this server tells of a model."""

    context_length: int  # tokens, prompt and answer together
    vocab_size: int
    num_engines: int  # that serve it now
    num_workers: int  # turns at the same time, over all of them
    kv_bytes_per_token: float


class Model(Struct, frozen=True, kw_only=True):
    """One model."""

    id: str
    created: int  # unix seconds
    created_at: str  # the same, RFC 3339
    display_name: str
    context_length: int
    max_model_len: int  # vLLM's name, which many clients read
    max_input_tokens: int  # Anthropic's
    tetrarch: ModelFacts
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    owned_by: str = "tetrarch"


class ModelList(Struct, frozen=True, kw_only=True):
    """All models on one page."""

    data: list[Model]
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
    has_more: bool = False


class LoadedConfig(Struct, frozen=True):
    """How an instance runs."""

    context_length: int


class LoadedInstance(Struct, frozen=True):
    """A model that answers now."""

    id: str
    config: LoadedConfig


class NativeModel(Struct, frozen=True, kw_only=True):
    """One model in LM Studio's words."""

    key: str
    display_name: str
    max_context_length: int
    loaded_instances: list[LoadedInstance]
    type: Literal["llm"] = "llm"
    publisher: str = "tetrarch"


class NativeModelList(Struct, frozen=True):
    """All models in LM Studio's words."""

    models: list[NativeModel]


async def get_models(request: web.Request) -> web.Response:
    """All models."""
    models = [_model(views) for views in _serving(request).values()]
    ids = [model.id for model in models]
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return json_response(ModelList(data=models, first_id=first, last_id=last))


async def get_model(request: web.Request) -> web.Response:
    """One model, also by an alias; told under its own id. Raises UnknownModel or NoEngine."""
    state = request.app[STATE]
    engine = find_engine(state.directory, request.match_info["model"], state.aliases)
    return json_response(_model(_serving(request)[engine.info.model_id]))


async def get_native_models(request: web.Request) -> web.Response:
    """All models, for clients that ask LM Studio's way."""
    return json_response(
        NativeModelList(
            [
                NativeModel(
                    key=model_id,
                    display_name=model_id,
                    max_context_length=_context_length(views),
                    loaded_instances=[LoadedInstance(model_id, LoadedConfig(_context_length(views)))],
                )
                for model_id, views in _serving(request).items()
            ]
        )
    )


def _serving(request: web.Request) -> dict[str, list[EngineView]]:
    serving: dict[str, list[EngineView]] = {}
    for view in request.app[STATE].directory.engines():
        if view.alive:
            serving.setdefault(view.info.model_id, []).append(view)
    return serving


def _model(views: list[EngineView]) -> Model:
    info, length = views[0].info, _context_length(views)
    return Model(
        id=info.model_id,
        created=info.created,
        created_at=datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        display_name=info.model_id,
        context_length=length,
        max_model_len=length,
        max_input_tokens=length,
        tetrarch=ModelFacts(
            context_length=length,
            vocab_size=info.vocab_size,
            num_engines=len(views),
            num_workers=sum(view.info.num_workers for view in views),
            kv_bytes_per_token=info.kv.bytes_per_token,
        ),
    )


def _context_length(views: Iterable[EngineView]) -> int:
    """What every engine of the model takes."""
    return min(view.info.context_length for view in views)
