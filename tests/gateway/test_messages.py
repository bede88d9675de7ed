"""The Messages API: shapes of answers and streams, and what reaches the engine."""

from __future__ import annotations

from typing import Any

from .http_gateway import Gateway

MESSAGES = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "Hi"}],
}


async def test_an_answer_has_anthropics_shape(gateway: Gateway) -> None:
    status, body = await gateway.post(HELLO, MESSAGES)
    assert status == 200, body
    num_prompt = len(gateway.runs.last.order.token_ids) // 4
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - num_prompt // 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_prompt // 2,
            "output_tokens": 2,
        },
    }
