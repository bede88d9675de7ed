"""One Submit inside the engine: its tokens, its text, where it stands and how it ends. Knows no queue.

What is counted: a token that ends the turn by its id (EOS, a stop token) is neither sent nor counted nor
cached; the token that completes a stop string is sent and counted, its text is cut. At its end the path of a
turn with prompt p and completion c holds p + c tokens after a stop token and p + c - 1 otherwise, as the last
token was never fed; a turn that was ended in its prefill holds what its finished chunks wrote.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.cache import Kept, Kind, PageCopy, Path

from . import messages
from .derail import DerailRules, Watch
from .errors import TurnRefused
from .messages import ChosenLogprob, Retain, Sampling, Submit, Timings, TokenLogprob, Tokens, Usage
from .plan import Candidates, Constraint, PendingConstraint, RowSampling, StateRestore
from .text import Detokenizer, TextState

_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """What happened to one turn, as the bus shall tell it."""

    run_id: str
    attempt: int
    event: messages.Event


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a turn ended by itself: `stop`, `length` or `derailed`."""

    reason: str
    stop_text: str | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What sampled tokens came to: what to send, and the end if there was one."""

    tokens: Tokens | None
    num_rows: int  # so many of the step's rows are the turn's: one for each token up to the end
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Hints:
    """What the caller says about its agent's next calls, as in Submit; nothing depends on it but speed."""

    fork_tokens: int = 0
    expects: str = ""
    is_final: bool = False
    retain: Retain = "session"
    system_tokens: int = 0
    turn_tokens: int = 0
    explain: bool = False

    @property
    def is_last(self) -> bool:
        """Nobody comes back for what the turn computes."""
        return self.is_final or self.retain == "ephemeral"


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What all turns of one engine have in common."""

    detokenizer: Detokenizer
    namespace: bytes  # digest of model and KV format: prefixes are shared within it and a turn's namespace
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    derail: DerailRules = field(default_factory=DerailRules)


@dataclass(slots=True, eq=False)
class Turn:
    """A turn's state; times are the engine's clock in seconds."""

    run_id: str
    attempt: int
    tenant: str
    agent: str  # "": nobody in particular
    session: str  # the tree of agents that it belongs to
    parent: str  # the agent that called this one
    namespace: bytes
    prompt: array[int]
    max_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    text: TextState
    watch: Watch
    received_at: float
    stops_derailed: bool = True
    hints: Hints = Hints()
    hold_seconds: float | None = None  # it was paused: what it computed is held for so long
    pending: PendingConstraint | None = None  # its grammar is being built: it waits in line
    constraint: Constraint | None = None
    number: int = 0  # order of arrival
    generated: array[int] = field(default_factory=lambda: array("I"))
    path: Path | None = None  # while it holds a worker
    worker: int | None = None  # the last one it held
    copy: PageCopy | None = None  # belongs into its next step
    restore: StateRestore | None = None  # the same; hybrid models only
    num_matched: int = 0  # tokens whose pages the tree had when its path was opened
    kept_tokens: int = 0  # the deepest position on its path that it could be restored at
    num_checkpoints: int = 0  # that it took in its prefill
    due: Kind = Kind.TURN  # of the checkpoint that its step takes, if that takes one
    num_yielded: int = 0  # times that its prefill made room for a shorter one
    cached_tokens: int = 0
    most_cached: int | None = None  # earlier attempts have computed the rest of the prompt
    progress_tokens: int = 0  # the largest prefill progress that was told
    kept: Kept | None = None  # the end of what it published when it last left a worker
    started_at: float | None = None
    is_answered: bool = False  # ended by itself: not cancelled, not failed
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def is_paused(self) -> bool:
        """It has ended, and its run may be sent on from there."""
        return self.hold_seconds is not None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens: as long as the path must be to sample the next one."""
        return len(self.prompt) + len(self.generated)

    def tokens(self, start: int, end: int) -> array[int]:
        """Prompt and generated tokens at positions [start, end)."""
        num_prompt = len(self.prompt)
        if end <= num_prompt:
            return self.prompt[start:end]
        return self.prompt[start:] + self.generated[max(start - num_prompt, 0) : end - num_prompt]

    def row_sampling(self) -> RowSampling:
        """How the turn's next token is sampled."""
        return RowSampling(
            self.sampling, self.seed, len(self.generated), self.prompt, self.generated, self.constraint
        )

    def accept(self, token_ids: Sequence[int], candidates: Sequence[Candidates], now: float) -> Acceptance:
        """Take a step's sampled tokens, at least one. Nothing beyond an end is ever counted."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        taken: list[int] = []
        texts: list[str] = []
        ending: Ending | None = None
        num_left = self.max_tokens - len(self.generated)
        num_rows = 0
        for num_rows, token_id in enumerate(token_ids, 1):
            if token_id in self.stop_ids:
                ending = Ending("stop")
            else:
                delta = self.text.append(token_id)
                texts.append(delta.text)
                self.watch.see(delta.text, len(self.generated) + len(taken))
                taken.append(token_id)
                if delta.stopped is not None:
                    ending = Ending("stop", delta.stopped)
                    break
                if self._is_said(token_id):
                    ending = Ending("stop")
                elif num_rows == num_left:
                    ending = Ending("length")
            if ending is not None:
                texts.append(self.text.flush())
                break
        tokens = self._tokens(array("I", taken), "".join(texts), candidates)
        self.generated.extend(taken)  # last: a token that cannot be sent is not counted either
        return Acceptance(tokens, num_rows, ending)

    def _is_said(self, token_id: int) -> bool:
        """Whether the turn's grammar is complete with this token."""
        if self.constraint is None:
            return False
        self.constraint.advance(token_id)
        return self.constraint.is_complete

    def rest_of_text(self) -> Tokens | None:
        """Text that was held back, for the end of the turn."""
        text = self.text.flush()
        return Tokens(token_ids=b"", text=text) if text else None

    def usage(self) -> Usage:
        """Tokens so far, over all attempts; completion_tokens counts exactly those that were sent."""
        cached_tokens = min(self.cached_tokens, len(self.prompt))
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=cached_tokens if self.most_cached is None else min(cached_tokens, self.most_cached),
            completion_tokens=len(self.generated),
        )

    def timings(self, now: float) -> Timings:
        """Where the time until `now` went. The wait of a preempted turn counts for the phase it was in."""
        started = now if self.started_at is None else self.started_at
        first = now if self.first_token_at is None else self.first_token_at
        last = first if self.last_token_at is None else self.last_token_at
        return Timings(
            worker=self.worker,
            queue_seconds=started - self.received_at,
            prefill_seconds=first - started,
            decode_seconds=last - first,
        )

    def _tokens(self, taken: array[int], text: str, candidates: Sequence[Candidates]) -> Tokens | None:
        if not taken and not text:
            return None
        logprobs = tuple(self._logprobs(one) for one in candidates[: len(taken)])
        return Tokens(token_ids=taken.tobytes(), text=text, logprobs=logprobs)

    def _logprobs(self, candidates: Candidates) -> ChosenLogprob:
        top = tuple(self._logprob(token_id, value) for token_id, value in candidates.top)
        return ChosenLogprob(self._logprob(*candidates.chosen), top)

    def _logprob(self, token_id: int, value: float) -> TokenLogprob:
        return TokenLogprob(token_id, self.text.token_bytes(token_id), value)


