"""What answers look like, for the description of the API; tests hold real answers to them.

The tellers of gateway/dialects write the same as plain objects, since some of their fields come and go.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.derail.body import DerailBody

FinishReason = Literal["stop", "length", "tool_calls"]
"""A derailed answer was cut short, so it is `length`; its `tetrarch.derail` says the rest."""


class Error(Struct, frozen=True):
    """`code` names the kind; `param` the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True):
    """How a call fails: as OpenAI's APIs tell it."""

    error: Error


class PromptTokenDetails(Struct, frozen=True):
    """`cached_tokens` were not computed again."""

    cached_tokens: int


class CompletionTokenDetails(Struct, frozen=True):
    """`reasoning_tokens` came while the model thought."""

    reasoning_tokens: int


class CompletionUsage(Struct, frozen=True):
    """Tokens of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokenDetails
    completion_tokens_details: CompletionTokenDetails


class CalledFunction(Struct, frozen=True, kw_only=True):
    """`arguments` is JSON text; in a stream a piece of it."""

    name: str | UnsetType = UNSET
    arguments: str


class CalledCustom(Struct, frozen=True, kw_only=True):
    """A call whose input is text; in a stream it comes when it is whole."""

    name: str | UnsetType = UNSET
    input: str


class MessageToolCall(Struct, frozen=True, kw_only=True):
    """A call that the model made. `index` only in a stream, `id` and `type` where the call begins."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True, kw_only=True):
    """What the model said; in a stream a piece of it."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class Candidate(Struct, frozen=True):
    """A token that could have come, and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenCandidate(Candidate, frozen=True):
    """The token that came, and the likeliest ones."""

    top_logprobs: list[Candidate]


class ChatLogprobs(Struct, frozen=True):
    """One entry for each token."""

    content: list[ChosenCandidate]


class TextLogprobs(Struct, frozen=True):
    """Lists as long as there are tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChatChoice(Struct, frozen=True):
    """The one answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(Struct, frozen=True):
    """A piece of the one answer."""

    index: int
    delta: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class TextChoice(Struct, frozen=True):
    """The one answer; in a stream a piece of it, with a reason to finish only in the last."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class AnswerExtras(Struct, frozen=True):
    """What only this server tells of an answer."""

    derail: DerailBody


class Envelope(Struct, frozen=True, kw_only=True):
    """What surrounds an answer."""

    id: str
    created: int
    model: str
    usage: CompletionUsage | UnsetType | None = UNSET
    tetrarch: AnswerExtras | UnsetType = UNSET


class ChatCompletion(Envelope, frozen=True, kw_only=True):
    """A chat's answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatChunk(Envelope, frozen=True, kw_only=True):
    """A piece of a chat's answer. `[DONE]` ends the stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextCompletion(Envelope, frozen=True, kw_only=True):
    """A text completion's answer, or a piece of it. `[DONE]` ends a stream."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
