"""Whole replays of small traces, and the verb around them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from workers.__main__ import main
from workers.errors import IntegrityError
from workers.line import LineRules
from workers.simulate_device import Device
from workers.simulate_replay import Capacity, Replay
from workers.simulate_report import Report
from workers.simulate_trace import Trace, read_trace

ROOT = Path(__file__).parent.parent.parent


def growing_sessions(num_sessions: int, num_calls: int, *, seed: int = 1) -> list[dict[str, object]]:
    """Agents whose prompts grow from about 3k to 3k + num_calls x 1k tokens; one call in ten starts over."""
    rng = random.Random(seed)
    lines: list[dict[str, object]] = []
    next_id = 0
    for session in range(num_sessions):
        blocks: list[int] = []
        for call in range(num_calls):
            if call and rng.random() < 0.1:
                del blocks[20:]
            num_new = rng.randrange(4, 28) if blocks else 48
            blocks += range(next_id, next_id + num_new)
            next_id += num_new
            lines.append(
                {
                    "session": session,
                    "agent": "main",
                    "think": rng.random() * 40,
                    "input_length": 64 * len(blocks) + rng.randrange(64),
                    "output_length": rng.randrange(1, 300),
                    "stop": "tool_use" if rng.random() < 0.9 else "end_turn",
                    "hash_ids": list(blocks),
                }
            )
    return lines


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("traces") / "agents.jsonl", growing_sessions(8, 12))


@pytest.fixture(scope="module")
def trace(trace_path: Path) -> Trace:
    return read_trace(trace_path)


def replay(trace: Trace, *, agents: int = 4, pool: int = 131_072, states: int = 16, seed: int = 0) -> Report:
    capacity = Capacity(agents, pool, states, num_workers=4, context_tokens=trace.longest_tokens + 1)
    return Replay(trace, capacity, Device(), seed).run(check_in_full=True)


def ideal_rate(trace: Trace) -> float:
    """What a cache would answer that keeps every block for ever."""
    seen: set[int] = set()
    num_kept = num_prompt = 0
    for session in trace.sessions:
        for call in session:
            num_known = next((i for i, b in enumerate(call.blocks) if b not in seen), len(call.blocks))
            num_kept += 64 * num_known
            num_prompt += call.prompt_tokens
            seen |= set(call.blocks)
    return num_kept / num_prompt


@pytest.mark.parametrize("states", [0, 16])
def test_every_call_ends_and_every_token_is_accounted_for(trace: Trace, states: int) -> None:
    report = replay(trace, states=states)
    calls = [call for session in trace.sessions for call in session]
    assert (report.num_calls, report.num_failed, report.num_skipped) == (len(calls), 0, 0)
    assert report.prompt_tokens == sum(call.prompt_tokens for call in calls)
    assert report.generated_tokens == sum(call.output_tokens for call in calls)
    if not report.num_preempted:
        assert report.prefill_tokens == report.prompt_tokens - report.cached_tokens


def test_with_room_for_all_an_attention_cache_answers_all_that_repeats(trace: Trace) -> None:
    assert replay(trace, pool=1_048_576, states=0).hit_rate == pytest.approx(ideal_rate(trace), abs=0.002)


def test_checkpoints_restore_nearly_what_attention_alone_would(trace: Trace) -> None:
    report = replay(trace, pool=1_048_576, states=32)
    assert report.num_checkpoints > 0 and report.num_restored > 0
    assert ideal_rate(trace) - 0.03 <= report.hit_rate <= ideal_rate(trace)


def test_a_small_pool_evicts_and_says_why(trace: Trace) -> None:
    report = replay(trace, agents=8, pool=32_768)
    assert sum(report.evicted_pages.values()) > 0
    assert report.num_failed == 0


def test_few_states_evict_checkpoints_and_say_why(trace: Trace) -> None:
    report = replay(trace, states=4)
    assert sum(report.evicted_states.values()) > 0
    assert report.num_failed == 0


def test_the_same_seed_gives_the_same_report_and_another_one_another(trace: Trace) -> None:
    first, again, other = (replay(trace, pool=65_536, seed=seed) for seed in (1, 1, 2))
    assert first.simulated_seconds == again.simulated_seconds != other.simulated_seconds
    assert first.prefill_tokens == again.prefill_tokens


def test_a_small_pool_answers_more_when_agents_are_held_than_first_come_first_served(trace: Trace) -> None:
    capacity = Capacity(8, 32_768, 32, num_workers=4, context_tokens=trace.longest_tokens + 1)
    held, served = (
        Replay(trace, capacity, Device(), 0, LineRules(order=order)).run() for order in ("agents", "arrival")
    )
    assert held.hit_rate > served.hit_rate + 0.1
    assert held.wait_seconds.max > served.wait_seconds.max, "which is what it costs"


def test_times_are_those_of_the_device(trace: Trace) -> None:
    report = replay(trace)
    assert 0.0 < report.first_token_seconds.p50 <= report.first_token_seconds.max
    assert report.wait_seconds.max <= report.first_token_seconds.max
    assert 0.0 < report.stall_seconds.p50 < 0.1
    assert report.simulated_seconds > 8 / 4 * 12 * 10


def test_calls_beyond_the_context_are_skipped_and_counted(trace: Trace) -> None:
    calls = [call for session in trace.sessions for call in session]
    context = sorted(call.num_tokens for call in calls)[len(calls) // 2]
    capacity = Capacity(4, 131_072, 16, 4, context)
    report = Replay(trace, capacity, Device(), 0).run()
    assert report.num_calls + report.num_skipped == len(calls)
    assert report.num_skipped >= len(calls) // 2 - 1


def test_a_page_that_is_never_given_back_is_found(trace: Trace) -> None:
    capacity = Capacity(4, 131_072, 0, 4, trace.longest_tokens + 1)
    leaking = Replay(trace, capacity, Device(), 0)
    opening = leaking.cache.open(b"nobody", array("I"), max_match=0)
    assert leaking.cache.reserve(opening.path, 100)
    with pytest.raises(IntegrityError):
        leaking.run()


class TestTheVerb:
    def test_prints_json_with_the_hit_rate(
        self, trace_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["simulate", str(trace_path), "--agents", "4", "--orders", "2", "--json"]) == 0
        parsed = json.loads(capsys.readouterr().out)
        assert 0.5 < parsed["hit_rate"] < 1.0
        assert len(parsed["orders"]) == 2
        assert parsed["hit_rate_min"] <= parsed["hit_rate"] <= parsed["hit_rate_max"]

    def test_prints_a_table_for_people(self, trace_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["simulate", str(trace_path), "--pool-tokens", "65536", "--states", "8"]) == 0
        printed = capsys.readouterr().out
        assert "hit rate" in printed and "wait for a worker" in printed

    @pytest.mark.parametrize(
        ("flags", "says"),
        [
            (["--agents", "0"], "--agents is 0"),
            (["--states", "-1"], "--states is -1"),
            (["--flops", "0"], "--flops is 0"),
            (["--context", "99999999"], "does not fit a pool"),
            (["--context", "100"], "every call is longer"),
        ],
    )
    def test_refuses_what_cannot_be(
        self, trace_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
    ) -> None:
        assert main(["simulate", str(trace_path), *flags]) == 2
        assert says in capsys.readouterr().err

    def test_names_a_trace_that_cannot_be_read(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["simulate", "absent.jsonl"]) == 2
        assert "absent.jsonl: No such file" in capsys.readouterr().err

    def test_needs_no_mlx(self) -> None:
        script = "import workers.__main__, workers.simulate_replay, sys; print('mlx.core' in sys.modules)"
        printed = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        assert printed.strip() == "False"


def test_a_reader_who_has_enough_is_no_failure(trace_path: Path) -> None:
    command = [sys.executable, "-m", "workers", "simulate", str(trace_path), "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"", "no traceback, and no progress where there is no terminal"
        assert process.wait(60) == 0


def test_progress_goes_to_a_terminal(tmp_path: Path) -> None:
    path = write(tmp_path / "agents.jsonl", growing_sessions(10, 12))
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "workers", "simulate", str(path), "--json", "--orders", "2"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    assert b"order 2 of 2: 100 of 120 calls" in shown
    assert json.loads(done.stdout)["hit_rate"] > 0


def test_callers_that_say_nothing_are_served_too(trace: Trace) -> None:
    told, silent = replay(trace, pool=65_536), replay(trace.without_hints(), pool=65_536)
    assert silent.num_failed == 0 and silent.num_calls == told.num_calls
    assert silent.evicted_pages["of agents that are gone"] < told.evicted_pages["of agents that are gone"]


def test_hints_are_a_flag(trace_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = {}
    for hints in ("trace", "none"):
        arguments = ["simulate", str(trace_path), "--json", "--pool-tokens", "32768", "--hints", hints]
        assert main(arguments) == 0
        rates[hints] = json.loads(capsys.readouterr().out)["simulated_seconds"]
    assert rates["trace"] != rates["none"]