def open_turn(submit: Submit, rules: TurnRules, now: float) -> Turn:
    """Check a Submit, of our version and tokenizer, and make its turn. Raises TurnRefused."""
    token_ids = _check_tokens(submit, rules)
    if submit.max_tokens < 1:
        raise TurnRefused("invalid_request", f"max_tokens is {submit.max_tokens}: use 1 or more")
    num_prompt = len(token_ids) - _check_generated(submit, len(token_ids))
    prompt, generated = token_ids[:num_prompt], token_ids[num_prompt:]
    text = TextState(rules.detokenizer, submit.stop)
    text.resume(generated)
    watch = Watch(rules.derail, rules.detokenizer.decode)
    watch.resume(generated, was_told=not submit.stops_derailed)
    for token_id in submit.sampling.logit_bias:
        if not 0 <= token_id < rules.vocab_size:
            raise TurnRefused("invalid_request", f"logit_bias: no token {token_id} below {rules.vocab_size}")
    seed = submit.sampling.seed
    return Turn(
        run_id=submit.run_id,
        attempt=submit.attempt,
        tenant=submit.tenant,
        agent=submit.agent,
        session=submit.session,
        parent=submit.parent,
        namespace=_namespace(submit, rules),
        prompt=prompt,
        max_tokens=min(submit.max_tokens, rules.context_length - num_prompt),
        sampling=submit.sampling,
        seed=secrets.randbits(64) if seed is None else seed & _MAX_SEED,
        stop_ids=frozenset(submit.stop_token_ids)
        | (frozenset() if submit.ignore_eos and submit.grammar is None else rules.eos_token_ids),
        text=text,
        watch=watch,
        received_at=now,
        stops_derailed=submit.stops_derailed,
        hints=_hints(submit, num_prompt),
        generated=generated,
        most_cached=submit.most_cached,
    )


