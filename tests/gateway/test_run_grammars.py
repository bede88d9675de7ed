"""Grammars over a run's attempts and turns: an attempt goes on in its own, a further turn begins one anew."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from gateway.runs.commands import ToolOutput
from gateway.runs.spec import ForkPoint, RunSpec
from tests.conftest import ValkeyServer
from workers.messages import Grammar

from .chatting import CALL, assert_adds_up, chatting, ended, generated, reaches, result, spec
from .fake_engine import Turn
from .grammar_walk import allows
from .samples import QWEN, TOOLS, bundle_of
from .talking_engine import TalkingEngine, answer_ids, text_of, tokenizer
from .test_run_schemas import FORMAT, GOOD
from .test_tool_calls import THINKING

THOUGHT = "Let me see"
CLOSED = f"{THOUGHT}\n</think>\n\n"
OPENS = "{{- '<|im_start|>assistant\\n' }}"
USUALLY_THINKING = QWEN.replace(
    OPENS, OPENS + "{%- if messages[-1].role != 'tool' %}{{- '<think>\\n' }}{%- endif %}"
)


class StrictEngine(TalkingEngine):
    """Says what the test tells it, and looks at each attempt whether its grammar allows that."""

    def __init__(self, url: str, answers: Callable[[str], str], template: str = QWEN) -> None:
        super().__init__(url, answers)
        self.bundle = bundle_of(tokenizer(), template)
        self.refused: list[str] = []

    async def talk(self, turn: Turn) -> None:
        """One attempt."""
        submit = turn.submit
        said = text_of(submit.token_ids[len(submit.token_ids) - 4 * submit.generated_tokens :])
        prompt = text_of(submit.token_ids[: len(submit.token_ids) - 4 * submit.generated_tokens])
        answer = self.answers(prompt)
        if not answer.startswith(said) or not obeys(submit.grammar, answer):
            self.refused.append(answer)
        await super().talk(turn)


def obeys(grammar: Grammar | None, text: str) -> bool:
    """Whether a whole answer is one of the grammar's."""
    if grammar is None:
        return True
    if grammar.after is None:
        return allows(grammar.source, text)
    _, found, text = text.partition(grammar.after)
    return bool(found) and allows(grammar.source, text)


@pytest.fixture
async def engine(valkey: ValkeyServer) -> AsyncIterator[StrictEngine]:
    async with StrictEngine(valkey.url, lambda prompt: GOOD) as talking:
        yield talking


def asked(**body: Any) -> RunSpec:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "response_format": FORMAT}
    return RunSpec(kind="run", body=msgspec.json.encode({**fields, **body}))


def grammars(engine: StrictEngine) -> list[Grammar]:
    """Those of all attempts: each has one."""
    told = [turn.submit.grammar for turn in engine.turns]
    found = [grammar for grammar in told if grammar is not None]
    assert len(found) == len(told) and not engine.refused
    return found


async def test_an_answer_that_was_paused_twice_goes_on_in_its_grammar(
    engine: StrictEngine, valkey: ValkeyServer
) -> None:
    async with chatting(valkey.url) as gate:
        engine.allowed = 3
        run_id = await gate.runs.create(asked())
        for num_tokens in (3, 6):
            await generated(gate, run_id, num_tokens)
            await gate.runs.pause(run_id)
            assert (await gate.runs.resume(run_id)).recomputed_tokens == 0
        await generated(gate, run_id, 9)
        await gate.runs.pause(run_id)
        engine.allowed = None
        await gate.runs.resume(run_id)
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        kept = await result(gate, run_id)
        assert (kept.text, kept.json, kept.turns) == (GOOD, GOOD, 1)
        assert len(set(map(str, grammars(engine)))) == 1
        assert [turn.submit.generated_tokens for turn in engine.turns] == [0, 3, 6, 9]


async def test_a_gateway_that_takes_a_run_over_goes_on_in_the_same_grammar(
    engine: StrictEngine, valkey: ValkeyServer
) -> None:
    async with chatting(valkey.url, "g2") as second:
        async with chatting(valkey.url, "g1", kill=True) as first:
            engine.allowed = 4
            run_id = await first.runs.create(held())
            await generated(first, run_id, 4)
            await first.runs.pause(run_id)
        engine.allowed = None
        with valkey.client() as client:
            client.delete("tetrarch:1:gateway:g1:lease")
        await second.runs.resume(run_id)
        await ended(second, run_id, 20)
        assert (await result(second, run_id)).json == GOOD
        first_grammar, second_grammar = grammars(engine)
        assert first_grammar == second_grammar


def held() -> RunSpec:
    """Its schema is the run's, not the body's."""
    schema = msgspec.json.encode(FORMAT["json_schema"]["schema"])  # type: ignore[index]
    return spec(result_schema=schema)


