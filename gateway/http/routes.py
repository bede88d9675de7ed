"""The index of the API: every path with what it takes, gives and asks. app.py mounts it, openapi.py tells it.

An API with a module of its own brings a tuple of rows (see Route) and is named in ROUTES.
"""

from __future__ import annotations

from typing import Any

from gateway.native.routes import ROUTES as NATIVE

from .access import TENANT
from .api import ChatRequest, CompletionRequest
from .chat import post_chat
from .completions import post_completion
from .health import Health, Ready, get_health, get_ready
from .messages.routes import ROUTES as MESSAGES
from .messages.shapes import Message, MessageEvent
from .metrics_page import get_metrics
from .models import Model, ModelList, NativeModelList, get_model, get_models, get_native_models
from .openapi import get_openapi
from .responses.routes import ROUTES as RESPONSES
from .responses.shapes import Response, ResponseEvent
from .route import Parameter, Route
from .sessions import CancelRequest, SessionCancelled, post_cancel
from .shapes import ChatChunk, ChatCompletion, ErrorBody, TextCompletion
from .stream import get_run

AFTER = (
    Parameter("after", "Id of the last event that was seen: a resumed stream goes on behind it."),
    Parameter("Last-Event-ID", "The same, as event sources send it.", where="header"),
)

DONE = "[DONE]"
TOLD_AGAIN = (ChatCompletion, TextCompletion, Message, Response)
STREAMED_AGAIN = (ChatChunk, TextCompletion, ErrorBody, MessageEvent, ResponseEvent)

OPENAI = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        call=post_chat,
        scope="control",
        summary="Answers a conversation.",
        body=ChatRequest,
        answers={200: ChatCompletion},
        events=(ChatChunk, ErrorBody),
        last_data=DONE,
    ),
    Route(
        method="GET",
        path="/v1/chat/completions/{id}",
        call=get_run,
        scope="read",
        summary="A call's answer again, in the words of the API that it was asked by.",
        answers={200: TOLD_AGAIN, 204: None},
        events=STREAMED_AGAIN,
        last_data=DONE,
        parameters=AFTER,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        call=post_completion,
        scope="control",
        summary="Continues a text.",
        body=CompletionRequest,
        answers={200: TextCompletion},
        events=(TextCompletion, ErrorBody),
        last_data=DONE,
    ),
    Route(
        method="GET",
        path="/v1/completions/{id}",
        call=get_run,
        scope="read",
        summary="The same.",
        answers={200: TOLD_AGAIN, 204: None},
        events=STREAMED_AGAIN,
        last_data=DONE,
        parameters=AFTER,
    ),
)

SESSIONS = (
    Route(
        method="POST",
        path="/v1/sessions/{session}/cancel",
        call=post_cancel,
        scope="control",
        verb="cancel_session",
        summary="Ends a session's runs, or those of one agent and its descendants.",
        body=CancelRequest,
        answers={200: SessionCancelled},
        is_body_optional=True,
        parameters=(TENANT,),
    ),
)

MODELS = (
    Route(
        method="GET",
        path="/v1/models",
        call=get_models,
        scope="read",
        summary="All models.",
        answers={200: ModelList},
    ),
    Route(
        method="GET",
        path="/v1/models/{model:.+}",
        call=get_model,
        scope="read",
        summary="One model by its id or an alias.",
        answers={200: Model},
    ),
    Route(
        method="GET",
        path="/api/v1/models",
        call=get_native_models,
        scope="read",
        summary="All models in LM Studio's words.",
        answers={200: NativeModelList},
    ),
)

SERVER = (
    Route(
        method="GET",
        path="/openapi.json",
        call=get_openapi,
        scope="read",
        summary="This description.",
        answers={200: dict[str, Any], 304: None},
        parameters=(Parameter("If-None-Match", "The ETag of a description at hand.", where="header"),),
    ),
    Route(
        method="GET",
        path="/health",
        call=get_health,
        scope="read",
        summary="The process answers, with settings in force and measured facts.",
        answers={200: Health},
        is_limited=False,
    ),
    Route(
        method="GET",
        path="/ready",
        call=get_ready,
        scope="read",
        summary="Whether a call would be served now.",
        answers={200: Ready, 503: Ready},
        is_limited=False,
    ),
    Route(
        method="GET",
        path="/metrics",
        call=get_metrics,
        scope="read",
        summary="Figures in Prometheus's text format.",
        answers={200: str},
        media="text/plain",
        is_limited=False,
    ),
)

ROUTES: tuple[Route, ...] = (*OPENAI, *RESPONSES, *MESSAGES, *NATIVE, *SESSIONS, *MODELS, *SERVER)
