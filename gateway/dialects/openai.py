"""OpenAI's chat and text completions: whole bodies and the chunks of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from gateway.derail.body import derail_body
from gateway.errors import GatewayError
from gateway.text.parsing import Arguments, Call, CallBegun, CallEnded, Content, Part, Reasoning
from workers.messages import ChosenLogprob, TokenLogprob, Tokens

from .answer import Answer
from .custom_calls import custom_input
from .frames import Body, Frame, Silence

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity; OpenAI writes this."""

DONE = Frame(b"[DONE]")

CUSTOM_TOOLS = "custom_tools"
"""Key of `echo`: names of the tools whose input is text."""


class ChatTeller:
    """POST /v1/chat/completions. A call that was dropped is no part of a body and has its index for itself;
    a stream has told it by then, and this API takes nothing back: its arguments never get whole.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_calls = 0
        self._custom = frozenset(answer.shape.echo.get(CUSTOM_TOOLS, ()))

    def begin(self) -> list[Frame]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def more(self, parts: Sequence[Part], tokens: Tokens | None) -> list[Frame]:
        deltas = [self._delta(part) for part in parts]
        chosen = tokens.logprobs if tokens is not None else ()
        found = [delta for delta in deltas if delta] or ([{"content": ""}] if chosen else [])
        logprobs = _chat_logprobs(chosen) if self._answer.shape.logprobs else None
        return [
            self._chunk(delta, logprobs=logprobs if index == 0 else None) for index, delta in enumerate(found)
        ]

    def silence(self) -> Silence:
        """A comment, and a chunk that adds nothing for clients that count only data."""
        return Silence(progress(self._answer), [self._chunk({"content": ""})])

    def end(self) -> list[Frame]:
        frames = [self._chunk({}, finish_reason=self._answer.finish_reason)]
        if self._answer.shape.include_usage:
            frames.append(Frame(self._envelope(self.chunk_kind, [], usage_body(self._answer))))
        return [*frames, DONE]

    def fail(self, error: GatewayError) -> list[Frame]:
        return [Frame(error.body())]

    def body(self) -> Body:
        answer = self._answer
        choice = {
            "index": 0,
            "message": self._message(),
            "logprobs": _chat_logprobs(answer.logprobs) if answer.shape.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return self._envelope(self.kind, [choice], usage_body(answer))

    def _delta(self, part: Part) -> Body | None:
        index = self._num_calls - 1
        match part:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text}
            case CallBegun(name):
                self._num_calls += 1
                index += 1
                return {"tool_calls": [{"index": index, **self._call_body(index, Call(name))}]}
            case Arguments(text) if not self._is_custom(index):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnded() if self._is_custom(index):
                text = custom_input(self._answer.said.calls[index].arguments)
                return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
        return None

    def _is_custom(self, index: int) -> bool:
        return self._answer.said.calls[index].name in self._custom

    def _message(self) -> Body:
        said = self._answer.said
        calls = [self._call_body(index, call) for index, call in enumerate(said.calls) if not call.is_dropped]
        message: Body = {"role": "assistant", "content": said.content or (None if calls else "")}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def _call_body(self, index: int, call: Call) -> Body:
        called: Body = {"id": call_id(self._answer, index), "type": "function"}
        if call.name in self._custom:
            said = custom_input(call.arguments) if call.is_over else ""  # told when it is whole
            return {**called, "type": "custom", "custom": {"name": call.name, "input": said}}
        return {**called, "function": {"name": call.name, "arguments": call.arguments}}

    def _chunk(self, delta: Body, *, logprobs: Body | None = None, finish_reason: str | None = None) -> Frame:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return Frame(self._envelope(self.chunk_kind, [choice], None))

    def _envelope(self, kind: str, choices: list[Body], usage: Body | None) -> Body:
        return envelope(self._answer, self.prefix, kind, choices, usage)


class TextTeller:
    """POST /v1/completions."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_chars = 0  # offset of the next token in the logprobs

    def begin(self) -> list[Frame]:
        return []

    def more(self, parts: Sequence[Part], tokens: Tokens | None) -> list[Frame]:
        if tokens is None or not (tokens.text or tokens.logprobs):
            return []
        return [self._chunk(tokens.text, logprobs=tokens.logprobs)]

    def silence(self) -> Silence:
        return Silence(progress(self._answer))

    def end(self) -> list[Frame]:
        frames = [self._chunk("", finish_reason=self._answer.finish_reason)]
        if self._answer.shape.include_usage:
            frames.append(Frame(self._envelope([], usage_body(self._answer))))
        return [*frames, DONE]

    def fail(self, error: GatewayError) -> list[Frame]:
        return [Frame(error.body())]

    def body(self) -> Body:
        answer = self._answer
        self._num_chars = 0
        choice = {
            "index": 0,
            "text": answer.text,
            "logprobs": self._logprobs(answer.logprobs) if answer.shape.logprobs else None,
            "finish_reason": answer.finish_reason,
        }
        return self._envelope([choice], usage_body(answer))

    def _chunk(
        self, text: str, *, logprobs: Sequence[ChosenLogprob] = (), finish_reason: str | None = None
    ) -> Frame:
        told = self._logprobs(logprobs) if self._answer.shape.logprobs and finish_reason is None else None
        choice = {"index": 0, "text": text, "logprobs": told, "finish_reason": finish_reason}
        return Frame(self._envelope([choice], None))

    def _envelope(self, choices: list[Body], usage: Body | None) -> Body:
        return envelope(self._answer, "cmpl", "text_completion", choices, usage)

    def _logprobs(self, logprobs: Sequence[ChosenLogprob]) -> Body:
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


def openai_error(error: GatewayError, request_id: str) -> Body:
    """The error object of OpenAI's APIs."""
    return error.body()


def progress(answer: Answer) -> str:
    """The comment of a keep-alive."""
    return f"keepalive {answer.num_processed}/{answer.num_prompt_tokens}"


def call_id(answer: Answer, index: int) -> str:
    """The same at each replay of the run. Mistral's templates refuse any but nine letters and digits."""
    digest = hashlib.blake2b(f"{answer.run_id}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if answer.shape.reading.calls == "mistral" else f"call_{digest}"


def envelope(answer: Answer, prefix: str, kind: str, choices: list[Body], usage: Body | None) -> Body:
    """What surrounds choices, in bodies and chunks."""
    assert answer.accepted is not None
    body: Body = {
        "id": f"{prefix}-{answer.run_id.removeprefix('run-')}",
        "object": kind,
        "created": answer.accepted.created,
        "model": answer.accepted.model,
        "choices": choices,
    }
    if usage is not None or answer.shape.include_usage:
        body["usage"] = usage
    if answer.ended and answer.derail is not None:
        body["tetrarch"] = {"derail": derail_body(answer.derail)}
    return body


def usage_body(answer: Answer) -> Body:
    """OpenAI's usage object."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": answer.num_thinking},
    }


def _chat_logprobs(logprobs: Sequence[ChosenLogprob]) -> Body:
    return {"content": [chat_logprob(entry) for entry in logprobs]}


def chat_logprob(entry: ChosenLogprob) -> Body:
    top = [_candidate(token) for token in entry.top]
    return {**_candidate(entry.chosen), "top_logprobs": top}


def _candidate(token: TokenLogprob) -> Body:
    return {"token": _token_text(token), "logprob": _finite(token.logprob), "bytes": list(token.token)}


def _token_text(token: TokenLogprob) -> str:
    return token.token.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
