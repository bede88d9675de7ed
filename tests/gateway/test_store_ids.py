"""Token ids as deltas: read back exactly, in a bounded chain and within a bounded part of the bus."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bus import Bus
from gateway.store.ids import MAX_CHAIN, IdStore, shared_ids
from gateway.store.keys import run_key
from tests.conftest import ValkeyServer
from workers.messages import KEY_PREFIX

from .bus_fixture import connected

LIMIT_BYTES = 256 << 20


def ids_of(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def text_like(random: np.random.Generator, length: int) -> bytes:
    """Ids spread as words are (Zipf), over a vocabulary of 150,000."""
    return (random.zipf(1.3, length) % 150_000).astype("<u4").tobytes()


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_shared_ids_is_the_longest_common_start(one: list[int], other: list[int]) -> None:
    shared = shared_ids(ids_of(*one), ids_of(*other))
    assert one[:shared] == other[:shared]
    assert one[shared : shared + 1] != other[shared : shared + 1] or shared == min(len(one), len(other))


@pytest.mark.parametrize("recent_bytes", [0, 1 << 20])
async def test_ids_are_read_as_they_were_put(valkey: ValkeyServer, recent_bytes: int) -> None:
    async with connected(valkey.url) as bus:
        store = IdStore(bus, recent_bytes=recent_bytes)
        kept = {
            "empty": b"",
            "parent": ids_of(*range(1000)),
            "child": ids_of(*range(900), 7, 8, 9),
            "grandchild": ids_of(*range(900), 7, 8, 1),
            "stranger": ids_of(5, 4, 3),
            "same": ids_of(*range(1000)),
            "shorter": ids_of(*range(10)),
        }
        before: list[str] = []
        for run_id, ids in kept.items():
            await store.put(run_id, ids, before)
            before.append(run_id)
        for run_id, ids in kept.items():
            assert await store.get(run_id) == ids, run_id
            assert await IdStore(bus).get(run_id) == ids, "by another gateway"
        assert await store.get("unknown") is None


async def test_a_runs_new_ids_leave_what_is_based_on_its_old_ones(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = IdStore(bus, recent_bytes=0)
        await store.put("parent", ids_of(*range(100)))
        await store.put("child", ids_of(*range(90), 1), ["parent"])
        await store.put("parent", ids_of(*range(50), 9, 9, 9))  # a steer has cut its turn
        assert await store.get("child") == ids_of(*range(90), 1)
        assert await store.get("parent") == ids_of(*range(50), 9, 9, 9)
        await store.remove("parent")
        assert await store.get("parent") is None
        assert await store.get("child") == ids_of(*range(90), 1)


async def test_ids_that_are_put_again_are_not_based_on_themselves(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        first, longer, other = ids_of(*range(200)), ids_of(*range(300)), ids_of(*range(150), 7, 7)
        for put in (first, first, longer, longer, other, first, longer):
            await IdStore(bus).put("run", put)
            assert await IdStore(bus).get("run") == put
            await IdStore(bus).put("child", put, ["run"])
            assert await IdStore(bus).get("child") == put


async def test_ids_whose_base_is_gone_are_put_again_whole(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        ids = IdStore(bus)
        await ids.put("run", ids_of(*range(200)))
        await ids.put("run", ids_of(*range(300)))
        with valkey.client() as client:
            base, _ = client.zrange(f"{KEY_PREFIX}ids:order", 0, -1)
            client.delete(f"{KEY_PREFIX}ids:{base.decode()}")
        await ids.put("run", ids_of(*range(300)))
        assert await IdStore(bus).get("run") == ids_of(*range(300))


async def test_a_chain_is_never_longer_than_its_bound_and_siblings_make_none(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = IdStore(bus)
        ids = [ids_of(*range(10 * number + 10)) for number in range(3 * MAX_CHAIN)]
        for number, turn in enumerate(ids):
            await store.put(f"run{number}", turn, [f"run{number - 1}"])
        chains = [known.chain for known in store._recent._known.values()]
        assert max(map(len, chains)) == MAX_CHAIN - 1
        assert await IdStore(bus).get(f"run{len(ids) - 1}") == ids[-1]
        for number in range(8):  # each is based on the parent itself, though its sibling is as like
            await store.put(f"child{number}", ids_of(*range(5), number), ["run0", f"child{number - 1}"])
        assert all(len(store._recent._known[f"child{number}"].chain) == 1 for number in range(8))


async def test_a_put_renews_all_that_its_ids_are_based_on(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = IdStore(bus)
        await store.put("a", ids_of(*range(10)))
        await store.put("b", ids_of(*range(20)), ["a"])
        with valkey.client() as client:
            keys = list(client.scan_iter(f"{KEY_PREFIX}ids:*:*"))
            assert len(keys) == 2
            for key in keys:
                client.expire(key, 100)
            await store.put("c", ids_of(*range(30)), ["b"])
            assert all(int(client.ttl(key)) > 86_000 for key in keys)
            assert int(client.ttl(run_key("c", "ids"))) > 86_000


async def test_ids_that_are_gone_are_not_there_and_not_a_base(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as bus:
        store = IdStore(bus)
        await store.put("a", ids_of(*range(10)))
        await store.put("b", ids_of(*range(20)), ["a"])
        with valkey.client() as client:
            (base,) = client.scan_iter(f"{KEY_PREFIX}ids:a:*")
            client.delete(base)
        assert await IdStore(bus).get("b") is None
        other = IdStore(bus)
        await other.put("c", ids_of(*range(20)), ["a", "b"])
        assert await other.get("c") == ids_of(*range(20))


async def session_of(bus: Bus, num_agents: int, turns: int, length: int) -> tuple[IdStore, dict[str, bytes]]:
    """A session in small: agents of one system prompt, each turn of an agent goes on from its last, and of
    each prompt 89 % is an earlier run's.
    """
    random = np.random.default_rng(1)
    store = IdStore(bus)
    root = text_like(random, length)
    await store.put("root", root)
    told: dict[str, bytes] = {"root": root}
    for agent in range(num_agents):
        before, base = root, "root"
        for turn in range(turns):
            kept = before[: 4 * int(length * 0.89)]
            ids = kept + text_like(random, length - len(kept) // 4)
            run_id = f"run-{agent}-{turn}"
            await store.put(run_id, ids, [base, "root"])
            told[run_id] = before = ids
            base = run_id
    return store, told


async def test_a_session_of_1700_calls_of_64k_tokens_fits_the_bus(own_valkey: ValkeyServer) -> None:
    """At a twentieth: 85 calls. All ids of such a session may take a quarter of the bus."""
    with own_valkey.client() as client:
        async with connected(own_valkey.url) as bus:
            before = int(client.info("memory")["used_memory"])
            _, told = await session_of(bus, num_agents=17, turns=5, length=64_000)
            taken = int(client.info("memory")["used_memory"]) - before
            for run_id in ("run-0-0", "run-16-4", "root"):
                assert await IdStore(bus).get(run_id) == told[run_id]
    assert taken * 20 < LIMIT_BYTES / 4, f"{taken * 20 / 2**20:.0f} MB"


async def test_ids_never_fill_the_bus(valkey: ValkeyServer) -> None:
    random = np.random.default_rng(2)
    async with connected(valkey.url) as bus:
        store = IdStore(bus, max_bytes=1 << 20, recent_bytes=0)
        for number in range(60):
            await store.put(f"run{number}", random.integers(0, 150_000, 16_000).astype("<u4").tobytes())
        with valkey.client() as client:
            kept = sum(int(client.strlen(key)) for key in client.scan_iter(f"{KEY_PREFIX}ids:run*"))
        assert kept <= (1 << 20) * 17 / 16
        assert await store.get("run0") is None
        assert await store.get("run59") is not None


async def test_ids_that_are_put_while_they_are_removed_do_not_come_back(valkey: ValkeyServer) -> None:
    async with connected(valkey.url) as one, connected(valkey.url, "g2") as other:
        putting, removing = IdStore(one), IdStore(other)
        for number in range(20):
            run_id, ids = f"removed{number}", ids_of(*range(number, 500))
            await asyncio.gather(putting.put(run_id, ids), removing.remove(run_id))
            assert await putting.get(run_id) is None and await removing.get(run_id) is None
        await putting.put("removed0", ids_of(1))
        assert await putting.get("removed0") is None
