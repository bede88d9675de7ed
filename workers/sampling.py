"""From logits to tokens, a row at a time: each has its own seed, settings and history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .errors import DeadEnd
from .messages import Sampling
from .plan import Candidates, RowSampling, SegmentResult

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads (seed, step) over the key space
_KEY_MASK = (1 << 64) - 1

GREEDY_TEMPERATURE = 1e-5
"""Below it the most likely token is taken: dividing by less would leave float32, and pick any token."""

LEAST_FACTOR = 1e-5
"""Of the repetition penalty, for the same reason."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row's lazy results, evaluated with the step: the token, and whether the logits were numbers."""

    token: mx.array
    sound: mx.array
    chosen: mx.array | None = None  # log-probability of the token
    top_ids: mx.array | None = None
    top: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        parts = (self.token, self.sound, self.chosen, self.top_ids, self.top)
        return [part for part in parts if part is not None]

    def result(self) -> SegmentResult:
        """Read the evaluated values."""
        token: Any = self.token.item()
        if not self.sound.item():
            fault = "the logits, or what the sampling settings make of them, are not numbers for this turn"
            return SegmentResult((), fault=fault)
        return SegmentResult((token,), self._candidates(token))

    def _candidates(self, token: int) -> tuple[Candidates, ...]:
        if self.chosen is None:
            return ()
        chosen: Any = self.chosen.item()
        if self.top_ids is None or self.top is None:
            return (Candidates(chosen=(token, chosen)),)
        ids: Any = self.top_ids.tolist()
        values: Any = self.top.tolist()
        return (Candidates(chosen=(token, chosen), top=tuple(zip(ids, values, strict=True))),)


def draw(logits: mx.array, row: RowSampling) -> Drawn:
    """logits: [vocabulary] in any float dtype, raw. Lazy; gives the same token alone and in company.

    What the row's grammar forbids is out before anything else picks; logprobs are those of the raw logits.
    Raises DeadEnd.
    """
    sampling = row.sampling
    logits = logits.astype(mx.float32)
    # A sum is NaN or infinite as soon as one logit is NaN or +inf, or all are -inf.
    sound = mx.isfinite(mx.logsumexp(logits))
    adjusted = _penalise(_constrain(logits, row), row)
    is_greedy = sampling.temperature < GREEDY_TEMPERATURE
    if not is_greedy:
        adjusted = adjusted / sampling.temperature
    if adjusted is not logits:
        sound &= mx.isfinite(mx.max(adjusted))
    token = mx.argmax(adjusted) if is_greedy else _pick(adjusted, sampling, _key(row))
    if sampling.top_logprobs is None:
        return Drawn(token, sound)
    logprobs = logits - mx.logsumexp(logits)
    chosen = mx.take(logprobs, token)
    if sampling.top_logprobs == 0:
        return Drawn(token, sound, chosen)
    worst = min(sampling.top_logprobs, logprobs.size - 1)
    best = mx.argpartition(-logprobs, worst)[: sampling.top_logprobs]
    values = mx.take(logprobs, best)
    order = mx.argsort(-values)
    return Drawn(token, sound, chosen, mx.take(best, order), mx.take(values, order))


def _constrain(logits: mx.array, row: RowSampling) -> mx.array:
    if row.constraint is None:
        return logits
    allowed = row.constraint.allowed()
    if allowed.size != logits.size:
        raise DeadEnd(f"the grammar speaks of {allowed.size} tokens and the model of {logits.size}")
    return mx.where(mx.array(allowed), logits, -mx.inf)


def _key(row: RowSampling) -> mx.array:
    key: mx.array = mx.random.key((row.seed + row.step * _GOLDEN) & _KEY_MASK)
    return key


def _penalise(logits: mx.array, row: RowSampling) -> mx.array:
    """Repetition as in CTRL (prompt and answer), presence and frequency as in OpenAI's API (answer only)."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = sorted({*row.prompt, *row.generated})
        ids = mx.array(seen, mx.int32)
        values = mx.take(logits, ids)
        factor = max(sampling.repetition_penalty, LEAST_FACTOR)
        lowered = mx.where(values > 0, values / factor, values * factor)
        logits = mx.put_along_axis(logits, ids, lowered, axis=0)
    deltas = {token_id: float(bias) for token_id, bias in sampling.logit_bias.items()}
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token_id, count in Counter(row.generated).items():
            lowered_by = sampling.presence_penalty + sampling.frequency_penalty * count
            deltas[token_id] = deltas.get(token_id, 0.0) - lowered_by
    if deltas:
        logits = logits.at[mx.array(list(deltas), mx.int32)].add(mx.array(list(deltas.values()), mx.float32))
    return logits


def _pick(logits: mx.array, sampling: Sampling, key: mx.array) -> mx.array:
    """The filters, then the Gumbel-max draw. logits: divided by the temperature."""
    filtered = sampling.top_p < 1 or sampling.min_p > 0 or 0 < sampling.top_k < logits.size
    if not filtered:
        return mx.argmax(logits + mx.random.gumbel(logits.shape, key=key))
    order = mx.argsort(-logits)
    ranked = mx.take(logits, order)
    probabilities = mx.softmax(ranked)
    keep = mx.ones(ranked.shape, mx.bool_)
    if 0 < sampling.top_k < logits.size:
        keep &= mx.arange(ranked.size) < sampling.top_k
    if sampling.top_p < 1:
        keep &= (mx.cumsum(probabilities) - probabilities) < sampling.top_p
    if sampling.min_p > 0:
        keep &= probabilities >= sampling.min_p * probabilities[0]
    keep |= mx.arange(ranked.size) == 0
    noisy = mx.where(keep, ranked, -mx.inf) + mx.random.gumbel(ranked.shape, key=key)
    return mx.take(order, mx.argmax(noisy))
