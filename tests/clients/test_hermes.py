"""Hermes Agent over /v1/chat/completions, its delegated tasks under a key of their own."""

from __future__ import annotations

from .agents import Done, Workplace, hermes
from .checks import assert_found_again, assert_survived_silence, end_of
from .conftest import Serve
from .scripts import ALONE, DONE, TEAM
from .shapes import check_shapes
from .stand import Stand

PATH = "/v1/chat/completions"
PACKAGE = "hermes-agent"
HELPERS_KEY = "Bearer for-delegation"
CONFIG = """\
model:
  default: scripted
  provider: custom
  base_url: {url}/v1
  context_length: 262144
delegation:
  model: scripted
  base_url: {url}/v1
  api_key: for-delegation
"""


async def run(stand: Stand, place: Workplace, task: str) -> Done:
    """Asks Hermes for one thing."""
    folder = place.home / ".hermes"
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG.format(url=stand.recorder.url))
    done = await place.run([hermes(), "chat", "--quiet", "--yolo", "--query", f"Please {task} Hermes."], {})
    assert (done.code, done.output.splitlines()[-1]) == (0, DONE), done
    return done


async def test_it_writes_a_file_after_a_long_silent_prefill(serve: Serve, place: Workplace) -> None:
    async with serve(7000.0) as stand:
        done = await run(stand, place, ALONE)
        assert place.read("made.txt") == "by Hermes", done
        assert stand.recorder.requests[0].path == "/api/v1/models"
        first, second = stand.recorder.calls(PATH)
        assert_survived_silence(stand, first, b": keepalive ")
        assert_found_again(stand, second)
        assert end_of(second) == "[DONE]"
        check_shapes("hermes", PACKAGE, stand.recorder.requests)


async def test_its_helper_is_a_second_agent_that_finishes(serve: Serve, place: Workplace) -> None:
    """It tells no names: what goes on from what was said before is the same agent."""
    async with serve(50_000.0) as stand:
        done = await run(stand, place, TEAM)
        assert place.read("helped.txt") == "by its helper", done
        calls = stand.recorder.calls(PATH)
        helped = [call for call in calls if call.headers["authorization"] == HELPERS_KEY]
        assert (len(calls), len(helped)) == (5, 2)
        assert sorted((await stand.agents()).values()) == [2, 3]
        assert_found_again(stand, helped[1])
        assert_found_again(stand, calls[-1])
        check_shapes("hermes", PACKAGE, stand.recorder.requests)
