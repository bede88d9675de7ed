"""Anthropic's Claude Code over /v1/messages."""

from __future__ import annotations

from .agents import Done, Workplace, claude_code
from .checks import assert_found_again, assert_survived_silence, end_of
from .conftest import Serve
from .scripts import ALONE, DONE, TEAM
from .shapes import check_shapes
from .stand import Stand

PATH = "/v1/messages"
PACKAGE = "@anthropic-ai/claude-code"
SESSION, AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"


async def run(stand: Stand, place: Workplace, task: str) -> Done:
    """Asks Claude Code for one thing."""
    environ = {
        "ANTHROPIC_BASE_URL": stand.recorder.url,
        "ANTHROPIC_API_KEY": "none-is-needed",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": "3000",  # silence later is borne for 5 minutes at least
        "IS_SANDBOX": "1",  # else it takes no orders from root without asking
    }
    command = [claude_code(), "-p", "--dangerously-skip-permissions", f"Please {task} Claude Code."]
    done = await place.run(command, environ)
    assert (done.code, done.output.strip()) == (0, DONE), done
    return done


async def test_it_writes_a_file_after_a_long_silent_prefill(serve: Serve, place: Workplace) -> None:
    async with serve(6500.0) as stand:
        done = await run(stand, place, ALONE)
        assert place.read("made.txt") == "by Claude Code", done
        first, second = stand.recorder.calls(PATH)
        assert_survived_silence(stand, first, b"event: ping")
        assert_found_again(stand, second)
        assert end_of(second) == "message_stop"
        check_shapes("claude-code", PACKAGE, stand.recorder.requests)


async def test_its_helper_is_an_agent_of_the_same_session(serve: Serve, place: Workplace) -> None:
    async with serve(50_000.0) as stand:
        done = await run(stand, place, TEAM)
        assert place.read("helped.txt") == "by its helper", done
        calls = stand.recorder.calls(PATH)
        helped = [call for call in calls if AGENT in call.headers]
        assert (len(calls), len(helped)) == (4, 2)
        (session,) = {call.headers[SESSION] for call in calls}
        told = await stand.agents()
        assert {told_session for told_session, _, _ in told} == {session}
        assert told[session, helped[0].headers[AGENT], ""] == 2
        assert sorted(told.values()) == [2, 2]
        assert_found_again(stand, helped[1])
        assert_found_again(stand, calls[-1])
        check_shapes("claude-code", PACKAGE, stand.recorder.requests)
