"""Decode loads what is cached of a prompt from the store itself; prefill sends the rest."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from toy_engine import BLOCK, alone, ask, cluster, greedy, patient, prompt, request, run, toy, until

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.kv.memory import MemoryStore

FIRST = prompt(1, 5 * BLOCK + 3)
HELD = 5 * BLOCK
SECOND = (*FIRST, *prompt(2, BLOCK))
BLOCK_BYTES, STATE_BYTES = toy().layout.block_bytes, toy().layout.state_bytes
SENT = 2 * BLOCK_BYTES + STATE_BYTES
"""Of the second turn, when what is cached is not."""


class Shared(MemoryStore):
    """Read by prefill and decode; what decode does with it can be disturbed."""

    shared_as = "both"

    def __init__(self, layout):
        super().__init__(layout)
        self.asked = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.loses = lambda hit: hit

    def match_blocks(self, wanted):
        self.asked.append(len(wanted.tokens))
        hit = super().match_blocks(wanted)
        assert self.may_load.wait(60)
        return self.loses(hit)

    def close(self):
        """The other worker may still read it."""


def shared():
    store = Shared(toy().layout)
    return store, lambda runner: store


def sent(it):
    return sum(w.service.extra_counters()["transfer_bytes"] for w in it.prefills)


def stored(it):
    return sum(w.service.extra_counters()["transfer_stored_bytes"] for w in it.decodes)


def loads_stored(it):
    for worker in it.prefills:
        worker.service.loads_stored = True


async def second_turn(it):
    """The answer, and how many bytes prefill sent for it."""
    before = sent(it)
    answer = await ask(it.engine, request("second", SECOND))
    assert answer.tokens == alone(SECOND, greedy())
    assert answer.cached == HELD
    await until(it.idle)
    return sent(it) - before


def test_prefill_sends_only_what_is_not_in_the_store_of_both(tmp_path):
    async def body():
        async with cluster(store=lambda r: open_store(patient(tmp_path), r.layout)) as it:
            loads_stored(it)
            await ask(it.engine, request("first", FIRST))
            assert await second_turn(it) == SENT
            assert stored(it) == 5 * BLOCK_BYTES

    run(body())


def test_another_salt_or_other_pictures_load_nothing_of_this(tmp_path):
    async def body():
        async with cluster(store=lambda r: open_store(patient(tmp_path), r.layout)) as it:
            loads_stored(it)
            await ask(it.engine, request("first", FIRST, salt="one"))
            answer = await ask(it.engine, request("second", SECOND, salt="other"))
            assert answer.tokens == alone(SECOND, greedy())
            assert answer.cached == stored(it) == 0

    run(body())


@pytest.mark.parametrize("kept", [0, 1, 4])
def test_what_decode_does_not_find_is_sent(kept):
    store, of = shared()

    def loses(hit):
        return None if kept == 0 else replace(hit, n_tokens=kept * BLOCK, handle=hit.handle[:kept])

    async def body():
        async with cluster(store=of) as it:
            loads_stored(it)
            await ask(it.engine, request("first", FIRST))
            store.loses = loses
            assert await second_turn(it) == SENT + (5 - kept) * BLOCK_BYTES
            assert store.asked == [HELD]

    run(body())


def test_a_store_that_fails_at_decode_costs_a_transfer_and_no_answer():
    store, of = shared()

    def loses(hit):
        raise OSError("the disk is gone")

    async def body():
        async with cluster(store=of) as it:
            loads_stored(it)
            await ask(it.engine, request("first", FIRST))
            store.loses = loses
            assert await second_turn(it) == SENT + 5 * BLOCK_BYTES

    run(body())


@pytest.mark.parametrize("why", ["not wanted", "another store"])
def test_without_a_store_of_both_all_is_sent(why, monkeypatch):
    store, of = shared()

    async def body():
        if why == "another store":
            names = iter(range(100))
            monkeypatch.setattr(Shared, "shared_as", property(lambda self: f"own {next(names)}"))
        async with cluster(store=of) as it:
            if why == "another store":
                loads_stored(it)
            await ask(it.engine, request("first", FIRST))
            assert await second_turn(it) == SENT + 5 * BLOCK_BYTES
            assert store.asked == []

    run(body())


def test_a_prefill_that_dies_while_decode_loads_frees_the_memory_when_the_load_ends():
    store, of = shared()

    async def body():
        async with cluster(store=of, prefills=2, recovery_s=30.0) as it:
            loads_stored(it)
            (decode,) = it.decodes
            await ask(it.engine, request("first", FIRST))
            store.may_load.clear()
            asked = asyncio.create_task(ask(it.engine, request("second", SECOND)))
            await until(lambda: store.asked)
            (loaded,) = decode.service.landings._loads
            (victim,) = [w for w in it.prefills if w.service._jobs]
            await victim.kill()
            await until(lambda: decode.service.landings.granted(loaded.grant_id) is None)
            pools = decode.service.loop.scheduler.pools
            pools.audit()
            assert all(pools.blocks._references[b] for b in loaded.reservation.blocks[:5])
            store.may_load.set()
            assert (await asked).tokens == alone(SECOND, greedy())
            it.prefills.remove(victim)
            await until(lambda: not decode.service.landings._loads)
            await until(it.idle)

    run(body())


def test_a_client_that_leaves_while_decode_loads_leaves_nothing_behind():
    store, of = shared()

    async def body():
        async with cluster(store=of) as it:
            loads_stored(it)
            await ask(it.engine, request("first", FIRST))
            store.may_load.clear()
            asked = asyncio.create_task(ask(it.engine, request("second", SECOND)))
            await until(lambda: store.asked)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            (decode,) = it.decodes
            await until(lambda: not decode.service.unfinished())
            assert not it.idle(), "the load still writes"
            store.may_load.set()
            await until(it.idle)
            assert (await ask(it.engine, request("third", SECOND))).tokens == alone(
                SECOND, greedy()
            )
            await until(it.idle)

    run(body())


def test_a_prompt_whose_first_token_is_its_last_ends_while_decode_loads():
    store, of = shared()

    async def body():
        async with cluster(store=of) as it:
            loads_stored(it)
            await ask(it.engine, request("first", FIRST))
            store.may_load.clear()
            one = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
            answer = await ask(it.engine, request("second", SECOND, one))
            assert answer.tokens == alone(SECOND, one)
            store.may_load.set()
            await until(it.idle)

    run(body())
