"""`tetrarch serve` over real processes and a real bus: what a user sees when parts of it die.

The home's path holds a space everywhere. The model has one embedding row of NaN, which only one test touches.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.models import make_model

from .served import ROOT, Answer, Client, Served, all_processes, until, wait_for

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]

POISONED = 7
"""The token whose embedding is NaN."""

LONG = 6000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a model") / "tiny"
    make_model(folder, "llama", tie_word_embeddings=False, max_position_embeddings=8192)
    weights: Any = mx.load(str(folder / "model.safetensors"))
    weights["model.embed_tokens.weight"][POISONED] = float("nan")
    weights["lm_head.weight"][POISONED] = 0.0  # never the most likely one: no answer brings it in
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Served]:
    """One server for all tests that leave it as they found it."""
    served = Served(tmp_path_factory.mktemp("a home") / "with a space", model, "--pool-tokens", "65536")
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


@pytest.fixture
def own(tmp_path: Path, model: Path) -> Iterator[Served]:
    """A server to stop or kill."""
    served = Served(tmp_path / "own home", model, "--pool-tokens", "32768")
    try:
        served.wait_ready()
        yield served
    finally:
        served.close()


def prompt(seed: int, length: int = 100) -> list[int]:
    """Token ids without the poisoned one."""
    source = random.Random(seed)
    return [source.randrange(POISONED + 1, 250) for _ in range(length)]


async def start_streams(client: Client, seeds: range) -> tuple[list[Answer], list[asyncio.Task[Answer]]]:
    """Long streams that all have text already."""
    answers = [Answer() for _ in seeds]
    tasks = [
        asyncio.create_task(client.stream(prompt(seed), LONG, answer))
        for seed, answer in zip(seeds, answers, strict=True)
    ]
    await until(lambda: all(answer.text for answer in answers), 30)
    return answers, tasks


async def test_the_engine_counts_what_the_bus_takes(shared: Served) -> None:
    async with Client(shared.url) as client:
        await client.until_served()
        health = await client.health()
    in_force = health["engines"][0]["settings"]["workers"]
    assert in_force["bus_bytes"] == health["gateway"]["settings"]["bus_memory_bytes"] > 0


async def test_200_clients_leave_in_all_phases_and_no_page_stays(shared: Served) -> None:
    chance = random.Random(11)
    gate = asyncio.Semaphore(16)
    async with Client(shared.url) as client:
        await client.until_served()

        async def leave(number: int) -> None:
            async with gate:
                length, tokens = chance.choice((1, 63, 64, 500, 3000)), chance.choice((1, 20, 2000))
                if chance.random() < 0.5:
                    call = asyncio.create_task(client.stream(prompt(number, length), tokens))
                else:
                    call = asyncio.create_task(client.plain(prompt(number, length), tokens))  # type: ignore[arg-type]
                await asyncio.sleep(chance.choice((0.0, 0.005, 0.05, 0.2, 0.5)))
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

        await asyncio.gather(*(leave(number) for number in range(200)))
        stats = await client.until_idle(60)
        facts = (await client.health())["engines"][0]["kv"]
        assert stats["num_free_pages"] + stats.get("num_tree_pages", 0) == facts["num_pages"]
        await client.until_served(10)


async def test_a_killed_engine_ends_four_streams_clearly_and_comes_back(shared: Served) -> None:
    async with Client(shared.url) as client:
        await client.until_served()
        _, tasks = await start_streams(client, range(100, 104))
        shared.kill_child("workers engine")
        killed = time.monotonic()
        answers = await asyncio.gather(*tasks)
        assert time.monotonic() - killed < 5
        for answer in answers:
            assert [error["code"] for error in answer.errors] == ["engine_lost"], answer
            assert not answer.broken
            assert not answer.finish_reasons
        await client.until_served()
        assert "engine ended (killed by SIGKILL)" in shared.words


async def stop_and_continue_engine(served: Served, seconds: float) -> None:
    async with Client(served.url) as client:
        await client.until_served()
        seeds = range(200, 202)
        answers, tasks = await start_streams(client, seeds)
        engine = served.child("workers engine")
        os.kill(engine, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(engine, signal.SIGCONT)
        await asyncio.gather(*tasks)
        for answer in answers:
            assert [error["code"] for error in answer.errors] == ["engine_lost"], answer
            assert not answer.finish_reasons
        told = [answer.text for answer in answers]
        await client.until_served()
        for answer, text in zip(answers, told, strict=True):  # nothing was added behind the end
            again = Answer(run_id=answer.run_id)
            await client.resume(again)
            assert again.text == text
            assert len(again.errors) == 1
        for seed, text in zip(seeds, told, strict=True):  # and nothing wrong was said before it
            reference = await client.stream(prompt(seed), 4 * len(text) + 64)
            assert text
            assert reference.text.startswith(text)
        await client.until_idle()


async def test_an_engine_that_slept_past_its_lease_says_nothing_twice(shared: Served) -> None:
    await stop_and_continue_engine(shared, 6)


@pytest.mark.slow
async def test_an_engine_that_slept_half_a_minute_says_nothing_twice(shared: Served) -> None:
    await stop_and_continue_engine(shared, 30)


async def test_a_killed_bus_returns_and_a_stream_goes_on(shared: Served) -> None:
    async with Client(shared.url) as client:
        await client.until_served()
        expected = await client.stream(prompt(300), 800)
        answer = Answer()
        task = asyncio.create_task(client.stream(prompt(300), 800, answer))
        await until(lambda: bool(answer.text))
        shared.kill_child("valkey-server")
        await task
        assert not answer.broken
        if not answer.errors:  # the engine was back within its lease
            assert answer.text == expected.text
            assert answer.finish_reasons == ["length"]
            assert len(answer.usages) == 1
        else:
            assert [error["code"] for error in answer.errors] == ["engine_lost"]
            assert expected.text.startswith(answer.text)
        await client.until_served()


async def test_a_client_resumes_behind_a_killed_gateway(shared: Served) -> None:
    async with Client(shared.url) as client:
        await client.until_served()
        expected = await client.stream(prompt(400), 1000)
        answer = Answer()
        task = asyncio.create_task(client.stream(prompt(400), 1000, answer))
        await until(lambda: bool(answer.text))
        shared.kill_child("gateway gateway")
        await task
        assert answer.broken
        assert not answer.is_done
        answer.broken = ""
        deadline = time.monotonic() + 30
        while not answer.is_done and time.monotonic() < deadline:
            answer.errors.clear()
            await client.resume(answer)
            await asyncio.sleep(0.2)
        assert answer.text == expected.text
        assert answer.finish_reasons == ["length"]
        await client.until_idle()


@pytest.mark.slow
async def test_a_run_that_nobody_resumes_ends(shared: Served) -> None:
    async with Client(shared.url) as client:
        await client.until_served()
        _, tasks = await start_streams(client, range(500, 501))
        shared.kill_child("gateway gateway")
        await asyncio.gather(*tasks)
        await client.until_served()
        await client.until_idle(60)


async def test_nan_in_one_row_fails_that_turn_alone(shared: Served) -> None:
    async with Client(shared.url) as client:
        await client.until_served()
        prompts = [prompt(seed, 130) for seed in range(600, 604)]
        alone = [await client.plain(tokens, 60) for tokens in prompts[1:]]
        prompts[0][100] = POISONED
        poisoned, *others = await asyncio.gather(*(client.plain(tokens, 60) for tokens in prompts))
        assert poisoned[1]["error"]["code"] == "row_fault"
        texts = [body["choices"][0]["text"] for _, body in others]
        assert [body["choices"][0]["text"] for _, body in alone] == texts
        repeat = await client.plain(prompts[0][:100] + prompts[1][:30], 20)
        assert repeat[0] == 200
        await client.until_idle()


def test_a_second_serve_of_the_same_home_names_the_first(shared: Served, model: Path) -> None:
    command = [sys.executable, "-m", "gateway", "serve", "--home", str(shared.home), "--model", str(model)]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert f"process {shared.process.pid}" in second.stderr
    assert shared.url in second.stderr
    assert str(shared.home) in second.stderr


def test_a_taken_port_is_told_with_the_remedy(shared: Served, tmp_path: Path, model: Path) -> None:
    port = shared.url.rpartition(":")[2]
    command = [sys.executable, "-m", "gateway", "serve", "--home", str(tmp_path), "--port", port]
    second = subprocess.run(
        [*command, "--model", str(model)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 2
    assert "--port" in second.stderr
    assert port in second.stderr


async def test_ctrl_c_delivers_the_last_events_and_leaves_nothing(shared: Served, own: Served) -> None:
    """Beside another server, with a home and port of its own."""
    async with Client(own.url) as client, Client(shared.url) as neighbour:
        await client.until_served()
        family = own.family()
        answers, tasks = await start_streams(client, range(700, 701))
        begun = Answer()
        short = asyncio.create_task(client.stream(prompt(701), 50, begun))
        await until(lambda: bool(begun.text), 30)
        own.process.send_signal(signal.SIGINT)
        await asyncio.gather(*tasks, short)
        assert begun.finish_reasons == ["length"], begun
        assert not begun.broken
        assert [error["code"] for error in answers[0].errors] == ["server_stopping"], answers[0]
        assert not answers[0].broken
        await asyncio.to_thread(own.process.wait, 30)
        assert own.process.returncode == 0
        assert not family.keys() & all_processes().keys()
        await neighbour.until_served()


async def test_kill_9_of_serve_leaves_nothing_and_the_next_one_starts(own: Served, model: Path) -> None:
    async with Client(own.url) as client:
        await client.until_served()
        family = own.family()
        assert len(family) == 4, family
        own.process.kill()
        own.process.wait()
    next_one = Served(own.home, model, "--pool-tokens", "32768")
    try:
        await asyncio.to_thread(wait_for, lambda: not family.keys() & all_processes().keys(), 20)
        await asyncio.to_thread(next_one.wait_ready)
        async with Client(next_one.url) as client:
            await client.until_served(10)
    finally:
        next_one.close()


def test_a_model_that_cannot_be_used_ends_serve_with_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "gpt9"}))
    served = Served(tmp_path / "home", broken)
    try:
        wait_for(lambda: served.process.poll() is not None, 60)
        assert served.process.returncode == 2
        assert "gpt9" in served.words
    finally:
        served.close()