def _namespace(submit: Submit, rules: TurnRules) -> bytes:
    """No tenant's own is one that several share, whatever their names are."""
    owner = f"shared {submit.namespace}" if submit.namespace else f"tenant {submit.tenant}"
    return hashlib.sha256(rules.namespace + owner.encode()).digest()


def _hints(submit: Submit, num_prompt: int) -> Hints:
    """Positions beyond the prompt mean its end."""
    return Hints(
        fork_tokens=min(submit.fork_tokens, num_prompt),
        expects=submit.expects,
        is_final=submit.is_final,
        retain=submit.retain,
        system_tokens=min(submit.system_tokens, num_prompt),
        turn_tokens=min(submit.turn_tokens, num_prompt) or num_prompt,
        explain=submit.explain,
    )


def _check_generated(submit: Submit, num_tokens: int) -> int:
    """How many of the tokens the turn generated before. Raises TurnRefused."""
    num_generated = submit.generated_tokens
    if not 0 <= num_generated < num_tokens:
        raise TurnRefused(
            "invalid_request",
            f"generated_tokens is {num_generated} of {num_tokens} token_ids: use 0 or more, less than all",
        )
    if num_generated >= submit.max_tokens:
        raise TurnRefused(
            "invalid_request",
            f"generated_tokens is {num_generated} and max_tokens {submit.max_tokens}: there is nothing to go "
            "on with, so raise max_tokens or end the turn",
        )
    return num_generated


def _check_tokens(submit: Submit, rules: TurnRules) -> array[int]:
    """Prompt and what the turn generated before. Raises TurnRefused."""
    if not submit.token_ids or len(submit.token_ids) % 4:
        raise TurnRefused(
            "invalid_request", f"token_ids has {len(submit.token_ids)} bytes: use 4 for each token"
        )
    token_ids = array("I")
    token_ids.frombytes(submit.token_ids)
    if len(token_ids) >= rules.context_length:
        raise TurnRefused(
            "context_exceeded",
            f"the prompt has {len(token_ids)} tokens and the context holds {rules.context_length}, "
            "with at least one for the answer: shorten the prompt",
        )
    largest = int(np.frombuffer(token_ids, dtype=np.uintc).max())  # max() of 128k tokens takes 3 ms
    if largest >= rules.vocab_size:
        raise TurnRefused("invalid_request", f"token id {largest} is not below {rules.vocab_size}")
    return token_ids
