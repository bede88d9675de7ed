"""Answers held to the API's description: status, headers, media type, body and each event of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

EVENTS = "text/event-stream"
JSON = "application/json"


class Described:
    """One document. Operations are named by method and path: `POST /v1/runs/{id}/cancel`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._components = document["components"]
        self._validators: dict[tuple[str, str, str], Draft202012Validator] = {}
        self.operations: dict[str, dict[str, Any]] = {
            f"{method.upper()} {path}": operation
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        }

    def parameters(self, label: str, where: str) -> list[str]:
        """The names of its parameters in `path`, `query` or `header`."""
        parameters = self.operations[label].get("parameters", [])
        return [parameter["name"] for parameter in parameters if parameter["in"] == where]

    def fields(self, label: str) -> list[str]:
        """The names of its body's fields; none where it has no body."""
        body = self.operations[label].get("requestBody")
        if body is None:
            return []
        name = body["content"][JSON]["schema"]["$ref"].rpartition("/")[2]
        return [*self._components["schemas"][name]["properties"]]

    def check(
        self, label: str, status: int, headers: Mapping[str, str], body: bytes, *, is_whole: bool = True
    ) -> None:
        """Raises AssertionError or ValidationError for an answer that is not as told. Not `is_whole`: the
        client left before the end of the stream.
        """
        responses = self.operations[label]["responses"]
        key = str(status) if str(status) in responses else f"{status // 100}XX"
        assert key in responses, (label, status)
        assert headers.get("x-request-id") and headers.get("request-id"), (label, status)
        content = responses[key].get("content")
        if content is None:
            assert not body, (label, status)
            return
        media = headers.get("content-type", "").partition(";")[0]
        assert media in content, (label, status, media)
        if media == JSON:
            self._validator(label, key, media).validate(json.loads(body))
        elif media == EVENTS:
            self._check_events(label, key, body, is_whole=is_whole)

    def _check_events(self, label: str, key: str, body: bytes, *, is_whole: bool) -> None:
        *blocks, rest = body.decode().split("\n\n")
        assert not rest or not is_whole, "the last event has no end"
        for event in sse_events(blocks):
            if event["data"] == "[DONE]" and self._is_told(label, key, "[DONE]"):
                continue
            self._validator(label, key, EVENTS).validate(json.loads(event["data"]))

    def _is_told(self, label: str, key: str, text: str) -> bool:
        return {"const": text} in self._data(label, key).get("anyOf", ())

    def _data(self, label: str, key: str) -> dict[str, Any]:
        schema = self.operations[label]["responses"][key]["content"][EVENTS]["schema"]
        found: dict[str, Any] = schema["properties"]["data"]
        return found

    def _validator(self, label: str, key: str, media: str) -> Draft202012Validator:
        """For a body, or for the JSON in an event's data."""
        which = (label, key, media)
        if which not in self._validators:
            if media == EVENTS:
                data = self._data(label, key)
                schema = data.get("anyOf", [data])[-1]["contentSchema"]
            else:
                schema = self.operations[label]["responses"][key]["content"][media]["schema"]
            self._validators[which] = Draft202012Validator({**schema, "components": self._components})
        return self._validators[which]


def sse_events(blocks: list[str]) -> Iterator[dict[str, str]]:
    """Those that have data."""
    for block in blocks:
        lines = [line.partition(": ") for line in block.split("\n") if not line.startswith(":")]
        assert {name for name, _, _ in lines} <= {"id", "event", "data"}, "no field of an event"
        event = {name: value for name, _, value in lines}
        assert "data" in event or not event
        if event:
            yield event
