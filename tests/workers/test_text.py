from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.fakes import END_ID, byte_tokenizer
from workers.text import Detokenizer, TextState

FAMILY = "👩‍👩‍👧"
HAN = "漢字かな交じり文"


@pytest.fixture(scope="module")
def detokenizer() -> Detokenizer:
    return Detokenizer(byte_tokenizer())


def merged_tokenizer(pieces: list[bytes]) -> Tokenizer:
    """A byte-level vocabulary whose tokens are these pieces, wherever they cut a character."""
    letters = {value: key for key, value in byte_tokenizer().get_vocab().items() if value < 256}
    vocabulary = {"".join(letters[byte] for byte in piece): index for index, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As llama 2's: a word-start mark, and bytes for what has no token."""
    words = ["\u2581Hello", "\u2581", "lo", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="!"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def stream(state: TextState, token_ids: list[int]) -> tuple[list[str], str | None]:
    """All pieces in order, the flushed one last, and the stop string if one ended it."""
    pieces: list[str] = []
    for token_id in token_ids:
        delta = state.append(token_id)
        pieces.append(delta.text)
        if delta.stopped is not None:
            return pieces, delta.stopped
    return [*pieces, state.flush()], None


def naive_cut(text: str, stop: tuple[str, ...]) -> str:
    for end in range(len(text) + 1):
        matches = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if matches:
            return text[: end - len(max(matches, key=len))]
    return text


@pytest.mark.parametrize("text", [FAMILY, HAN, "añb", "a\u0301👍🏽!", "\ufffd stays \ufffd", "plain"])
def test_a_character_split_over_tokens_is_held_until_it_is_whole(detokenizer: Detokenizer, text: str) -> None:
    pieces, _ = stream(TextState(detokenizer), list(text.encode()))
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces[-1] == ""


@pytest.mark.parametrize("first", range(1, len(FAMILY.encode())))
def test_an_emoji_family_survives_every_split_into_three_tokens(first: int) -> None:
    data = FAMILY.encode()
    for second in range(first + 1, len(data)):
        pieces = [data[:first], data[first:second], data[second:]]
        vocabulary = list(dict.fromkeys(pieces))
        state = TextState(Detokenizer(merged_tokenizer(vocabulary)))
        out, _ = stream(state, [vocabulary.index(piece) for piece in pieces])
        assert "".join(out) == FAMILY
        assert not any("\ufffd" in piece for piece in out)


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_emoji_cut_by_the_token_limit_ends_in_one_replacement(
    detokenizer: Detokenizer, num_bytes: int
) -> None:
    token_ids = list(b"ok " + "😀".encode()[:num_bytes])
    pieces, _ = stream(TextState(detokenizer), token_ids)
    assert "".join(pieces) == "ok \ufffd" == detokenizer.decode(token_ids)
    assert pieces[-1] == "\ufffd"


def test_bytes_that_can_be_no_character_are_not_held(detokenizer: Detokenizer) -> None:
    token_ids = [0x80, 0xBF, 0xFF, 0xF0, 0x80, *b"a", 0xE6, 0xBC, *b"b"]
    pieces, _ = stream(TextState(detokenizer), token_ids)
    assert pieces[:3] == ["\ufffd"] * 3
    assert "".join(pieces) == bytes(token_ids).decode(errors="replace") == detokenizer.decode(token_ids)


def test_random_bytes_stream_to_what_decoding_them_at_once_gives(detokenizer: Detokenizer) -> None:
    random_bytes = random.Random(5)
    for _ in range(50):
        token_ids = [random_bytes.choice(b"a \xc3\xa9\xf0\x9f\x98\x80\xed\xa0\xff") for _ in range(40)]
        pieces, _ = stream(TextState(detokenizer), token_ids)
        assert "".join(pieces) == detokenizer.decode(token_ids)


def test_byte_fallback_tokens_make_characters_and_keep_inner_spaces() -> None:
    detokenizer = Detokenizer(byte_fallback_tokenizer())
    emoji = [4 + byte for byte in "😀字".encode()]
    token_ids = [0, *emoji, 0, 1, 2, 3]
    pieces, _ = stream(TextState(detokenizer), token_ids)
    assert "".join(pieces) == "Hello😀字 Hello lo!" == detokenizer.decode(token_ids)
    assert [detokenizer.token_bytes(token_id) for token_id in (0, 4 + 0xF0)] == [b" Hello", b"\xf0"]


def test_special_tokens_are_skipped_in_text_and_do_not_part_a_character(detokenizer: Detokenizer) -> None:
    head, tail = list("é".encode())
    pieces, _ = stream(TextState(detokenizer), [head, END_ID, END_ID, tail])
    assert pieces == ["", "", "", "é", ""]


def test_marks_of_calls_stand_in_the_text_though_they_are_special() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[OTHER]"])
    mark, arguments, other = (tokenizer.token_to_id(text) for text in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]"))
    token_ids = [mark, *b"look", arguments, *b"{}", other, END_ID]
    pieces, _ = stream(TextState(Detokenizer(tokenizer)), token_ids)
    assert "".join(pieces) == "[TOOL_CALLS]look[ARGS]{}" == Detokenizer(tokenizer).decode(token_ids)


def test_token_bytes_are_the_real_bytes_of_a_part_of_a_character(detokenizer: Detokenizer) -> None:
    assert [detokenizer.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert detokenizer.token_bytes(END_ID) == b"<|end|>"
    assert detokenizer.token_bytes(99_999) == b""


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
def test_a_stop_string_is_cut_at_every_split(size: int) -> None:
    text = "one two</stop> three"
    pieces = [text[start : start + size].encode() for start in range(0, len(text), size)]
    vocabulary = list(dict.fromkeys(pieces))
    state = TextState(Detokenizer(merged_tokenizer(vocabulary)), ("</stop>",))
    out, stopped = stream(state, [vocabulary.index(piece) for piece in pieces])
    assert ("".join(out), stopped) == ("one two", "</stop>")


def test_only_what_may_become_a_stop_string_is_held(detokenizer: Detokenizer) -> None:
    state = TextState(detokenizer, ("</s>",))
    assert [state.append(byte).text for byte in b"a</x<"] == ["a", "", "", "</x", ""]
    assert state.flush() == "<"
    assert state.flush() == ""
    assert state.append(ord("b")).text == ""


def test_overlapping_stop_strings_cut_where_the_first_is_complete(detokenizer: Detokenizer) -> None:
    stop = ("abcd", "bc", "c", "xyzabc")
    choices = random.Random(7)
    for _ in range(300):
        text = "".join(choices.choice("abcdxyz") for _ in range(12))
        whole = Detokenizer(merged_tokenizer([text.encode()]))
        one_by_one, _ = stream(TextState(detokenizer, stop), list(text.encode()))
        at_once, _ = stream(TextState(whole, stop), [0])
        assert "".join(one_by_one) == "".join(at_once) == naive_cut(text, stop)


def test_a_stop_string_that_repeats_its_beginning_is_found(detokenizer: Detokenizer) -> None:
    pieces, stopped = stream(TextState(detokenizer, ("aab",)), list(b"aaaaab"))
    assert ("".join(pieces), stopped) == ("aaa", "aab")


def test_an_empty_stop_string_stops_nothing(detokenizer: Detokenizer) -> None:
    pieces, stopped = stream(TextState(detokenizer, ("",)), list(b"abc"))
    assert ("".join(pieces), stopped) == ("abc", None)


def test_a_stop_string_of_characters_split_over_tokens_is_found(detokenizer: Detokenizer) -> None:
    pieces, stopped = stream(TextState(detokenizer, ("字",)), list(f"漢{HAN}".encode()))
    assert ("".join(pieces), stopped) == ("漢漢", "字")


@pytest.mark.parametrize("num_bytes", [1, 2])
@pytest.mark.parametrize("stop", ["b", "ab", "b</s>"])
def test_a_stop_string_inside_a_token_that_ends_mid_character_is_found_at_once(
    stop: str, num_bytes: int
) -> None:
    head, tail = "字".encode()[:num_bytes], "字".encode()[num_bytes:]
    vocabulary = [b"a", b"b</s>" + head, tail, b"x"]
    state = TextState(Detokenizer(merged_tokenizer(vocabulary)), (stop,))
    held = "" if stop == "ab" else "a"
    assert (state.append(0).text, state.append(1).stopped) == (held, stop)
    assert state.append(2).text == state.flush() == ""


def test_text_before_an_incomplete_character_goes_out_with_its_token() -> None:
    whole = "漢字".encode()
    vocabulary = [b"ok " + whole[:2], whole[2:4], whole[4:], b"! " + whole[:1], b"\xff?"]
    pieces, _ = stream(TextState(Detokenizer(merged_tokenizer(vocabulary))), [0, 1, 2, 3, 4, 3])
    assert pieces == ["ok ", "漢", "字", "! ", "\ufffd\ufffd?", "! ", "\ufffd"]


def test_random_pieces_stream_and_stop_as_the_bytes_one_by_one_do(detokenizer: Detokenizer) -> None:
    choices = random.Random(3)
    stop = ("b字", "cab", "é")
    for _ in range(300):
        data = "".join(choices.choice("abc é字😀") for _ in range(12)).encode()
        cuts = sorted(choices.sample(range(1, len(data)), 5))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        vocabulary = list(dict.fromkeys(pieces))
        state = TextState(Detokenizer(merged_tokenizer(vocabulary)), stop)
        in_pieces, stopped = stream(state, [vocabulary.index(piece) for piece in pieces])
        one_by_one, stopped_one_by_one = stream(TextState(detokenizer, stop), list(data))
        assert ("".join(in_pieces), stopped) == ("".join(one_by_one), stopped_one_by_one)


def test_a_token_costs_the_same_late_in_a_turn() -> None:
    decoded: list[int] = []

    class Counting(Detokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode(token_ids)

    state = TextState(Counting(byte_tokenizer()), ("never",))
    for token_id in [*(HAN + " text ").encode(), END_ID, 0x80, 0xED, 0xA0] * 200:
        state.append(token_id)
    assert max(decoded) <= 8


def test_decoders_without_a_nested_list_are_read() -> None:
    assert json.loads(decoders.ByteLevel().__getstate__())["type"] == "ByteLevel"
    bare = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert Detokenizer(bare).token_bytes(0) == b"a"
