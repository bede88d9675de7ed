"""An engine without a model that still behaves: it answers prompts as told, token by token, pauses at a
token's border, goes on where it was and counts what it computes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from msgspec import structs
from tokenizers import Tokenizer

from gateway.text.tokenizer import pack_token_ids, unpack_token_ids
from workers.messages import (
    Cancelled,
    EngineInfo,
    Finished,
    Paused,
    Started,
    Submit,
    Timings,
    Tokens,
    TurnEnd,
    Usage,
)

from .fake_engine import FakeEngine, Turn, until
from .samples import QWEN, bundle_of, byte_level_tokenizer

Answers = Callable[[str], str]
"""The answer to a prompt's text."""

END = "<|im_end|>"


def tokenizer() -> Tokenizer:
    """The engine's, with a Qwen template."""
    return byte_level_tokenizer()


class TalkingEngine(FakeEngine):
    """`allowed`: how many tokens each attempt may generate before it waits; None: all."""

    def __init__(self, url: str, answers: Answers, *, engine_id: str = "e1", workers: int = 4) -> None:
        super().__init__(url, _talk, engine_id=engine_id, workers=workers)
        self.bundle = bundle_of(tokenizer(), QWEN)
        self.answers = answers
        self.allowed: int | None = None
        self.allowed_of: dict[str, int | None] = {}  # by run, where it is not `allowed`
        self.seconds_per_token = 0.0
        self.is_starting = True  # False: turns stay in its line
        self.num_computed = 0  # prompt tokens, over all attempts
        self._seen: list[bytes] = []  # what it has in its cache

    @property
    def info(self) -> EngineInfo:
        """As published."""
        return structs.replace(super().info, context_length=4096, vocab_size=700)

    def prompt_of(self, number: int) -> str:
        """The text of the Submit of that number, from 0."""
        return text_of(self.turns[number].submit.token_ids)

    async def talk(self, turn: Turn) -> None:
        """One attempt."""
        submit = turn.submit
        with contextlib.suppress(TimeoutError):
            await until(lambda: self.is_starting or turn.is_cancelled or turn.is_paused, 30)
        if not self.is_starting:
            await self._end(turn, 0, None)
            return
        ids, num_before = submit.token_ids, submit.generated_tokens
        cached = max((_common(ids, seen) for seen in self._seen), default=0)
        self.num_computed += len(ids) // 4 - cached
        await self.write(turn, Started(worker=0, cached_tokens=cached))
        prompt = ids[: len(ids) - 4 * num_before]
        answer = answer_ids(self.answers(text_of(prompt)))
        produced = num_before
        while not (turn.is_cancelled or turn.is_paused or produced in (len(answer), submit.max_tokens)):
            allowed = self.allowed_of.get(submit.run_id, self.allowed)
            if allowed is not None and produced - num_before >= allowed:
                await asyncio.sleep(0.005)
                continue
            token = answer[produced]
            text = "" if token == answer[-1] else tokenizer().decode([token], skip_special_tokens=False)
            await self.write(turn, Tokens(token_ids=pack_token_ids([token]), text=text))
            produced += 1
            await asyncio.sleep(self.seconds_per_token)
        self._seen.append(prompt + pack_token_ids(answer[:produced]))
        is_whole = produced == len(answer)
        await self._end(turn, cached, "stop" if is_whole else "length", produced)

    async def _end(self, turn: Turn, cached: int, reason: str | None, produced: int | None = None) -> None:
        submit: Submit = turn.submit
        num_prompt = len(submit.token_ids) // 4 - submit.generated_tokens
        usage = Usage(
            prompt_tokens=num_prompt,
            cached_tokens=min(cached, num_prompt if submit.most_cached is None else submit.most_cached),
            completion_tokens=submit.generated_tokens if produced is None else produced,
        )
        timings = Timings(worker=0 if produced is not None else None)
        end: TurnEnd
        if turn.is_cancelled:
            end = Cancelled(usage=usage, timings=timings)
        elif turn.is_paused:
            end = Paused(usage=usage, timings=timings)
        else:
            end = Finished(reason=reason or "stop", usage=usage, timings=timings)
        turn.has_ended = True
        await self.write(turn, end)


async def _talk(engine: FakeEngine, turn: Turn) -> None:
    assert isinstance(engine, TalkingEngine)
    await engine.talk(turn)


def text_of(token_ids: bytes) -> str:
    """Ids as text, control tokens included."""
    text: str = tokenizer().decode(list(unpack_token_ids(token_ids)), skip_special_tokens=False)
    return text


def answer_ids(text: str) -> list[int]:
    """An answer as the engine writes it: its text and the template's end token."""
    return [*tokenizer().encode(text, add_special_tokens=False).ids, *tokenizer().encode(END).ids]


def _common(one: bytes, other: bytes) -> int:
    length = 0
    for start in range(0, min(len(one), len(other)), 4):
        if one[start : start + 4] != other[start : start + 4]:
            break
        length += 1
    return length
