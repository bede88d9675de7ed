"""Stand-ins that behave: a clock, a byte tokenizer, and a runner with real page memory and no model.

The runner's next token is a hash of the whole context as it reads it through the page tables it is given, so
that a wrong page, a wrong copy or a stale row gives a wrong token.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.errors import DeadEnd
from workers.messages import Sampling, Submit
from workers.plan import Candidates, RowSampling, Segment, SegmentResult, StepPlan, StepResult
from workers.text import Detokenizer
from workers.turn import TurnRules

END_ID = 256
VOCAB_SIZE = 257
GARBAGE = 0xBADBADBA


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: token id = byte, and END_ID is the special <|end|>."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def fake_rules(*, context_length: int = 1024) -> TurnRules:
    return TurnRules(
        detokenizer=Detokenizer(byte_tokenizer()),
        namespace=b"fake model, 8 bit",
        context_length=context_length,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({END_ID}),
    )


def fake_submit(
    run_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    sampling: Sampling | None = None,
    attempt: int = 1,
    stop: tuple[str, ...] = (),
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    tenant: str = "",
    agent: str = "",
    **hints: Any,
) -> Submit:
    return Submit(
        run_id=run_id,
        attempt=attempt,
        incarnation=1,
        digest="",
        token_ids=array("I", prompt).tobytes(),
        max_tokens=max_tokens,
        sampling=sampling or Sampling(temperature=0.0),
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        tenant=tenant,
        agent=agent,
        **hints,
    )


def _row_value(state: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), state ^ 0x5EED)


def _next_state(state: int, row_value: int) -> int:
    return zlib.crc32(row_value.to_bytes(4, "little"), state)


@dataclass(frozen=True)
class FakeModel:
    """Maps a context's state to the next token, one of `alphabet`; a temperature mixes in seed and step."""

    alphabet: bytes = b"abcdefgh \xc3\xa9"
    end_every: int = 16  # one token in so many is END_ID; 0: never

    def sample(self, state: int, row: RowSampling) -> int:
        if row.sampling.temperature:
            state = zlib.crc32(f"{row.seed} {row.step}".encode(), state)
        if row.step != len(row.generated):
            raise ValueError("the row's step is not the number of generated tokens")
        is_end = self.end_every and state % self.end_every == 0
        token_id = END_ID if is_end else self.alphabet[(state >> 8) % len(self.alphabet)]
        if row.constraint is None:
            return token_id
        allowed = row.constraint.allowed()
        if allowed[token_id]:
            return token_id
        others = [one for one in self.alphabet if allowed[one]] or np.flatnonzero(allowed).tolist()
        return others[(state >> 8) % len(others)]

    def generate(self, submit: Submit, num_tokens: int) -> list[int]:
        """The naive generator: this turn alone, without pages, ends or limits."""
        prompt = array("I")
        prompt.frombytes(submit.token_ids)
        generated = array("I")
        state = 0
        for token_id in prompt:
            state = _next_state(state, _row_value(state, token_id))
        for step in range(num_tokens):
            seed = submit.sampling.seed or 0
            token_id = self.sample(state, RowSampling(submit.sampling, seed, step, prompt, generated))
            generated.append(token_id)
            state = _next_state(state, _row_value(state, token_id))
        return list(generated)


@dataclass(frozen=True)
class FakeState:
    """A recurrent state: how many tokens it has seen, and their digest, which is the last hidden row too."""

    position: int
    digest: int


ZERO_STATE = FakeState(0, 0)


class BrokenPlan(BaseException):
    """A plan that no model could run. The engine, which survives a failed step, does not survive this."""


