"""Cache hits end to end on the toy runner: same tokens, honest counts, whatever the store does."""

from __future__ import annotations

import threading

import pytest
from toy_engine import BLOCK, Recorder, alone, ask, greedy, prompt, request, run, toy

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.prefix_store import Loaded
from deepinfer_engine.kv.connector import KVConnector
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.router.local import LocalEngine

LONG = greedy(40, ignore_eos=True)


class Faulty(MemoryStore):
    """A store whose records can rot, and whose calls can fail."""

    def __init__(self, layout):
        super().__init__(layout)
        self.rotten_blocks: set[int] = set()
        self.rotten_states: set[int] = set()
        self.failing: set[str] = set()

    def _maybe_fail(self, what):
        if what in self.failing:
            raise OSError(f"{what} failed")

    def match(self, tokens, salt, *, limit_tokens=None, pictures=()):
        self._maybe_fail("match")
        return super().match(tokens, salt, limit_tokens=limit_tokens, pictures=pictures)

    def load(self, hit, blocks, state):
        self._maybe_fail("load")
        n = hit.n_tokens // BLOCK
        bad = [i for i in range(n) if i in self.rotten_blocks]
        if bad:
            for view in blocks[: bad[0] + 1]:
                view[:] = b"\x55" * len(view)
            return Loaded(bad[0] * BLOCK, False)
        if hit.n_tokens in self.rotten_states:
            state[:] = b"\x55" * len(state)
            return Loaded(hit.n_tokens, False)
        return super().load(hit, blocks, state)

    def put(self, *arguments):
        self._maybe_fail("put")
        return super().put(*arguments)


class Shared:
    """A store that outlives its engines."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def close(self):
        pass


def talk(store, *prompts, sampling=LONG, **runner_options):
    """Answers of a new engine on this store, one request after the other, and its status."""
    answers = []

    async def body():
        engine = LocalEngine(toy(**runner_options), store=Shared(store))
        for i, tokens in enumerate(prompts):
            answers.append(await ask(engine, request(f"r{i}", tokens, sampling)))
        engine.loop.audit()
        (status,) = await engine.status()
        answers.append(status)
        await engine.close()

    run(body())
    return answers


@pytest.mark.parametrize("nextn", [0, 5])
def test_the_second_turn_reuses_every_full_block_of_the_first(nextn):
    first = prompt(1, 3 * BLOCK + 3)
    answer = alone(first, LONG)
    second = [*first, *answer, 1, 2, 3]
    one, two, status = talk(MemoryStore(toy().layout), first, second, nextn=nextn)
    assert one.tokens == answer
    assert two.tokens == alone(second, LONG)
    # All but the last token of the first turn was fed: that is what can be in whole blocks.
    assert two.cached == (len(first) + len(answer) - 1) // BLOCK * BLOCK
    assert two.usage.cached_tokens == two.cached
    assert status.counters["prefix_hit_tokens_memory"] == two.cached


@pytest.mark.parametrize(
    ("rot", "cached"),
    [
        ({"rotten_blocks": {0}}, 0),
        ({"rotten_blocks": {2}}, 2 * BLOCK),
        ({"rotten_states": {4 * BLOCK}}, 3 * BLOCK),
        ({"rotten_states": {4 * BLOCK, 3 * BLOCK}, "rotten_blocks": {1}}, BLOCK),
        ({"failing": {"load"}}, 0),
        ({"failing": {"match"}}, 0),
    ],
)
def test_a_failed_load_is_a_shorter_hit_and_never_a_wrong_token(rot, cached):
    store = Faulty(toy().layout)
    tokens = prompt(1, 4 * BLOCK + 3)
    talk(store, tokens)
    for name, value in rot.items():
        setattr(store, name, value)
    answer, status = talk(store, tokens)
    assert answer.tokens == alone(tokens, LONG)
    assert answer.cached == cached
    assert status.counters["prefix_miss_tokens"] == len(tokens) - cached


def test_a_store_that_takes_nothing_costs_hits_and_nothing_else():
    store = Faulty(toy().layout)
    store.failing = {"put"}
    tokens = prompt(1, 4 * BLOCK + 3)
    one, two, status = talk(store, tokens, tokens)
    assert one.tokens == two.tokens == alone(tokens, LONG)
    assert (one.cached, two.cached) == (0, 0)
    assert status.counters["prefix_errors"] > 0


def test_a_users_cache_is_invisible_to_another_salt():
    tokens = prompt(1, 4 * BLOCK + 3)

    async def body():
        engine = LocalEngine(toy(), store=MemoryStore(toy().layout))
        cached = [
            (await ask(engine, request(f"r{i}", tokens, LONG, salt=salt))).cached
            for i, salt in enumerate(["a", "b", "a"])
        ]
        assert cached == [0, 0, 4 * BLOCK]
        await engine.close()

    run(body())


def test_more_bytes_than_may_be_in_flight_are_dropped_and_counted():
    runner = toy()
    connector = KVConnector(MemoryStore(runner.layout), runner, max_bytes_in_flight=1000)
    loop = EngineLoop(
        runner,
        EngineConfig(),
        "both",
        parking=HostParking(runner, 0),
        link=connector,
        sink=Recorder(),
    )
    hold = threading.Event()
    connector.after_publications(hold.wait)  # the publisher is busy: everything queues
    loop.submit(request("r", prompt(1, 10 * BLOCK), LONG), "r", 0.0)
    while loop.unfinished:
        if loop.step(0.0) is None:
            loop.wait_for_work()
    hold.set()
    connector.flush()
    assert connector.counters()["prefix_dropped_bytes"] > 0
    assert connector.gauges()["publish_bytes_in_flight"] == 0
    connector.close()


def test_an_abort_during_a_load_waits_for_the_load():
    entered, proceed = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def load(self, hit, blocks, state):
            entered.set()
            assert proceed.wait(30)
            return super().load(hit, blocks, state)

    runner = toy()
    store = Slow(runner.layout)
    tokens = prompt(1, 4 * BLOCK + 3)
    talk(store, tokens)
    connector, sink = KVConnector(store, runner), Recorder()
    loop = EngineLoop(
        runner, EngineConfig(), "both", parking=HostParking(runner, 0), link=connector, sink=sink
    )
    loop.submit(request("r", tokens, LONG), "r", 0.0)
    assert loop.step(0.0) is None
    assert entered.wait(30)
    loop.abort("r")
    assert loop.scheduler.pools.blocks.owned == 5, "the load still writes there"
    proceed.set()
    connector.close()
    assert loop.scheduler.pools.blocks.owned == 0
    assert sink.ends["r"][0].finish == "abort"
