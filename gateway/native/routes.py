"""The native API's paths: runs, their verbs, and sessions."""

from __future__ import annotations

from typing import Any

from gateway.http.access import TENANT
from gateway.http.route import Parameter, Route

from .bodies import BatchBody, CreatedBody, RunBody, RunList, TreeBody, VerbBody, WaitBody
from .creating import post_batch, post_fork, post_run
from .lists import delete_run, get_run, get_runs, get_tree
from .streaming import get_events, get_session_events
from .structs import (
    BatchRequest,
    CancelRequest,
    EmptyRequest,
    ForkRequest,
    PauseRequest,
    RespondRequest,
    RunRequest,
    SteerRequest,
    WaitRequest,
)
from .telling import SessionEvent, StreamedEvent
from .verbs import post_cancel, post_heartbeat, post_pause, post_respond, post_resume, post_steer
from .waiting import get_wait, post_wait

KEY = (
    Parameter(
        "Idempotency-Key",
        "Sent again within a day with the same body: the same answer, and nothing is done twice. 409 "
        "run_gone: the run that it has made was deleted, or is kept no more.",
        where="header",
    ),
)
AFTER = (
    Parameter("after", "Id of the last event that was seen: the stream goes on behind it."),
    Parameter("Last-Event-ID", "The same, as event sources send it.", where="header"),
    Parameter("follow", "false: only what is there already.", type=bool),
)


def _verb(name: str, call: Any, summary: str, body: Any, *, approves: bool = False) -> Route:
    return Route(
        method="POST",
        path=f"/v1/runs/{{id}}/{name}",
        call=call,
        scope="approve" if approves else "control",
        verb=name,
        summary=summary,
        body=body,
        is_body_optional=body in (CancelRequest, PauseRequest, EmptyRequest),
        answers={200: VerbBody},
        parameters=() if name == "heartbeat" else KEY,
    )


CREATING = (
    Route(
        method="POST",
        path="/v1/runs",
        call=post_run,
        scope="control",
        verb="create",
        summary="Starts a run that outlives its client.",
        body=RunRequest,
        answers={202: CreatedBody},
        parameters=KEY,
    ),
    Route(
        method="POST",
        path="/v1/runs/batch",
        call=post_batch,
        scope="control",
        verb="create_batch",
        summary="Starts up to 64 runs, each taken or refused on its own.",
        body=BatchRequest,
        answers={202: BatchBody, 200: BatchBody},
        parameters=KEY,
    ),
    Route(
        method="POST",
        path="/v1/runs/{id}/fork",
        call=post_fork,
        scope="control",
        verb="fork",
        summary="Starts a run that begins with what this one has.",
        body=ForkRequest,
        answers={202: CreatedBody},
        parameters=KEY,
    ),
)

VERBS = (
    _verb("cancel", post_cancel, "Ends a run, or all that descends from it, too.", CancelRequest),
    _verb("pause", post_pause, "Stops a run at the next border and keeps what it has.", PauseRequest),
    _verb("resume", post_resume, "Goes on with a paused run.", EmptyRequest),
    _verb("steer", post_steer, "Puts a text before the model as the user's.", SteerRequest),
    _verb("respond", post_respond, "Gives a run what it waits for.", RespondRequest, approves=True),
    _verb("heartbeat", post_heartbeat, "Says that the caller is still there.", EmptyRequest),
)

LOOKING = (
    Route(
        method="POST",
        path="/v1/runs/wait",
        call=post_wait,
        scope="read",
        summary="Waits for one or all of many runs.",
        body=WaitRequest,
        answers={200: WaitBody},
    ),
    Route(
        method="GET",
        path="/v1/runs/wait",
        call=get_wait,
        scope="read",
        summary="Waits for one or all of many runs.",
        answers={200: WaitBody},
        parameters=(
            Parameter("ids", "The runs' ids, separated by commas."),
            Parameter("mode", "any or all (the default)."),
            Parameter("until", "settled (the default: ended, or waiting for input) or ended."),
            Parameter("timeout_ms", "The longest wait.", type=int),
        ),
    ),
    Route(
        method="GET",
        path="/v1/runs",
        call=get_runs,
        scope="read",
        summary="The caller's runs, newest first.",
        answers={200: RunList},
        parameters=(
            *(
                Parameter(name, "Only those with it.")
                for name in ("session", "agent", "parent", "parent_run", "status", "class", "kind")
            ),
            Parameter("before", "The 'next' of an earlier page."),
            Parameter("limit", "The most that are told, up to 500.", type=int),
            TENANT,
        ),
    ),
    Route(
        method="GET",
        path="/v1/runs/{id}",
        call=get_run,
        scope="read",
        summary="One run, with its result once it has ended.",
        answers={200: RunBody},
    ),
    Route(
        method="DELETE",
        path="/v1/runs/{id}",
        call=delete_run,
        scope="control",
        verb="delete",
        summary="Forgets a run that has ended.",
    ),
    Route(
        method="GET",
        path="/v1/runs/{id}/events",
        call=get_events,
        scope="read",
        summary="A run's events, from the start or behind one of them; 204 behind the last.",
        answers={204: None},
        events=(StreamedEvent,),
        parameters=AFTER,
    ),
)

SESSIONS = (
    Route(
        method="GET",
        path="/v1/sessions/{session}/tree",
        call=get_tree,
        scope="read",
        summary="A session's agents and their runs.",
        answers={200: TreeBody},
        parameters=(TENANT,),
    ),
    Route(
        method="GET",
        path="/v1/sessions/{session}/events",
        call=get_session_events,
        scope="read",
        summary="What happens to all runs of a session, in one stream.",
        answers={},
        events=(SessionEvent,),
        parameters=(*AFTER, TENANT),
    ),
)

ROUTES = (*CREATING, *LOOKING, *VERBS, *SESSIONS)
