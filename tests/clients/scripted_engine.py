"""An engine process whose model is a script: `python -m tests.clients.scripted_engine TOKENS_PER_SECOND`.

Bus, scheduler, cache and page tables are the real ones; prompts are prefilled at the rate that was named.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer

from kvcache.cache import Cache
from tests.fakes import byte_tokenizer
from workers.engine import Engine
from workers.grammar import GrammarLimits, Grammars
from workers.loop import Parts
from workers.messages import EngineInfo, KVFacts, TokenizerBundle
from workers.pace import PaceLimits
from workers.plan import Segment, SegmentResult, StepPlan, StepResult
from workers.process import run_engine
from workers.settings import EngineSettings, load_settings
from workers.text import Detokenizer
from workers.turn import TurnRules

from .scripts import SCRIPTS, TEMPLATE, answer

MODEL = "scripted"
CONTEXT = 262_144
PAGE_TOKENS = 64
NUM_PAGES = 3 * CONTEXT // PAGE_TOKENS
END = "<|im_end|>"
NUM_WORKERS = 4


def tokenizer() -> Tokenizer:
    """A token for each byte, and the turn markers."""
    bytes_alone = byte_tokenizer()
    bytes_alone.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", END)])
    return bytes_alone


def end_id(tokens: Tokenizer) -> int:
    """What ends a turn."""
    token_id: int | None = tokens.token_to_id(END)
    assert token_id is not None
    return token_id


class ScriptedRunner:
    """Keeps token ids as its pages' rows. Its answer is the script's to the prompt *as the pages hold it*.

    So a page of another prompt gives another answer, and one that is not the turn's own ends its turn.
    """

    def __init__(self, tokens: Tokenizer, prefill_rate: float) -> None:
        self._tokens = tokens
        self._end_id = end_id(tokens)
        self._prefill_rate = prefill_rate
        self._answers: dict[int, list[int]] = {}  # by worker: what is being said
        self.rebuild()

    def rebuild(self) -> None:
        self._rows = np.zeros((NUM_PAGES, PAGE_TOKENS), np.uint32)

    def run(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        for copy in plan.copies:
            self._rows[copy.target, : copy.num_tokens] = self._rows[copy.source, : copy.num_tokens]
        for segment in plan.segments:
            self._write(segment)
        time.sleep(plan.num_prefill_rows / self._prefill_rate)
        results = tuple(self._result(segment) for segment in plan.segments)
        return StepResult(results, time.perf_counter() - started)

    def _write(self, segment: Segment) -> None:
        positions = np.arange(segment.start, segment.end)
        fresh = positions >= segment.num_sealed
        pages = np.asarray(segment.pages)[positions // PAGE_TOKENS]
        ids = np.asarray(segment.token_ids, np.uint32)
        self._rows[pages[fresh], positions[fresh] % PAGE_TOKENS] = ids[fresh]

    def _result(self, segment: Segment) -> SegmentResult:
        row = segment.row
        if row is None:
            return SegmentResult(())
        if not len(row.generated):
            seen = self._rows[np.asarray(segment.pages)].reshape(-1)[: segment.end]
            if not np.array_equal(seen, np.asarray(row.prompt, np.uint32)):
                return SegmentResult((), fault="the pages hold another prompt")
            said = answer(SCRIPTS, self._text(seen.tolist()))
            self._answers[segment.worker] = [*said.encode(), self._end_id]
        token_id = self._answers[segment.worker][len(row.generated)]
        if row.constraint is not None and not row.constraint.allowed()[token_id]:
            return SegmentResult((), fault="the script says what the call's grammar does not allow")
        return SegmentResult((token_id,))

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokens.decode(token_ids, skip_special_tokens=False))


def load(settings: EngineSettings) -> Parts:
    """The parts of a loaded engine, but for the model."""
    tokens = tokenizer()
    vocab_size = tokens.get_vocab_size()
    rules = TurnRules(
        detokenizer=Detokenizer(tokens),
        namespace=b"scripted",
        context_length=CONTEXT,
        vocab_size=vocab_size,
        eos_token_ids=frozenset({end_id(tokens)}),
    )
    engine = Engine(
        ScriptedRunner(tokens, float(sys.argv[1])),
        Cache(NUM_PAGES),
        rules,
        num_workers=NUM_WORKERS,
        limits=PaceLimits(idle_step_seconds=0.5),
        grammars=Grammars(
            rules.detokenizer, width=vocab_size, end_ids=rules.eos_token_ids, limits=GrammarLimits()
        ),
    )
    bundle = TokenizerBundle(
        tokenizer_json=tokens.to_str().encode(), chat_template=TEMPLATE, eos_token_ids=(end_id(tokens),)
    )
    return Parts(engine, info(settings, vocab_size), bundle)


def info(settings: EngineSettings, vocab_size: int) -> EngineInfo:
    """What such an engine says of itself."""
    return EngineInfo(
        engine_id=settings.engine_id,
        incarnation=0,
        model_id=MODEL,
        digest="scripted",
        context_length=CONTEXT,
        num_workers=NUM_WORKERS,
        vocab_size=vocab_size,
        kv=KVFacts(
            dtype="script",
            bytes_per_token=4.0,
            page_tokens=PAGE_TOKENS,
            num_pages=NUM_PAGES,
            pool_bytes=4 * PAGE_TOKENS * NUM_PAGES,
        ),
        device="none",
        weights="script",
        blas="none",
        created=0,
    )


if __name__ == "__main__":
    sys.exit(run_engine(load_settings(None, {}), load))
