"""Text to token ids exactly as the engine's tokenizer does it, span by span, off the event loop when long.

Knows spans and their cache; knows no messages and no templates.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gateway.errors import InvalidField, context_exceeded
from workers.messages import TokenizerBundle

from .control_tokens import ControlTokens, Marks

INLINE_CHARS = 4096
"""Up to here encoding takes about 2 ms and stays on the event loop; longer text goes to a thread."""

INLINE_SPANS = 1024
"""More are digested in a thread."""

_PROBES = (
    "user\nHello  world",
    " leading",
    "\n\n  indented\n",
    "12345 3.14",
    "漢字 🙂\u200d🚀 é",
    "don't\t<b>",
    "x ",
)


class SpanCache:
    """Encoded spans by digest, least recently used first out. Bounded by bytes; one thread only."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._spans: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, key: bytes) -> bytes | None:
        ids = self._spans.get(key)
        if ids is not None:
            self._spans.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: bytes) -> None:
        previous = self._spans.pop(key, None)
        if previous is not None:
            self._num_bytes -= _entry_bytes(previous)
        self._spans[key] = ids
        self._num_bytes += _entry_bytes(ids)
        while self._num_bytes > self._max_bytes and self._spans:
            _, dropped = self._spans.popitem(last=False)
            self._num_bytes -= _entry_bytes(dropped)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


def _entry_bytes(ids: bytes) -> int:
    return len(ids) + 200  # two bytes objects, their headers and the table's entry


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a rendered prompt: a genuine control token, plain text, or a literal to keep as text."""

    text: str
    control_id: int | None = None
    is_literal: bool = False


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Where an answer begins: the digests of all spans before its own and of what its conversation had said
    (written.py), and the text that its span has. Empty: not known.
    """

    before: bytes = b""
    prefix: str = ""
    said: bytes = b""


@dataclass(frozen=True, slots=True)
class EncodedSpans:
    """A prompt's ids (little-endian uint32) by spans, their digests, and where its answer begins."""

    parts: list[bytes]
    keys: list[bytes]
    place: AnswerPlace

    def num_tokens(self, start: int, end: int) -> int:
        """Tokens of the spans in between."""
        return sum(map(len, self.parts[start:end])) // 4