async def test_a_steered_answer_begins_its_grammar_anew(engine: StrictEngine, valkey: ValkeyServer) -> None:
    async with chatting(valkey.url) as gate:
        engine.allowed = 5
        run_id = await gate.runs.create(asked())
        await generated(gate, run_id, 5)
        assert (await gate.runs.steer(run_id, "Larger")).applied == "now"
        await generated(gate, run_id, 10)
        await gate.runs.pause(run_id)
        engine.allowed = None
        await gate.runs.resume(run_id)
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        assert (await result(gate, run_id)).json == GOOD
        assert [turn.submit.generated_tokens for turn in engine.turns] == [0, 0, 5]
        assert len(set(map(str, grammars(engine)))) == 1
        assert GOOD[:4] in engine.prompt_of(1) and GOOD not in engine.prompt_of(1)


def calls(prompt: str) -> str:
    return "done" if "contents" in prompt else CALL


async def test_only_a_runs_first_turn_is_forced_to_call(valkey: ValkeyServer) -> None:
    async with StrictEngine(valkey.url, calls) as engine, chatting(valkey.url) as gate:
        run_id = await gate.runs.create(asked(response_format=None, tools=TOOLS, tool_choice="required"))
        state = await reaches(gate, run_id, "input_required")
        outputs = [ToolOutput(call_id=state.calls[0].id, output="contents")]
        assert (await gate.runs.respond(run_id, outputs)).turn == 2
        await ended(gate, run_id)
        assert (await result(gate, run_id)).text == "done"
        forced, free = (turn.submit.grammar for turn in engine.turns)
        assert not engine.refused and free is None
        assert forced is not None and not allows(forced.source, "done")
        child = await gate.runs.fork(
            ForkPoint(run=run_id), asked(response_format=None, tools=TOOLS, tool_choice="required")
        )
        await ended(gate, child.run_id)
        grammar = engine.turns[2].submit.grammar
        assert grammar is not None and not allows(grammar.source, "done"), "a fork's first turn is its own"


def thinks(prompt: str) -> str:
    """Where the prompt has opened a thought it is closed first."""
    if "contents" not in prompt and "read_file" in prompt:
        return CLOSED + CALL
    return CLOSED + GOOD if prompt.endswith("<think>\n") else GOOD


@pytest.mark.parametrize("num_tokens", [3, len(answer_ids(CLOSED)) + 2], ids=["thought", "answer"])
async def test_a_steered_thinker_thinks_before_its_grammar_again(
    valkey: ValkeyServer, num_tokens: int
) -> None:
    async with StrictEngine(valkey.url, thinks, THINKING) as engine, chatting(valkey.url) as gate:
        engine.allowed = num_tokens
        run_id = await gate.runs.create(asked())
        await generated(gate, run_id, num_tokens)
        await gate.runs.steer(run_id, "On")
        engine.allowed = None
        state = await ended(gate, run_id)
        assert_adds_up(valkey, run_id, state)
        kept = await result(gate, run_id)
        assert (kept.json, kept.reasoning.strip()) == (GOOD, THOUGHT)
        assert [grammar.after for grammar in grammars(engine)] == ["</think>", "</think>"]
        prompt = engine.prompt_of(1)
        assert prompt.endswith("user\nOn<|im_end|>\n<|im_start|>assistant\n<think>\n")
        assert prompt.count("<think>") == prompt.count("</think>") + 1


async def test_a_turn_whose_prompt_opens_no_thought_waits_for_none(valkey: ValkeyServer) -> None:
    """The template opens one after a user's text and none after a tool's result."""
    async with StrictEngine(valkey.url, thinks, USUALLY_THINKING) as engine, chatting(valkey.url) as gate:
        run_id = await gate.runs.create(asked(tools=TOOLS))
        state = await reaches(gate, run_id, "input_required")
        outputs = [ToolOutput(call_id=state.calls[0].id, output="contents")]
        await gate.runs.respond(run_id, outputs)
        await ended(gate, run_id)
        kept = await result(gate, run_id)
        assert (kept.json, kept.reasoning) == (GOOD, "")
        assert [grammar.after for grammar in grammars(engine)] == ["</think>", None]
        assert engine.prompt_of(1).endswith("<|im_start|>assistant\n")


async def test_a_steering_text_that_ends_in_a_thoughts_tag_opens_none(valkey: ValkeyServer) -> None:
    silent = QWEN.replace("{%- if add_generation_prompt %}", "{%- if false %}")
    async with StrictEngine(valkey.url, lambda prompt: GOOD, silent) as engine, chatting(valkey.url) as gate:
        engine.allowed = 5
        run_id = await gate.runs.create(asked())
        await generated(gate, run_id, 5)
        await gate.runs.steer(run_id, "<think>")
        engine.allowed = None
        await ended(gate, run_id)
        assert (await result(gate, run_id)).json == GOOD
        assert [grammar.after for grammar in grammars(engine)] == [None, None]
