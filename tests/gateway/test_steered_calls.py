"""Nothing is learned of a steered call: its answer stands behind no prompt of its caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.flow.places import Order
from gateway.runs.events import TurnOpened
from gateway.text.tokenizer import pack_token_ids, unpack_token_ids
from workers.messages import Dispatched, Event, Finished, Paused, Started, Timings, Tokens, Usage

from .fake_runs import Script, words
from .http_gateway import HELLO, Gateway
from .samples import QWEN, byte_level_tokenizer
from .test_tool_calls import serve

VOCABULARY = byte_level_tokenizer().get_vocab()
UNUSUAL = [VOCABULARY[part] for part in [*"quick", "<|im_end|>"]]
"""An answer letter by letter, as no encoder writes it."""


def said(order: Order) -> Tokens:
    return Tokens(token_ids=pack_token_ids(UNUSUAL), text="quick")


def ended(num_tokens: int) -> Finished:
    return Finished(reason="stop", usage=Usage(completion_tokens=num_tokens), timings=Timings())


def unsteered(order: Order) -> list[Event | float]:
    return [said(order), ended(len(UNUSUAL))]


def steered(order: Order) -> list[Any]:
    """A word, and then another turn in the same call."""
    opened = TurnOpened(turn=2, cause="steer", added=(b'{"role": "user", "content": "No"}',))
    return [
        *words("Never")(order)[:1],
        Paused(usage=Usage(completion_tokens=1), timings=Timings()),
        opened,
        Dispatched(engine_id="e", incarnation=1, turn=2),
        Started(worker=0, cached_tokens=0),
        said(order),
        ended(len(UNUSUAL)),
    ]


async def next_prompt(gateway: Gateway, script: Script) -> list[int]:
    """Of a caller that sends the answer back and goes on."""
    gateway.runs.script = script
    status, answer = await gateway.post(HELLO)
    assert status == 200 and answer["choices"][0]["message"]["content"].endswith("quick")
    history: Sequence[Any] = [
        *HELLO["messages"],
        {"role": "assistant", "content": "quick"},
        {"role": "user", "content": "And?"},
    ]
    await gateway.post({"messages": history})
    return list(unpack_token_ids(gateway.runs.last.order.token_ids))


@pytest.mark.parametrize(("script", "is_learned"), [(unsteered, True), (steered, False)])
async def test_an_answer_is_learned_at_the_place_where_it_was_given(
    gateway: Gateway, script: Script, is_learned: bool
) -> None:
    serve(gateway, QWEN)
    ids = await next_prompt(gateway, script)
    found = any(ids[start : start + len(UNUSUAL)] == UNUSUAL for start in range(len(ids)))
    assert found == is_learned
