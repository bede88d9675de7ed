"""The packed XREAD against what the client library packs."""

from __future__ import annotations

from redis.connection import Connection

from gateway.following import Positions


def packed_by_library(positions: dict[str, str]) -> bytes:
    words = ["XREAD", "COUNT", 256, "BLOCK", 5000, "STREAMS", *positions, *positions.values()]
    return b"".join(Connection().pack_command(*words))  # type: ignore[no-untyped-call]


def test_the_command_is_what_the_library_would_send() -> None:
    positions = Positions(256, 5.0)
    told: dict[str, str] = {}
    for number in range(50):
        told[f"run:ü{number}"] = f"1-{number}"
        positions.set(f"run:ü{number}", f"1-{number}")
    for number in range(0, 50, 3):
        del told[f"run:ü{number}"]
        positions.remove(f"run:ü{number}")
    told["run:ü4"] = "2-100"
    positions.set("run:ü4", "2-100")
    assert positions.command() == packed_by_library(told)
    assert dict(positions) == told
    assert positions.get("run:ü3") is None
