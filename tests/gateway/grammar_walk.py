"""A fake model that writes at random what a grammar allows, byte by byte."""

from __future__ import annotations

import random

import numpy as np
from llguidance import LLMatcher

from gateway.text.structured.checks import bytes_tokenizer

END = 256
MAX_BYTES = 6000
_CLOSING = b'"}]<>)/'


def walk(source: str, seed: int) -> str | None:
    """A text that the grammar allows; None for one that did not come to its end."""
    draws = random.Random(seed)
    matcher = LLMatcher(bytes_tokenizer(), source, log_level=0)
    written = bytearray()
    while len(written) < MAX_BYTES:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        assert allowed, "nothing is allowed"
        if matcher.is_stopped() or (END in allowed and draws.random() < 0.5):
            return written.decode()
        byte = _choose([one for one in allowed if one != END], len(written), draws)
        assert matcher.consume_token(byte)
        written.append(byte)
    return None


def allows(source: str, text: str) -> bool:
    """Whether the text is a whole one of the grammar's."""
    matcher = LLMatcher(bytes_tokenizer(), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    spelt = list(text.encode())
    return matcher.try_consume_tokens(spelt) == len(spelt) and matcher.is_accepting()


def _choose(allowed: list[int], num_written: int, draws: random.Random) -> int:
    closing = [byte for byte in allowed if byte in _CLOSING]
    if closing and draws.random() < 0.2 + num_written / 2000:
        return draws.choice(closing)
    plain = [byte for byte in allowed if 0x20 < byte < 0x7F]
    return draws.choice(plain if plain and draws.random() < 0.8 else allowed)
