"""A run's events folded into OpenAI's answers: whole bodies, and the chunks of a stream.

Pure: knows the bus's words and OpenAI's shapes; knows neither sockets nor SSE.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gateway.errors import GatewayError, TurnFailed
from gateway.text.parsing import (
    Arguments,
    Call,
    CallBegun,
    Content,
    Part,
    Reader,
    Reading,
    Reasoning,
    Said,
    joined,
)
from gateway.text.tokenizer import unpack_token_ids
from workers.messages import (
    Accepted,
    Cancelled,
    ChosenLogprob,
    Dispatched,
    Event,
    Failed,
    Finished,
    Progress,
    RunEnded,
    Started,
    TokenLogprob,
    Tokens,
    TurnEnd,
    Usage,
)

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""

Chunk = dict[str, Any]


class AnswerShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the caller wants the answer. Kept in the run's Accepted event, so that a resume looks the same."""

    endpoint: Literal["chat", "text"]
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    tenant: str = ""
    reading: Reading = Reading()  # how a chat's text is taken apart


_decode_shape = msgspec.msgpack.Decoder(AnswerShape).decode


class Answer:
    """The fold over one run's events. Feed them in order; `chunks` are what each adds to a stream."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.shape = AnswerShape(endpoint="chat")
        self.accepted: Accepted | None = None
        self.token_ids = array("I")
        self.num_processed = 0  # prompt tokens so far, cached ones included
        self.turn_end: TurnEnd | None = None
        self.ended = False
        self.is_stopped = False  # its reader has asked the turn to end
        self.said = Said()
        self._reader = Reader(self.shape.reading)
        self._texts: list[str] = []
        self._logprobs: list[ChosenLogprob] = []
        self._num_chars = 0  # offset of the next token in a text completion's logprobs

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def num_prompt_tokens(self) -> int:
        return self.accepted.prompt_tokens if self.accepted is not None else 0

    def feed(self, event: Event) -> list[Chunk]:
        """Takes an event in; what a stream sends for it: zero or more chunks. Errors come with RunEnded."""
        match event:
            case Accepted():
                self.accepted = event
                self.shape = _decode_shape(event.request)
                self._reader = Reader(self.shape.reading)
                return [self._chunk({"role": "assistant", "content": ""})] if self._is_chat else []
            case Dispatched():
                self.turn_end = None  # a new attempt after a lost engine
            case Started(cached_tokens=num_tokens) | Progress(processed_tokens=num_tokens):
                self.num_processed = num_tokens
            case Tokens():
                return self._feed_tokens(event)
            case Cancelled(usage=usage, timings=timings) if self.is_complete:
                self.turn_end = Finished(reason="stop", usage=usage, timings=timings)
                return self._finish_chunks(self.turn_end)
            case Finished() | Cancelled() | Failed():
                self.turn_end = self._unless_short(event)
                return self._finish_chunks(self.turn_end) if isinstance(self.turn_end, Finished) else []
            case RunEnded():
                self.ended = True
        return []

    @property
    def is_complete(self) -> bool:
        """Whether all was said that the caller wants, though the turn goes on: the first call, say."""
        return self._reader.has_dropped

    def failure(self) -> GatewayError | None:
        """Why the run ended without an answer; None if it did not end, or ended well."""
        match self.turn_end:
            case Finished():
                return None
            case Cancelled():
                return TurnFailed("cancelled", "The run was cancelled.", retryable=False)
            case Failed(error=error, message=message, retryable=retryable):
                return TurnFailed(error, message, retryable=retryable)
        if not self.ended:
            return None
        return TurnFailed("internal_error", "The run ended without saying why.")

    def keep_alive(self) -> Chunk | None:
        """A chunk that adds nothing, for clients that count only data; none after the turn's end."""
        return self._chunk({"content": ""}) if self._is_chat and self.turn_end is None else None

    def body(self) -> Chunk:
        """The whole answer of a finished run."""
        assert isinstance(self.turn_end, Finished)
        choice: Chunk = {"index": 0}
        if self._is_chat:
            choice["message"] = self._message()
        else:
            choice["text"] = self.text
        choice["logprobs"] = self._logprob_body(self._logprobs) if self.shape.logprobs else None
        choice["finish_reason"] = self._finish_reason(self.turn_end)
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._envelope(kind, [choice], usage_body(self.turn_end.usage))

    @property
    def _is_chat(self) -> bool:
        return self.shape.endpoint == "chat"

    def _unless_short(self, end: TurnEnd) -> TurnEnd:
        """Tokens sent = tokens in usage; otherwise the text that came is not the whole answer."""
        num_counted = end.usage.completion_tokens
        if not isinstance(end, Finished) or len(self.token_ids) == num_counted:
            return end
        message = f"Of {num_counted} generated tokens {len(self.token_ids)} arrived. Send the call again."
        return Failed(error="gap", message=message, retryable=True, usage=end.usage, timings=end.timings)

    def _feed_tokens(self, event: Tokens) -> list[Chunk]:
        self.token_ids.extend(unpack_token_ids(event.token_ids))
        self._texts.append(event.text)
        self._logprobs.extend(event.logprobs)
        parts = self._reader.feed(event.text) if self._is_chat else [Content(event.text)]
        deltas = self._deltas(parts) or [{"content": ""}]
        logprobs = self._logprob_body(event.logprobs) if self.shape.logprobs else None
        if deltas == [{"content": ""}] and not event.logprobs:
            return []
        first = self._chunk(deltas[0], logprobs=logprobs)
        return [first, *(self._chunk(delta) for delta in deltas[1:])]

    def _deltas(self, parts: Sequence[Part]) -> list[Chunk]:
        """What a stream sends for further parts of a turn."""
        deltas: list[Chunk] = []
        for part in joined(parts):
            self.said.add([part])
            index = len(self.said.calls) - 1
            match part:
                case Reasoning(text):
                    deltas.append({"reasoning_content": text})
                case Content(text):
                    deltas.append({"content": text})
                case CallBegun(name):
                    deltas.append({"tool_calls": [{"index": index, **self._call_body(index, Call(name))}]})
                case Arguments(text):
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        return deltas

    def _message(self) -> Chunk:
        said = self.said
        message: Chunk = {"role": "assistant", "content": said.content or (None if said.calls else "")}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [self._call_body(index, call) for index, call in enumerate(said.calls)]
        return message

    def _call_body(self, index: int, call: Call) -> Chunk:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self._call_id(index), "type": "function", "function": function}

    def _call_id(self, index: int) -> str:
        """The same at each replay of the run. Mistral's templates refuse any but nine letters and digits."""
        digest = hashlib.blake2b(f"{self.run_id}/{index}".encode(), digest_size=12).hexdigest()
        return digest[:9] if self.shape.reading.calls == "mistral" else f"call_{digest}"

    def _finish_reason(self, end: Finished) -> str:
        """An answer that ends within a call is cut short, by whatever: the call is not whole."""
        calls = self.said.calls
        if end.reason != "stop" or not calls:
            return end.reason
        if not calls[-1].is_over:
            return "length"
        return "tool_calls" if any(call.is_whole for call in calls) else end.reason

    def _finish_chunks(self, end: Finished) -> list[Chunk]:
        deltas = self._deltas(self._reader.end()) if self._is_chat else []
        chunks = [self._chunk(delta) for delta in deltas]
        chunks.append(self._chunk({}, finish_reason=self._finish_reason(end)))
        if self.shape.include_usage:
            chunks.append(self._envelope(self._chunk_kind, [], usage_body(end.usage)))
        return chunks

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(
        self, delta: Chunk, *, logprobs: Chunk | None = None, finish_reason: str | None = None
    ) -> Chunk:
        choice: Chunk = {"index": 0}
        if self._is_chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        choice["logprobs"] = logprobs
        choice["finish_reason"] = finish_reason
        return self._envelope(self._chunk_kind, [choice], None)

    def _envelope(self, kind: str, choices: list[Chunk], usage: Chunk | None) -> Chunk:
        assert self.accepted is not None
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        envelope: Chunk = {
            "id": f"{prefix}-{self.run_id.removeprefix('run-')}",
            "object": kind,
            "created": self.accepted.created,
            "model": self.accepted.model,
            "choices": choices,
        }
        if usage is not None or self.shape.include_usage:
            envelope["usage"] = usage
        return envelope

    def _logprob_body(self, logprobs: Sequence[ChosenLogprob]) -> Chunk:
        if self._is_chat:
            return {"content": [_chat_logprob(entry) for entry in logprobs]}
        if self.turn_end is not None:  # the whole body: offsets from its start
            self._num_chars = 0
        offsets = []
        for entry in logprobs:
            offsets.append(self._num_chars)
            self._num_chars += len(_token_text(entry.chosen))
        return {
            "tokens": [_token_text(entry.chosen) for entry in logprobs],
            "token_logprobs": [_finite(entry.chosen.logprob) for entry in logprobs],
            "top_logprobs": [
                {_token_text(token): _finite(token.logprob) for token in entry.top} for entry in logprobs
            ],
            "text_offset": offsets,
        }


def usage_body(usage: Usage) -> Chunk:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chat_logprob(entry: ChosenLogprob) -> Chunk:
    top = [_candidate(token) for token in entry.top]
    return {**_candidate(entry.chosen), "top_logprobs": top}


def _candidate(token: TokenLogprob) -> Chunk:
    return {"token": _token_text(token), "logprob": _finite(token.logprob), "bytes": list(token.token)}


def _token_text(token: TokenLogprob) -> str:
    return token.token.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
