"""Logs are one JSON object a line, carry run and session, and never hold what an agent said."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import structlog

from metrics import logs

SECRET = "the launch code is 0000"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_has_time_level_event_run_and_session() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    with structlog.contextvars.bound_contextvars(run="run-1", session="s1"):
        structlog.get_logger().info("turn ended", num_tokens=3)
    structlog.get_logger().debug("too fine")
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"level": "info", "event": "turn ended", "run": "run-1", "session": "s1", "num_tokens": 3}


class Message(msgspec.Struct):
    prompt: str


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": SECRET},
        {"Messages": [{"role": "user", "content": SECRET}]},
        {"call": {"model": "m", "messages": SECRET}},
        {"call": {"a": {"b": {"c": {"d": {"e": SECRET}}}}}},
        {"items": [{"text": SECRET}]},
        {"submit": Message(SECRET)},
        {"items": (Message(SECRET),)},
        {"data": SECRET.encode()},
        {"token_ids": [1, 2, 3]},
    ],
)
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_prompt_text_reaches_a_log(stream: type[io.StringIO], values: dict[str, Any]) -> None:
    output = stream()
    logs.configure("debug", stream=output)
    structlog.get_logger().warning("refused", **values)
    assert "refused" in output.getvalue()
    assert SECRET not in output.getvalue()
    assert "1, 2, 3" not in output.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_traceback_shows_no_local_variables(stream: type[io.StringIO]) -> None:
    output = stream()
    logs.configure("info", stream=output)
    heard = SECRET.upper()
    try:
        raise KeyError(len(heard))
    except KeyError:
        structlog.get_logger().exception("broken")
    assert "Traceback" in output.getvalue()
    assert "KeyError: 23" in output.getvalue()
    assert heard not in output.getvalue()


def test_errors_are_told_in_words_and_long_texts_are_cut() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    structlog.get_logger().error("failed", error=OSError("disk full"), path="x" * 9000)
    (line,) = lines(stream)
    assert line["error"] == "OSError: disk full"
    assert len(line["path"]) == logs.MAX_TEXT


def test_the_standard_librarys_loggers_speak_json_too() -> None:
    stream = io.StringIO()
    logs.configure("warning", stream=stream)
    logging.getLogger("aiohttp.server").info("not shown")
    logging.getLogger("aiohttp.server").error("port %d is taken", 80)
    (line,) = lines(stream)
    assert (line["level"], line["event"]) == ("error", "port 80 is taken")


def test_configuring_twice_prints_once() -> None:
    stream = io.StringIO()
    logs.configure("info", stream=stream)
    logs.configure("info", stream=stream)
    structlog.get_logger().info("once")
    assert len(lines(stream)) == 1


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="'loud' is unknown"):
        logs.configure("loud")