class PromptTokenizer:
    """One engine's tokenizer, as the gateway uses it. Token ids are little-endian uint32 bytes."""

    def __init__(self, bundle: TokenizerBundle, *, cache_bytes: int = 64 << 20) -> None:
        config = json.loads(bundle.tokenizer_json)
        config["truncation"] = config["padding"] = None
        added: list[dict[str, Any]] = config.get("added_tokens") or []
        self.control = ControlTokens(added, bundle)
        unknown = config["model"].get("unk_token")  # what plain text may become, so it controls nothing
        self._control_ids = {
            token_id
            for literal, token_id in (self.control.hard | self.control.soft).items()
            if literal != unknown
        }
        self._whole = _build(config)
        config["post_processor"] = None
        self._bare = _build({**config, "added_tokens": []})
        self._plain = _build(
            {**config, "added_tokens": [t for t in added if t["content"] not in self.control.hard]}
        )
        self._cache = SpanCache(cache_bytes)
        self._most_chars = _most_chars_per_token(config)
        bos = bundle.special_tokens.get("bos_token") if bundle.add_bos else None
        self._bos_id: int | None = self._whole.token_to_id(bos) if bos else None
        self.by_span = self._spans_agree(added, has_normalizer=config.get("normalizer") is not None)

    async def encode_spans(
        self, spans: Sequence[Span], *, max_tokens: int, scope: bytes = b""
    ) -> EncodedSpans:
        """Token ids of a prompt that `split` has taken apart. `scope` names whose learned answers are used.

        Raises InvalidField, see `Prompts.encode`.
        """
        if len(spans) > 2 * max_tokens + 1:  # of two neighbours at least one is no plain text: a token
            raise context_exceeded("messages", f"at least {len(spans) // 2}", max_tokens)
        if len(spans) > INLINE_SPANS:
            keys, links = await asyncio.to_thread(_keys, spans)
        else:
            keys, links = _keys(spans)
        encoded: list[bytes | None] = []
        missing: dict[bytes, Span] = {}
        for span, key, link in zip(spans, keys, links, strict=True):
            # A control token's digest is its id.
            known = key if span.control_id is not None else self._known(key, link, scope)
            if known is None:
                missing[key] = span
            encoded.append(known)
        num_chars = sum(len(span.text) for span in missing.values())
        if num_chars > INLINE_CHARS:
            fresh = await asyncio.to_thread(self._encode_missing, missing)
        else:
            fresh = self._encode_missing(missing)
        for key, ids in fresh.items():
            self._cache.put(key, ids)
        parts = [fresh[key] if ids is None else ids for ids, key in zip(encoded, keys, strict=True)]
        return EncodedSpans(parts, keys, _place(spans, links))

    def _known(self, key: bytes, link: bytes, scope: bytes) -> bytes | None:
        """Ids without encoding: as the answer at this very place, as any answer of the scope, or as text."""
        return self._cache.get(link + scope) or self._cache.get(key + scope) or self._cache.get(key)

    async def encode_raw(self, text: str, *, max_tokens: int) -> bytes:
        """Token ids of a caller's own rendering: its control literals are control tokens."""
        self.check_length(text, max_tokens, "prompt")
        prefix = b"" if self._bos_id is None else pack_token_ids([self._bos_id])
        if len(text) <= INLINE_CHARS:
            return prefix + _run(self._whole, text)
        return prefix + await asyncio.to_thread(_run, self._whole, text)

    def check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Refuses text that cannot fit, so that megabytes need no encoding. Exact counts come later."""
        if self._most_chars is not None and len(text) > self._most_chars * max_tokens:
            fewest = len(text) // self._most_chars
            raise context_exceeded(param, f"at least {fewest}", max_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        # The batch call releases the GIL, the single call does not.
        text: str = self._whole.decode_batch([list(token_ids)], skip_special_tokens=False)[0]
        return text

    async def learn(self, place: AnswerPlace, token_ids: Sequence[int], text: str, *, scope: bytes) -> None:
        """Takes ids that the model wrote as this scope's encoding of `place.prefix + text` from now on.

        At that place for good; elsewhere, where history is rendered otherwise, the newest such answer counts.
        Does nothing unless some head of the ids reads exactly `text`, or where spans cannot stand alone.
        """
        if not self.by_span or not text or self.control.hard_pattern.search(text):
            return
        if len(text) <= INLINE_CHARS:
            kept = self._head_that_reads(token_ids, text)
        else:
            kept = await asyncio.to_thread(self._head_that_reads, token_ids, text)
        if kept is None:
            return
        head = _run(self._plain, place.prefix) if place.prefix else b""
        key = _key(Span(place.prefix + text))
        for name in (_link(place.before, key), key):
            self._cache.put(name + scope, head + pack_token_ids(kept))

    def _head_that_reads(self, token_ids: Sequence[int], text: str) -> Sequence[int] | None:
        for end in range(len(token_ids), max(0, len(token_ids) - 8), -1):
            if self.decode(token_ids[:end]) == text:
                return token_ids[:end]
        return None

    def split(self, rendered: str, marks: Marks | None) -> list[Span]:
        """The rendered text as spans, in order; marks are gone from them."""
        if marks is None:
            return self._split_text(rendered)
        rendered = marks.unescape(rendered)
        wrapped = re.compile(f"{marks.opening}({self.control.any_pattern.pattern}){marks.closing}")
        spans: list[Span] = []
        position = 0
        for found in wrapped.finditer(rendered):
            spans += self._split_around(rendered[position : found.start()], marks)
            spans.append(Span(found[1], is_literal=True))
            position = found.end()
        return spans + self._split_around(rendered[position:], marks)

    def _split_around(self, text: str, marks: Marks) -> list[Span]:
        """Spans of text whose single marks guard borders; they part it only where joining makes a literal."""
        parts = re.split(f"[{marks.opening}{marks.closing}]", text)
        joined = "".join(parts)
        find = self.control.any_pattern.findall
        if len(parts) == 1 or find(joined) == find(text):
            return self._split_text(joined)
        return [span for part in parts for span in self._split_text(part)]

    def _split_text(self, text: str) -> list[Span]:
        if not self.by_span:
            return [Span(text)] if text else []
        spans: list[Span] = []
        position = 0
        for found in self.control.hard_pattern.finditer(text):
            if found.start() > position:
                spans.append(Span(text[position : found.start()]))
            spans.append(Span(found[0], control_id=self.control.hard[found[0]]))
            position = found.end()
        if position < len(text):
            spans.append(Span(text[position:]))
        return spans

    def _encode_missing(self, missing: dict[bytes, Span]) -> dict[bytes, bytes]:
        tokenizer = self._plain if self.by_span else self._whole
        return {
            key: self._encode_literal(span.text) if span.is_literal else _run(tokenizer, span.text)
            for key, span in missing.items()
        }

    def _encode_literal(self, text: str) -> bytes:
        """Ids that read `text` and hold no control token, at the price of a clumsy encoding."""
        ids = _ids(self._bare, text)
        if self._control_ids.isdisjoint(ids):
            return pack_token_ids(ids)
        ids = [token_id for character in text for token_id in _ids(self._bare, character)]
        if self._control_ids.isdisjoint(ids):
            return pack_token_ids(ids)
        raise InvalidField(
            "messages", f"This model's tokenizer cannot write '{text}' as plain text: remove it."
        )

    def _spans_agree(self, added: Sequence[dict[str, Any]], *, has_normalizer: bool) -> bool:
        """Whether encoding span by span equals encoding the whole text: by flags, then on probes."""
        for token in added:
            if token["content"] not in self.control.hard:
                continue
            reaches_out = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
            if reaches_out or (token.get("normalized") and has_normalizer):
                return False
        self.by_span = True
        literals = [*self.control.hard][:3] or [""]
        for literal in literals:
            text = "".join(f"{literal}{probe}" for probe in _PROBES) + literal
            for probe in (text, f"{_PROBES[0]}{text}"):
                spans = self._split_text(probe)
                parts = [_ids(self._plain, s.text) if s.control_id is None else [s.control_id] for s in spans]
                if [token_id for part in parts for token_id in part] != _ids(self._whole, probe):
                    return False
        return True


def _most_chars_per_token(config: dict[str, Any]) -> int | None:
    """Upper bound for byte-level BPE, where each byte of text lands in some token; None elsewhere."""
    model = config["model"]
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(config.get("pre_tokenizer")):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in config.get("added_tokens") or ()):
        return None
    longest = max(map(len, model["vocab"]), default=1)
    normalizer = config.get("normalizer") or {"type": "none"}
    # Composing makes one character of at most four.
    return {"none": longest, "NFC": 4 * longest}.get(normalizer["type"])


def _build(config: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(config))


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    # The batch call releases the GIL, the single call does not.
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _run(tokenizer: Tokenizer, text: str) -> bytes:
    return pack_token_ids(_ids(tokenizer, text))


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32, as the bus carries token ids."""
    packed = array("I", token_ids)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> array[int]:
    """The inverse of `pack_token_ids`."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if _BIG_ENDIAN:
        token_ids.byteswap()
    return token_ids


_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0


def span_keys(spans: Sequence[Span]) -> list[bytes]:
    """A digest of each span: equal ones are encoded alike."""
    return [_key(span) for span in spans]


def _keys(spans: Sequence[Span]) -> tuple[list[bytes], list[bytes]]:
    """Each span's digest, and the digest of all spans up to and with it."""
    keys = span_keys(spans)
    links: list[bytes] = []
    link = b""
    for key in keys:
        link = _link(link, key)
        links.append(link)
    return keys, links


def _key(span: Span) -> bytes:
    """4 bytes for a control token, 16 for text."""
    if span.control_id is not None:
        return pack_token_ids([span.control_id])
    kind = b"literal" if span.is_literal else b"text"
    return hashlib.blake2b(span.text.encode(), digest_size=16, person=kind).digest()


def _link(before: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(before + key, digest_size=16, person=b"link").digest()


def _place(spans: Sequence[Span], links: Sequence[bytes]) -> AnswerPlace:
    if not spans:
        return AnswerPlace()
    last = spans[-1]
    if last.control_id is not None or last.is_literal:
        return AnswerPlace(links[-1])
    return AnswerPlace(links[-2] if len(links) > 1 else b"", last.text)
