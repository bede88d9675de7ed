"""Token ids to text, one token at a time, and the search for stop strings in that text.

Knows the tokenizer and nothing of turns, pages or the bus. A token costs the same however long the turn is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_CLEAR_TOKENS = 64
_CLEAR_CHARACTERS = 16
"""Behind so many the text is right though it was begun in the middle, of a character perhaps."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


MARKS = frozenset(
    [
        "<think>",
        "</think>",
        "[THINK]",
        "[/THINK]",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|python_tag|>",
    ]
)
"""What parts an answer into thoughts, words and calls stands in its text, special or not: gateways read it.
"""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that became certain, and the stop string that ended the turn with it (its own text is cut off)."""

    text: str
    stopped: str | None = None


class Detokenizer:
    """One model's vocabulary as bytes and as text; shared by all turns of an engine."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer = _with_marks(tokenizer)
        self._is_byte_level = "ByteLevel" in _decoder_types(tokenizer)
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._bytes: dict[int, bytes] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that texts are made with: no mark is special in it."""
        return self._tokenizer

    def is_special(self, token_id: int) -> bool:
        """Special tokens have bytes but no place in a turn's text."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, also when they are only a part of a character; b"" for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _compute_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_special(token_id):
            return token.encode()
        if self._is_byte_level:
            if all(character in _BYTE_OF for character in token):
                return bytes(_BYTE_OF[character] for character in token)
            return token.encode()
        byte_token = _BYTE_TOKEN.fullmatch(token)
        if byte_token:
            return bytes.fromhex(byte_token[1])
        return token.replace("\u2581", " ").encode()


class TextState:
    """The text side of one turn: what is certain goes out, what may still change or become a stop is held.

    Decodes a moving window of tokens: the window starts one certain step back, so that a tokenizer whose text
    depends on the token before (a stripped leading space) gives the same text as decoding the whole turn.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(text for text in stop if text)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(
            "replace"
        )  # tells whether a character is incomplete
        self._window: list[int] = []
        self._num_certain = 0  # tokens of the window whose text is out or in _held
        self._num_early = 0  # characters behind theirs that are too: before a character that is not whole yet
        self._held = ""  # certain text that may be the beginning of a stop string
        self._ended = False

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, for logprobs."""
        return self._detokenizer.token_bytes(token_id)

    def append(self, token_id: int) -> TextDelta:
        """Take one token. After a delta with `stopped` the state is closed."""
        if self._ended or self._detokenizer.is_special(token_id):
            return TextDelta("")
        return self._release(self._take(token_id))

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take what a turn generated before it was paused, without a stop string: what it held is held again.

        The end of it is enough: what stands before the longest beginning of a stop string cannot matter.
        """
        visible = [token_id for token_id in token_ids if not self._detokenizer.is_special(token_id)]
        num_needed = max(map(len, self._stop), default=0) + _CLEAR_CHARACTERS
        num_tail, text = _CLEAR_TOKENS, self._replay(visible[-_CLEAR_TOKENS:])
        while num_tail < len(visible) and len(text) < num_needed:
            num_tail *= 4
            text = self._replay(visible[-num_tail:])
        self._held = text[len(text) - _num_held(text, self._stop) :]

    def flush(self) -> str:
        """End of the turn: all held text, an incomplete character as U+FFFD; nothing when called again."""
        if self._ended:
            return ""
        delta = self._release(self._advance())
        text = delta.text + self._held
        self._ended, self._held = True, ""
        return text

    def _take(self, token_id: int) -> str:
        """The text that is certain with this token."""
        self._window.append(token_id)
        token_bytes = self._detokenizer.token_bytes(token_id)
        self._utf8.decode(token_bytes)
        incomplete, _ = self._utf8.getstate()
        if not incomplete:
            return self._advance()
        # A token of bytes of one character says nothing yet; one that only ends in them says the text before.
        return self._peek() if len(incomplete) < len(token_bytes) else ""

    def _replay(self, token_ids: Sequence[int]) -> str:
        """All text of these tokens, as if they were the turn's first."""
        self._utf8.reset()
        self._window, self._num_certain, self._num_early = [], 0, 0
        return "".join([self._take(token_id) for token_id in token_ids])

    def _advance(self) -> str:
        """New text of the window's tokens, which become its certain ones."""
        new_text = self._new_text()
        del self._window[: self._num_certain]
        self._num_certain, self._num_early = len(self._window), 0
        return new_text

    def _peek(self) -> str:
        """New text of the window up to its last character, a U+FFFD that stands for the incomplete one."""
        new_text = self._new_text()[:-1]
        self._num_early += len(new_text)
        return new_text

    def _new_text(self) -> str:
        old_text = self._detokenizer.decode(self._window[: self._num_certain])
        return self._detokenizer.decode(self._window)[len(old_text) + self._num_early :]

    def _release(self, new_text: str) -> TextDelta:
        text = self._held + new_text
        match = _first_stop(text, self._stop)
        if match is not None:
            self._ended, self._held = True, ""
            return TextDelta(text[: match.start], match.stop)
        num_held = _num_held(text, self._stop)
        self._held = text[len(text) - num_held :]
        return TextDelta(text[: len(text) - num_held])


@dataclass(frozen=True, slots=True)
class _Match:
    start: int
    stop: str


def _first_stop(text: str, stop: Sequence[str]) -> _Match | None:
    """The stop string that is complete first, the longest of those: how text was cut up never matters."""
    found = [_Match(start, candidate) for candidate in stop if (start := text.find(candidate)) >= 0]
    return min(found, key=lambda match: (match.start + len(match.stop), match.start), default=None)


def _num_held(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = min(max(map(len, stop), default=0) - 1, len(text))
    for num_held in range(longest, 0, -1):
        if any(candidate.startswith(text[-num_held:]) for candidate in stop):
            return num_held
    return 0


def _with_marks(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, but that no mark is special."""
    added = tokenizer.get_added_tokens_decoder().values()
    if not any(token.special and token.content in MARKS for token in added):
        return tokenizer
    config = json.loads(tokenizer.to_str())
    for token in config["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in MARKS
    return Tokenizer.from_str(json.dumps(config))


def _decoder_types(tokenizer: Tokenizer) -> str:
    """Names of the tokenizer's decoders, nested ones too."""
    if tokenizer.decoder is None:
        return ""
    state = json.loads(tokenizer.decoder.__getstate__())
    return " ".join(part["type"] for part in [state, *state.get("decoders", ())])


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letters (GPT-2): printable bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
