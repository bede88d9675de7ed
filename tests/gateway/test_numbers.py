"""Numbers that JSON, a double or a setting cannot hold: a 400 that names the field, or an answer."""

from __future__ import annotations

from typing import Any

import pytest

from .http_gateway import CHAT, TEXT, Gateway

GOOD = {CHAT: '"messages": [{"role": "user", "content": "x"}]', TEXT: '"prompt": "x"'}

REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("top_k", "n", "seed", "max_tokens")
OWN = {CHAT: ("top_logprobs", "max_completion_tokens"), TEXT: ("logprobs", "best_of")}
FIELDS = [
    (path, name)
    for path in (CHAT, TEXT)
    for name in (*REALS, *WHOLE, *OWN[path], "stop_token_ids", "logit_bias")
]

NOT_JSON = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"]
HUGE = ["1" + "0" * 6000, "-1" + "0" * 6000, str(2**64), str(-(2**63) - 1), "1e308", "-1e308"]
TINY = ["1e-38", "5e-324", "-5e-324", "-0.0", "1e-999"]

NO_UPPER_END = {"top_k", "max_tokens", "max_completion_tokens"}
"""More than there is means all there is."""


def body(path: str, name: str, number: str) -> str:
    value = {"logit_bias": f'{{"5": {number}}}', "stop_token_ids": f"[{number}]"}.get(name, number)
    more = ', "logprobs": true' if name == "top_logprobs" else ""
    return f'{{{GOOD[path]}, "{name}": {value}{more}}}'


def check_named(answer: Any, name: str) -> None:
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None and error["param"].startswith(name), error
    assert name in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(("path", "name"), FIELDS)
async def test_a_number_that_json_lacks_names_its_field(gateway: Gateway, path: str, name: str) -> None:
    for number in NOT_JSON:
        status, answer = await gateway.post(body(path, name, number), path)
        assert status == 400, (number, answer)
        check_named(answer, name)
    assert not gateway.runs.runs


@pytest.mark.parametrize(("path", "name"), FIELDS)
async def test_a_huge_number_names_its_field_or_means_all(gateway: Gateway, path: str, name: str) -> None:
    for number in HUGE:
        status, answer = await gateway.post(body(path, name, number), path)
        if name in NO_UPPER_END and number.isdigit() and status == 200:
            assert gateway.runs.last.order.max_tokens <= 512
            assert gateway.runs.last.order.sampling.top_k <= 600
            continue
        assert status == 400, (number, answer)
        check_named(answer, name)


@pytest.mark.parametrize(("path", "name"), FIELDS)
async def test_a_tiny_number_is_taken_or_names_its_field(gateway: Gateway, path: str, name: str) -> None:
    for number in TINY:
        status, answer = await gateway.post(body(path, name, number), path)
        if status != 200:
            assert status == 400, (number, answer)
            check_named(answer, name)
