"""Models, health, readiness and metrics."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from workers.messages import StateFacts

from .fake_runs import engine_view
from .http_gateway import HELLO, Gateway
from .samples import chatml_bundle


async def test_models_are_listed(gateway: Gateway) -> None:
    status, body = await gateway.get("/v1/models")
    assert status == 200 and [model["id"] for model in body["data"]] == ["tiny"]
    assert (await gateway.get("/v1/models/tiny"))[1]["context_length"] == 512
    assert (await gateway.get("/v1/models/other"))[0] == 404


async def test_health_tells_settings_in_force_and_measured_facts(gateway: Gateway) -> None:
    gateway.bus["up"] = False
    view = engine_view(chatml_bundle(), ready=False, reason="step is stuck", num_checkpoints=5)
    states = StateFacts(dtype="float32", bytes_per_state=100, num_states=32, total_bytes=3600)
    gateway.directory.views = [replace(view, info=msgspec.structs.replace(view.info, states=states))]
    status, body = await gateway.get("/health")
    assert status == 200
    assert body["gateway"]["settings"]["keepalive_seconds"] == 5.0
    assert body["engines"][0]["kv"]["bytes_per_token"] == 12240.0
    assert body["engines"][0]["states"]["num_states"] == 32
    assert body["engines"][0]["stats"]["num_checkpoints"] == 5
    assert body["bus"] == "lost"


async def test_ready_tells_what_is_missing(gateway: Gateway) -> None:
    assert await gateway.get("/ready") == (200, {"ready": True, "reasons": []})
    gateway.directory.views = [engine_view(chatml_bundle(), ready=False, reason="step is stuck")]
    status, body = await gateway.get("/ready")
    assert status == 503 and body["reasons"] == ["engine e: step is stuck"]
    gateway.directory.views = []
    gateway.bus["up"] = False
    _, body = await gateway.get("/ready")
    assert body["reasons"] == ["the message bus does not answer", "no engine is alive"]
    assert (await gateway.post(HELLO))[0] == 503


async def test_metrics_are_served(gateway: Gateway) -> None:
    async with gateway.http.get(gateway.url + "/metrics") as response:
        assert response.status == 200 and "tetrarch" in await response.text()
