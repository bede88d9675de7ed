"""An Idempotency-Key makes one run, whoever asks, however often, whatever stops in between."""

from __future__ import annotations

import asyncio

import pytest

from gateway.bus import Bus
from gateway.errors import Conflict
from gateway.store.idempotency import Claim, Idempotency
from gateway.store.keys import named_key
from tests.conftest import ValkeyServer
from workers.messages import run_events_key

from .bus_fixture import connected

ONE, TWO = "run-" + "1" * 32, "run-" + "2" * 32


async def create(bus: Bus, run_id: str) -> None:
    await bus.append(run_events_key(run_id), "0-1", b"accepted", create=True)


async def test_the_same_call_again_finds_its_run(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus)
        assert await keys.claim("t", "key", b"body", ONE) == Claim(ONE, is_new=True)
        await create(bus, ONE)
        assert await keys.claim("t", "key", b"body", TWO) == Claim(ONE, is_new=False)
        with valkey.client() as client:
            assert 86_000 < int(client.ttl(named_key("claim", "t", "key"))) <= 86_400


async def test_another_body_is_a_conflict_that_names_the_key_and_the_run(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus)
        await keys.claim("t", "key", b"body", ONE)
        with pytest.raises(Conflict) as caught:
            await keys.claim("t", "key", b"other", TWO)
    assert (caught.value.status, caught.value.kind) == (409, "idempotency_conflict")
    assert "'key'" in caught.value.message and ONE in caught.value.message


async def test_a_tenants_keys_are_its_own(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus)
        assert (await keys.claim("a", "key", b"body", ONE)).is_new
        assert (await keys.claim("b", "key", b"other", TWO)).is_new
        assert named_key("claim", "a", "b\0c") != named_key("claim", "a\0b", "c")


async def test_of_many_at_once_one_creates_and_the_others_wait_for_it(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus, connected(valkey.url, "g2") as other:

        async def call(which: Bus, number: int) -> Claim:
            claim = await Idempotency(which).claim("t", "key", b"body", f"run-{number:032x}")
            if claim.is_new:
                await asyncio.sleep(0.1)
                await create(which, claim.run_id)
            return claim

        claims = await asyncio.gather(*(call((bus, other)[number % 2], number) for number in range(10)))
    assert sum(claim.is_new for claim in claims) == 1
    assert len({claim.run_id for claim in claims}) == 1


async def test_a_claimant_that_stops_before_its_run_is_replaced(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus, claim_seconds=0.2)
        await keys.claim("t", "key", b"body", ONE)

        async def call(run_id: str) -> Claim:
            claim = await keys.claim("t", "key", b"body", run_id)
            if claim.is_new:
                await create(bus, claim.run_id)
            return claim

        claims = await asyncio.gather(call(TWO), call("run-" + "3" * 32))
        assert {claim.run_id for claim in claims} == {ONE}, "the first may be slow and create it yet"
        assert sum(claim.is_new for claim in claims) == 1
        await keys.release("t", "key", ONE)  # its claim no more: nothing happens
        assert await keys.claim("t", "key", b"body", ONE) == Claim(ONE, is_new=False)


async def test_a_refused_call_gives_its_key_back(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus)
        await keys.claim("t", "key", b"body", ONE)
        await keys.release("t", "key", TWO)  # not its claim: nothing happens
        await keys.release("t", "key", ONE)
        await keys.release("t", "key", ONE)
        assert await keys.claim("t", "key", b"other", TWO) == Claim(TWO, is_new=True)


async def test_a_run_that_has_been_is_never_new_whatever_is_kept_of_it(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus, claim_seconds=0.1)
        await keys.claim("t", "seen", b"body", ONE)
        await create(bus, ONE)
        assert not await keys.is_made("t", "seen")
        assert not (await keys.claim("t", "seen", b"body", TWO)).is_new  # its gateway died before it settled
        assert await keys.is_made("t", "seen")
        await keys.claim("t", "told", b"body", TWO)
        await keys.settle("t", "told", ONE)  # not its run: nothing happens
        await keys.settle("t", "told", TWO)
        await keys.settle("t", "told", TWO)
        await bus.commands.delete(run_events_key(ONE))
        await asyncio.sleep(0.15)
        assert await keys.claim("t", "seen", b"body", TWO) == Claim(ONE, is_new=False)
        assert await keys.claim("t", "told", b"body", ONE) == Claim(TWO, is_new=False)
        with valkey.client() as client:
            assert 86_000 < int(client.ttl(named_key("claim", "t", "told"))) <= 86_400


async def test_a_run_that_is_deleted_before_its_key_is_settled_is_never_new(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        keys = Idempotency(bus, claim_seconds=0.1)
        await keys.claim("t", "key", b"body", ONE)
        await keys.bury(ONE)
        await asyncio.sleep(0.15)
        assert await keys.claim("t", "key", b"body", TWO) == Claim(ONE, is_new=False)