class FakeRunner:
    """Evaluates plans over simulated page memory; time passes on the clock by rows.

    With `num_states` it is a hybrid: each worker has a live state, and there are checkpoint rows, after them
    `num_small_states` small ones. A state that is not exactly the one of the tokens before a segment fails an
    assertion, and so does a read of a row that a state has left.
    """

    def __init__(
        self,
        num_pages: int,
        clock: FakeClock,
        *,
        page_tokens: int,
        model: FakeModel | None = None,
        num_states: int | None = None,
        num_small_states: int = 0,
    ) -> None:
        self.model = model or FakeModel()
        self.plans: list[StepPlan] = []
        self.base_seconds = 0.05
        self.row_seconds = 0.002
        self.depth_seconds = 0.0  # what each prefill row costs more for each token before it
        self.fault_of: Callable[[Segment], str | None] = lambda segment: None
        self.are_rows_spoiled = True  # by a fault
        self.fail_next: Exception | None = None
        self.num_rebuilds = 0
        self.num_restored = 0  # from a position above 0
        self.num_restored_small = 0  # of these, from a small row
        self.keeps_plans = True
        self._clock = clock
        self._page_tokens = page_tokens
        self._num_pages = num_pages
        self._num_states = num_states
        self._num_small_states = num_small_states
        self.rebuild()
        self.num_rebuilds = 0

    def rebuild(self) -> None:
        self.num_rebuilds += 1
        self._rows = [[GARBAGE] * self._page_tokens for _ in range(self._num_pages)]
        self._live: dict[int, FakeState | None] = {}  # by worker; None: garbage
        self._checkpoints: list[FakeState | None] = [None] * (
            (self._num_states or 0) + self._num_small_states
        )

    def run(self, plan: StepPlan) -> StepResult:
        if self.keeps_plans:
            self.plans.append(plan)
        seconds = self._seconds(plan)
        self._clock.advance(seconds)
        try:
            self._prepare(plan)
            self._check(plan)
            for segment in plan.segments:
                self._write(segment)
        except AssertionError as broken:
            raise BrokenPlan(str(broken)) from broken
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            for segment in plan.segments:
                self._spoil(segment)
            raise error
        # Reads come after all writes, as in the model: a row written into another's page is seen.
        return StepResult(tuple(self._result(segment) for segment in plan.segments), seconds)

    def _seconds(self, plan: StepPlan) -> float:
        seconds = self.base_seconds + self.row_seconds * plan.num_prefill_rows
        for segment in plan.segments:
            if not segment.is_decode:
                seconds += self.depth_seconds * len(segment.token_ids) * (segment.start + segment.end) / 2
        return seconds

    def _prepare(self, plan: StepPlan) -> None:
        """Demotions, saves of those who left, page copies, restores."""
        for move in plan.demotions:
            assert self._is_exact(move.source) and not self._is_exact(move.target), (
                "a move in the wrong direction"
            )
            moved, self._checkpoints[move.source] = self._checkpoints[move.source], None
            assert moved is not None, "a row without a state is to be moved"
            self._checkpoints[move.target] = moved
        for save in plan.saves_before:
            left = self._live[save.worker]
            assert left is not None, "the state that is to be saved is garbage"
            self._checkpoints[save.row] = left
        for copy in plan.copies:
            self._rows[copy.target][: copy.num_tokens] = self._rows[copy.source][: copy.num_tokens]
        for restore in plan.restores:
            state = ZERO_STATE if restore.row is None else self._checkpoints[restore.row]
            assert state is not None, "a checkpoint row that was never saved is restored"
            self._live[restore.worker] = state
            if restore.row is not None and state.position > 0:
                self.num_restored += 1
                self.num_restored_small += not self._is_exact(restore.row)

    def _is_exact(self, row: int) -> bool:
        return self._num_states is not None and row < self._num_states

    def _check(self, plan: StepPlan) -> None:
        written = [
            (segment.pages[position // self._page_tokens], position % self._page_tokens)
            for segment in plan.segments
            for position in range(max(segment.start, segment.num_sealed), segment.end)
        ]
        assert len(written) == len(set(written)), "two rows of a step share a place"
        assert len({segment.worker for segment in plan.segments}) == len(plan.segments)
        assert sum(not segment.is_decode for segment in plan.segments) <= 1, "more than one prefill in a step"
        rows = [restore.row for restore in plan.restores if restore.row is not None]
        saved = [segment.save for segment in plan.segments if segment.save is not None]
        saved += [save.row for save in plan.saves_before]
        assert len(saved) == len(set(saved)) and not set(saved) & set(rows), "a checkpoint row has two uses"
        assert all(self._is_exact(row) for row in saved), "a state is saved into a small row"
        targets = [move.target for move in plan.demotions]
        assert len(targets) == len(set(targets)), "two states move to one row"
        assert len({restore.worker for restore in plan.restores}) == len(plan.restores)
        for segment in plan.segments:
            self._check_state(segment)

    def _check_state(self, segment: Segment) -> None:
        if self._num_states is None:
            assert segment.save is None and segment.hidden_from is None
            assert segment.num_sealed <= segment.start and segment.token_ids
            return
        live = self._live[segment.worker]
        assert live is not None, "a worker's state is garbage"
        assert live.position == segment.start, f"{live.position} tokens are in the state, not {segment.start}"
        assert live.digest == self._state(segment, segment.start), "the state is another prefix's"
        if not segment.token_ids:
            assert segment.hidden_from is not None and segment.row is not None
            assert self._checkpoints[segment.hidden_from] == live, "the hidden row is another prefix's"

    def _state(self, segment: Segment, end: int) -> int:
        state = 0
        for position in range(end):
            page = segment.pages[position // self._page_tokens]
            state = _next_state(state, self._rows[page][position % self._page_tokens])
        return state

    def _write(self, segment: Segment) -> None:
        live = self._live.get(segment.worker)
        state = live.digest if live is not None else self._state(segment, segment.start)
        for position, token_id in enumerate(segment.token_ids, segment.start):
            value = _row_value(state, token_id)
            rows, index = (
                self._rows[segment.pages[position // self._page_tokens]],
                position % self._page_tokens,
            )
            if position < segment.num_sealed:
                assert rows[index] == value, "a sealed row is another prefix's"
            rows[index] = value
            state = _next_state(state, value)

    def _spoil(self, segment: Segment) -> None:
        self._live[segment.worker] = None
        for position in range(max(segment.start, segment.num_sealed), segment.end):
            page = segment.pages[position // self._page_tokens]
            self._rows[page][position % self._page_tokens] = GARBAGE

    def _result(self, segment: Segment) -> SegmentResult:
        fault = self.fault_of(segment)
        if fault is not None:
            self._live[segment.worker] = None
            if self.are_rows_spoiled:
                self._spoil(segment)
            return SegmentResult((), fault=fault, are_rows_spoiled=self.are_rows_spoiled)
        try:
            tokens = self._accepted(segment) if segment.row is not None else ()
        except DeadEnd as end:
            return SegmentResult((), fault=str(end), error="grammar_dead_end")
        self._keep_state(segment, segment.end - segment.num_proposed + max(len(tokens) - 1, 0))
        if segment.row is None or segment.row.sampling.top_logprobs is None:
            return SegmentResult(tokens)
        return SegmentResult(tokens, tuple(Candidates((token, -0.5), ((token, -0.5),)) for token in tokens))

    def _accepted(self, segment: Segment) -> tuple[int, ...]:
        """Proposed tokens as long as they are the model's own, and the model's next one."""
        assert segment.row is not None
        tokens: list[int] = []
        num_sure = len(segment.token_ids) - segment.num_proposed
        generated = list(segment.row.generated)
        for index in range(segment.num_proposed + 1):
            row = RowSampling(
                segment.row.sampling,
                segment.row.seed,
                segment.row.step + index,
                segment.row.prompt,
                generated + tokens,
                segment.row.constraint,
            )
            tokens.append(self.model.sample(self._state(segment, segment.start + num_sure + index), row))
            if index == segment.num_proposed or segment.token_ids[num_sure + index] != tokens[-1]:
                break
        return tuple(tokens)

    def _keep_state(self, segment: Segment, position: int) -> None:
        if self._num_states is None:
            return
        self._live[segment.worker] = FakeState(position, self._state(segment, position))
        if segment.save is not None:
            self._checkpoints[segment.save] = self._live[segment.worker]
