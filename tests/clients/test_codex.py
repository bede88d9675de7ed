"""OpenAI's Codex over /v1/responses."""

from __future__ import annotations

import json

from .agents import Done, Workplace, codex
from .checks import assert_found_again, assert_survived_silence, end_of
from .conftest import Serve
from .scripts import ALONE, DONE, TEAM
from .shapes import check_shapes
from .stand import Stand

PATH = "/v1/responses"
PACKAGE = "@openai/codex"
CONFIG = """\
model = "scripted"
model_provider = "tetrarch"

[model_providers.tetrarch]
name = "Tetrarch"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = 3000
stream_max_retries = 0
request_max_retries = 0
"""


async def run(stand: Stand, place: Workplace, task: str) -> Done:
    """Asks Codex for one thing."""
    folder = place.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(url=stand.recorder.url))
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"]
    done = await place.run([codex(), "exec", *flags, f"Please {task} Codex."], {})
    items = [json.loads(line).get("item", {}) for line in done.output.splitlines()]
    assert [item["text"] for item in items if item.get("type") == "agent_message"] == [DONE], done
    return done


async def test_it_writes_a_file_after_a_long_silent_prefill(serve: Serve, place: Workplace) -> None:
    async with serve(5000.0) as stand:
        done = await run(stand, place, ALONE)
        assert place.read("made.txt") == "by Codex", done
        first, second = stand.recorder.calls(PATH)
        assert_survived_silence(stand, first, b'"type":"keepalive"')
        assert_found_again(stand, second)
        assert end_of(second) == "response.completed"
        check_shapes("codex", PACKAGE, stand.recorder.requests)


async def test_its_helper_is_an_agent_of_the_same_session(serve: Serve, place: Workplace) -> None:
    async with serve(50_000.0) as stand:
        done = await run(stand, place, TEAM)
        assert place.read("helped.txt") == "by its helper", done
        calls = stand.recorder.calls(PATH)
        helped = [call for call in calls if "x-codex-parent-thread-id" in call.headers]
        assert (len(calls), len(helped)) == (5, 2)
        main = calls[0].headers["thread-id"]
        assert {call.headers["x-codex-parent-thread-id"] for call in helped} == {main}
        told = await stand.agents()
        helper = helped[0].headers["thread-id"]
        assert told == {(main, main, ""): 3, (main, helper, main): 2}
        assert_found_again(stand, helped[1])
        assert_found_again(stand, calls[-1])
        check_shapes("codex", PACKAGE, stand.recorder.requests)
