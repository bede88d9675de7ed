"""What callers of the APIs see of a run that went astray, and how they say that nobody watches."""

from __future__ import annotations

import pytest
from msgspec import Raw, json, msgpack

from gateway.callers.hints import read_hints
from gateway.dialects.answer import Answer, AnswerShape, Endpoint
from gateway.dialects.table import DIALECTS
from gateway.errors import InvalidField
from gateway.http.api import ChatMessage, ChatRequest, HintFields
from gateway.runs.state import RunState, advance
from gateway.runs.told import tell
from workers.messages import (
    Accepted,
    Cancelled,
    Derail,
    Derailed,
    Finished,
    RunEnded,
    Timings,
    Tokens,
    TurnEnd,
    Usage,
)

FOUND = Derail(derail="text_loop", first_token=3, excerpt="again")
USAGE = Usage(prompt_tokens=5, completion_tokens=1)
ENDS = (Cancelled(usage=USAGE, timings=Timings()), Finished(reason="stop", usage=USAGE, timings=Timings()))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("endpoint", ["chat", "text", "responses", "messages"])
def test_a_stopped_run_answers_as_one_that_was_cut_short(end: TurnEnd, endpoint: Endpoint) -> None:
    shape = Raw(msgpack.encode(AnswerShape(endpoint=endpoint)))
    found = Answer("run-" + "0" * 32)
    teller = DIALECTS[endpoint].teller(found)
    found.feed(Accepted(model="m", engine_id="e", created=1, prompt_tokens=5, gateway="g", request=shape))
    teller.begin()
    words = Tokens(token_ids=b"\1\0\0\0", text="words")
    for event in (words, end, Derailed(what=FOUND), RunEnded(state="derailed")):
        teller.more(found.feed(event), event if isinstance(event, Tokens) else None)
    assert found.failure() is None
    assert (found.finish_reason, found.text, found.usage) == ("length", "words", USAGE)
    body = json.decode(json.encode(teller.body()))
    assert body["tetrarch"]["derail"]["kind"] == "text_loop"


PLAINEST = Derail(derail="stall", severity="critical")
"""All but its kind as it is if nobody says anything."""


@pytest.mark.parametrize(
    "what", [PLAINEST, FOUND, Derail(derail="empty", severity="warning", action="steer")]
)
def test_a_derailment_is_told_with_all_its_fields_by_every_api_alike(what: Derail) -> None:
    expected = {
        "kind": what.derail,
        "severity": what.severity,
        "first_token": what.first_token,
        "excerpt": what.excerpt,
        "action": what.action,
    }
    for endpoint in DIALECTS:
        shape = Raw(msgpack.encode(AnswerShape(endpoint=endpoint, stream=True)))
        found = Answer("run-" + "0" * 32)
        teller = DIALECTS[endpoint].teller(found)
        found.feed(Accepted(model="m", engine_id="e", created=1, prompt_tokens=5, request=shape))
        frames = teller.begin()
        words = Tokens(token_ids=b"\1\0\0\0", text="words")
        for event in (words, Derailed(what=what), ENDS[1], RunEnded(state="completed")):
            frames += teller.more(found.feed(event), event if isinstance(event, Tokens) else None)
        frames += teller.end()
        datas = [json.decode(json.encode(frame.data)) for frame in frames if isinstance(frame.data, dict)]
        told = [data.get("response", data).get("tetrarch") for data in datas]
        assert [one for one in told if one] == [{"derail": expected}], endpoint
        assert json.decode(json.encode(teller.body()))["tetrarch"] == {"derail": expected}
    state = RunState()
    (told_event,) = tell("run-1", Derailed(what=what), advance(state, "1-1", Derailed(what=what)))
    assert json.decode(json.encode(told_event)) == {"type": "run.derail", "run": "run-1", **expected}


def test_a_cancelled_run_is_still_a_failure() -> None:
    found = Answer("run-1")
    for event in (ENDS[0], RunEnded(state="cancelled")):
        found.feed(event)
    assert found.failure() is not None


@pytest.mark.parametrize(
    ("headers", "told", "expected"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"X-Tetrarch-Unattended": "true"}, None, True),
        ({"X-Tetrarch-Unattended": "0"}, True, False),
    ],
)
def test_callers_say_that_nobody_watches(headers: dict[str, str], told: bool | None, expected: bool) -> None:
    request = ChatRequest(messages=[ChatMessage(role="user")], tetrarch=HintFields(unattended=told))
    assert read_hints(headers, request).is_unattended is expected


def test_a_header_that_says_neither_is_refused() -> None:
    request = ChatRequest(messages=[ChatMessage(role="user")])
    with pytest.raises(InvalidField, match="X-Tetrarch-Unattended"):
        read_hints({"X-Tetrarch-Unattended": "maybe"}, request)
