"""What Messages answers look like, for the description of the API; tests hold real answers to them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.http.shapes import AnswerExtras

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, frozen=True, tag="text"):
    """Words for the caller."""

    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    """A thought. `signature` is opaque: it goes back with the block."""

    thinking: str
    signature: str


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct, frozen=True):
    """How many of the tokens were thoughts."""

    thinking_tokens: int


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Tokens; the three counts of input add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class Message(Struct, frozen=True, kw_only=True):
    """A whole answer; as a stream begins, its head."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    tetrarch: AnswerExtras | UnsetType = UNSET


class MessageStart(Struct, frozen=True, tag="message_start"):
    """The run was accepted."""

    message: Message


class Ping(Struct, frozen=True, tag="ping"):
    """A keep-alive."""


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    """A block begins, still empty."""

    index: int
    content_block: ContentBlock


class TextDelta(Struct, frozen=True, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    """More of a thought; where it is not shown, how many tokens it has grown by."""

    thinking: str
    estimated_tokens: int | UnsetType = UNSET


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    """The signature of a thought that ends."""

    signature: str


class InputDelta(Struct, frozen=True, tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    """A block is over."""

    index: int


class Stop(Struct, frozen=True):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, kw_only=True, tag="message_delta"):
    """The end of the answer, with all its tokens."""

    delta: Stop
    usage: MessageUsage
    tetrarch: AnswerExtras | UnsetType = UNSET


class MessageStop(Struct, frozen=True, tag="message_stop"):
    """Nothing follows."""


class ErrorDetails(Struct, frozen=True):
    """What clients act upon."""

    error_code: str


class MessagesError(Struct, frozen=True):
    """`type` is the kind."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessagesErrorBody(Struct, frozen=True, kw_only=True, tag="error"):
    """How a call fails, as Anthropic's API tells it; in a stream its last event."""

    error: MessagesError
    request_id: str | UnsetType = UNSET


MessageEvent = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | MessagesErrorBody
)
