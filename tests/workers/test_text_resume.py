"""A turn's text in two parts: what was sent before a pause and what comes after are the whole turn's text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.fakes import END_ID, byte_tokenizer
from tests.workers.test_text import byte_fallback_tokenizer, merged_tokenizer, stream
from workers.text import Detokenizer, TextState

BYTES = Detokenizer(byte_tokenizer())


def in_parts(
    detokenizer: Detokenizer, token_ids: Sequence[int], stop: tuple[str, ...], cut: int
) -> tuple[str, str | None]:
    """The text and the stop string of a turn that was paused after `cut` tokens."""
    first = TextState(detokenizer, stop)
    sent = []
    for token_id in token_ids[:cut]:
        delta = first.append(token_id)
        sent.append(delta.text)
        if delta.stopped is not None:
            return "".join(sent), delta.stopped  # it ended before the pause
    second = TextState(detokenizer, stop)
    second.resume(token_ids[:cut])
    pieces, stopped = stream(second, list(token_ids[cut:]))
    return "".join(sent + pieces), stopped


def assert_same(detokenizer: Detokenizer, token_ids: Sequence[int], stop: tuple[str, ...], cut: int) -> None:
    pieces, stopped = stream(TextState(detokenizer, stop), list(token_ids))
    assert in_parts(detokenizer, token_ids, stop, cut) == ("".join(pieces), stopped), (token_ids, cut)


@pytest.mark.parametrize("stop", [(), ("é字",), ("aab", "字字"), ("😀b",), ("\ufffd\ufffda",), ("ab" * 90,)])
def test_random_bytes_and_characters_cut_anywhere(stop: tuple[str, ...]) -> None:
    choices = random.Random(11)
    for _ in range(40):
        whole = "".join(choices.choice("ab é字😀") for _ in range(choices.randrange(1, 200))).encode()
        token_ids = [
            choices.choice([0x80, 0xF0, 0xE6, END_ID]) if choices.random() < 0.05 else byte for byte in whole
        ]
        assert_same(BYTES, token_ids, stop, choices.randrange(len(token_ids) + 1))


def test_every_cut_of_a_text_that_nearly_stops() -> None:
    token_ids = list(("ab" * 50 + "a字" * 4 + "é😀").encode())
    for cut in range(len(token_ids) + 1):
        assert_same(BYTES, token_ids, ("ab" * 51, "a字" * 5, "é😀!"), cut)


def test_random_pieces_cut_anywhere() -> None:
    choices = random.Random(12)
    for _ in range(100):
        data = "".join(choices.choice("abc é字😀") for _ in range(150)).encode()
        cuts = sorted(choices.sample(range(1, len(data)), 90))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        vocabulary = list(dict.fromkeys(pieces))
        token_ids = [vocabulary.index(piece) for piece in pieces]
        detokenizer = Detokenizer(merged_tokenizer(vocabulary))
        assert_same(detokenizer, token_ids, ("b字", "cabc", "é"), choices.randrange(len(token_ids)))


def test_a_tokenizer_that_strips_the_first_space_keeps_the_later_ones() -> None:
    detokenizer = Detokenizer(byte_fallback_tokenizer())
    choices = random.Random(13)
    for _ in range(20):
        token_ids = [choices.choice([0, 0, 1, 2, 3, 4 + 0xC3, 4 + 0xA9]) for _ in range(150)]
        for cut in (1, 2, choices.randrange(150), 149):
            assert_same(detokenizer, token_ids, ("lo Hello Hello!",), cut)


def test_what_special_tokens_stand_between_is_held() -> None:
    token_ids = [*b"<st", *[END_ID] * 500, *b"op>"]
    for cut in (2, 3, 4, 400, 503, 504):
        assert_same(BYTES, token_ids, ("<stop>",), cut)


def test_resuming_costs_by_the_end_of_a_long_turn() -> None:
    decoded: list[int] = []

    class Counting(Detokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    state = TextState(Counting(byte_tokenizer()), ("never",))
    state.resume(list(b"some text " * 5000))
    assert len(decoded) < 200 and max(decoded) <= 8
