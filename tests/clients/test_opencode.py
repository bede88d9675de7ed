"""opencode over /v1/chat/completions, by the AI SDK's package for compatible servers."""

from __future__ import annotations

import json
from typing import Any

from .agents import Done, Workplace, opencode
from .checks import assert_found_again, assert_survived_silence, end_of
from .conftest import Serve
from .recorder import Recorded
from .scripts import ALONE, DONE, TEAM
from .shapes import check_shapes
from .stand import Stand

PATH = "/v1/chat/completions"
PACKAGE = "opencode-ai"
OFFLINE = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}


def config(url: str) -> dict[str, Any]:
    """opencode.json."""
    model = {"name": "Scripted", "limit": {"context": 262_144, "output": 32_000}}
    options = {"baseURL": f"{url}/v1", "apiKey": "none", "chunkTimeout": 3000}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Tetrarch", "options": options}
    return {
        "model": "tetrarch/scripted",
        "small_model": "tetrarch/scripted",
        "provider": {"tetrarch": {**provider, "models": {"scripted": model}}},
    }


async def run(stand: Stand, place: Workplace, task: str) -> Done:
    """Asks opencode for one thing."""
    (place.work / "opencode.json").write_text(json.dumps(config(stand.recorder.url)))
    done = await place.run([opencode(), "run", "--auto", f"Please {task} opencode."], OFFLINE)
    assert (done.code, done.output.strip()) == (0, DONE), done
    return done


def calls_with_tools(stand: Stand) -> list[Recorded]:
    """It asks for a title too, without."""
    return [call for call in stand.recorder.calls(PATH) if call.tools]


async def test_it_writes_a_file_after_a_long_silent_prefill(serve: Serve, place: Workplace) -> None:
    async with serve(4000.0) as stand:
        done = await run(stand, place, ALONE)
        assert place.read("made.txt") == "by opencode", done
        first, second = calls_with_tools(stand)
        assert_survived_silence(stand, first, b": keepalive ")
        assert_found_again(stand, second)
        assert end_of(second) == "[DONE]"
        check_shapes("opencode", PACKAGE, stand.recorder.requests)


async def test_its_helper_is_an_agent_of_the_same_session(serve: Serve, place: Workplace) -> None:
    async with serve(50_000.0) as stand:
        done = await run(stand, place, TEAM)
        assert place.read("helped.txt") == "by its helper", done
        calls = calls_with_tools(stand)
        helped = [call for call in calls if "x-parent-session-id" in call.headers]
        assert (len(calls), len(helped)) == (4, 2)
        main, helper = calls[0].headers["x-session-id"], helped[0].headers["x-session-id"]
        assert {call.headers["x-parent-session-id"] for call in helped} == {main}
        num_titles = len(stand.recorder.calls(PATH)) - len(calls)
        assert await stand.agents() == {(main, main, ""): 2 + num_titles, (main, helper, main): 2}
        assert_found_again(stand, helped[1])
        assert_found_again(stand, calls[-1])
        check_shapes("opencode", PACKAGE, stand.recorder.requests)
