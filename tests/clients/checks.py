"""What is asked of every client's calls alike."""

from __future__ import annotations

import json
import re

from workers.messages import Finished

from .recorder import Recorded
from .stand import KEEPALIVE_SECONDS, Stand

SILENT_SECONDS = 7.0
FOUND_SHARE = 0.9


def assert_survived_silence(stand: Stand, call: Recorded, keep_alive: bytes) -> None:
    """A first prompt that took long, and whose client stayed because it was told that work goes on."""
    end = stand.events(call.run_id)[-1]
    ends = [event for event in stand.events(call.run_id) if isinstance(event, Finished)]
    assert ends, (end, bytes(call.answer[-500:]))
    assert ends[-1].timings.prefill_seconds >= SILENT_SECONDS
    assert bytes(call.answer).count(keep_alive) >= SILENT_SECONDS / KEEPALIVE_SECONDS - 2


def assert_found_again(stand: Stand, call: Recorded) -> None:
    """A later prompt of the same conversation is hardly computed, says the engine."""
    usage = stand.usage(call)
    assert usage.cached_tokens > FOUND_SHARE * usage.prompt_tokens, usage


def end_of(call: Recorded) -> str:
    """The last event of a stream: its `type`, or its data where that is no JSON."""
    data = re.findall(rb"^data: (.*)$", bytes(call.answer), re.MULTILINE)
    last = data[-1].decode()
    return str(json.loads(last)["type"]) if last.startswith("{") else last
