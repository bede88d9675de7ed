"""Anthropic's Messages: whole messages and the events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.derail.body import derail_body
from gateway.dialects.answer import Answer
from gateway.dialects.frames import Body, Frame, Silence
from gateway.errors import GatewayError
from gateway.text.parsing import Part
from workers.messages import Finished, Tokens, Usage

from .blocks import Blocks, frame
from .errors import messages_error

OMITS_THOUGHTS = "omits_thoughts"
"""Key of `echo`: thinking blocks come without their text, which their signature carries."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = frame("ping")


class MessagesTeller:
    """POST /v1/messages."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._blocks = Blocks(answer.run_id, shows_thoughts=not answer.shape.echo.get(OMITS_THOUGHTS))

    def begin(self) -> list[Frame]:
        """At once, before the prompt is read: what of it was cached is told at the end."""
        usage = Usage(prompt_tokens=self._answer.num_prompt_tokens)
        return [frame("message_start", message=self._message([], usage_body(usage))), PING]

    def more(self, parts: Sequence[Part], tokens: Tokens | None) -> list[Frame]:
        num_tokens = len(tokens.token_ids) // 4 if tokens is not None else 0
        return self._blocks.add(parts, num_tokens)

    def silence(self) -> Silence:
        return Silence(frames=[PING])

    def end(self) -> list[Frame]:
        """A call that was cut off is not told; the stop reason tells of it."""
        ending = frame("message_delta", delta=self._stop(), usage=self._usage(), **self._derail())
        return [*self._blocks.close(), ending, frame("message_stop")]

    def fail(self, error: GatewayError) -> list[Frame]:
        return [Frame(messages_error(error), event="error")]

    def body(self) -> Body:
        message = self._message(self._blocks.bodies(), self._usage())
        return {**message, **self._stop(), **self._derail()}

    def _message(self, content: list[Body], usage: Body) -> Body:
        assert self._answer.accepted is not None
        return {
            "id": f"msg_{self._answer.run_id.removeprefix('run-')}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.accepted.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> Body:
        end = self._answer.turn_end
        stop_text = end.stop_text if isinstance(end, Finished) else None
        if stop_text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_text}
        return {"stop_reason": STOP_REASONS[self._answer.finish_reason], "stop_sequence": None}

    def _usage(self) -> Body:
        usage = usage_body(self._answer.usage)
        if self._answer.num_thinking:
            usage["output_tokens_details"] = {"thinking_tokens": self._answer.num_thinking}
        return usage

    def _derail(self) -> Body:
        derail = self._answer.derail
        return {"tetrarch": {"derail": derail_body(derail)}} if derail is not None else {}


def usage_body(usage: Usage) -> Body:
    """Anthropic's usage object: the three counts of input add up to the prompt.

    Nothing is told as written to the cache: every prompt is, unasked and at no price.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
