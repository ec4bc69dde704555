"""Urgent loads pass others between two pieces of their reads, and nobody starves."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.flow.load_scheduler import MOST_BEFORE_A_PIECE, PICKS_BY_AGE, LoadScheduler

BLOCKS, PAYLOAD = 24, 100_000  # 100 KiB a slot: ten to a piece, three pieces a prompt
LAYOUT = kvtier.LayoutSpec(4, {"block": kvtier.parts(("kv", PAYLOAD))})
NAMES = "ABCDEFGH"


def prompt(name):
    return [NAMES.index(name), *range(4 * BLOCKS)]


class Watched(PosixIo):
    """Notes whose blocks are read, and runs a hook before the first read of each prompt."""

    def __init__(self):
        self.order = ""
        self.before = {}
        self.segments = set()
        self.lock = threading.Lock()
        self.hold = contextlib.nullcontext()  # a lock: no other read begins while a hook runs

    def open_read(self, path):
        fd = super().open_read(path)
        if path.suffix == ".kvs":
            self.segments.add(fd)
        return fd

    def preadv(self, fd, buffers, offset):
        if fd not in self.segments:
            return super().preadv(fd, buffers, offset)
        name = NAMES[min((offset - 4096) // (BLOCKS * 102_400), len(NAMES) - 1)]
        with self.hold:
            with self.lock:
                self.order += name
                hook = self.before.pop(name, None)
            if hook is not None:
                hook()
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def io():
    return Watched()


@pytest.fixture
def open_cache(store, io):
    """A cache that reads from its directory alone, with all prompts of `NAMES` stored there."""
    with kvtier.open(store) as cache:
        ns = cache.namespace(LAYOUT, model="priority")
        for i, name in enumerate(NAMES):
            source = np.full((BLOCKS, PAYLOAD), i, dtype=np.uint8)
            digests = ns.match(prompt(name)).digests
            assert ns.put(digests, source, durability="flushed").wait(60)

    def reopen(**settings):
        return kvtier.open(store, host_bytes=0, io=io, **settings)

    return reopen


class Client:
    def __init__(self, cache):
        self.ns = cache.namespace(LAYOUT, model="priority")

    def load(self, name, priority=0, **keywords):
        match = self.ns.match(prompt(name))
        assert match.n_blocks == BLOCKS
        dst = np.zeros((BLOCKS, PAYLOAD), dtype=np.uint8)
        return name, dst, self.ns.load(match, dst=dst, priority=priority, **keywords)

    def check(self, *loads):
        for name, dst, job in loads:
            assert job.wait(30).ok
            assert (dst == NAMES.index(name)).all()


@pytest.mark.parametrize("helpers", [0, 1])
def test_an_urgent_load_waits_for_one_piece_of_a_big_one_that_runs(open_cache, io, helpers):
    with open_cache(io_threads=1, verify_threads=helpers) as cache:
        client, loads, io.hold = Client(cache), [], threading.Lock()
        io.before["A"] = lambda: loads.append(client.load("B", priority=1))
        loads.append(client.load("A", priority=-1))
        client.check(*loads[::-1])
        client.check(*loads)
    pieces_before = io.order.index("B")
    assert pieces_before <= 1 + helpers
    assert "A" not in io.order[pieces_before : io.order.rindex("B")]
    assert sorted(io.order) == sorted("AAABBB")


def test_a_load_of_the_same_urgency_does_not_pass(open_cache, io):
    with open_cache(io_threads=1, verify_threads=0) as cache:
        client, loads = Client(cache), []
        io.before["A"] = lambda: loads.append(client.load("B"))
        loads.append(client.load("A"))
        client.check(loads[0])
        client.check(*loads)
    assert io.order == "AAABBB"


def test_waiting_loads_start_by_urgency_then_by_age(open_cache, io):
    with open_cache(io_threads=1, verify_threads=0) as cache:
        client, loads = Client(cache), []

        def submit():
            loads.extend(client.load(name, p) for name, p in zip("BCDE", (0, 5, 5, 9), strict=True))

        io.before["A"] = submit
        loads.append(client.load("A", priority=9))
        client.check(loads[0])
        client.check(*loads)
    assert io.order == "AAAEEECCCDDDBBB"


def test_loads_within_loads_each_let_more_urgent_ones_pass(open_cache, io):
    with open_cache(io_threads=1, verify_threads=0) as cache:
        client, loads = Client(cache), []
        for i, (outer, inner) in enumerate(zip("ABC", "BCD", strict=True)):
            io.before[outer] = lambda inner=inner, i=i: loads.append(client.load(inner, i + 1))
        loads.append(client.load("A", priority=0))
        client.check(loads[0])
        client.check(*loads)
    assert io.order == "ABCDDDCCBBAA"


def test_while_an_urgent_load_runs_elsewhere_the_others_leave_the_storage_to_it(open_cache, io):
    with open_cache(io_threads=2, verify_threads=0) as cache:
        client, loads, started = Client(cache), [], threading.Event()
        io.before["B"] = started.set

        def submit():
            loads.append(client.load("B", priority=1))
            assert started.wait(30), "the free thread takes it"

        io.before["A"] = submit
        loads.append(client.load("A"))
        client.check(loads[0])
        client.check(*loads)
    assert io.order[:5] == "ABBBA"


def test_a_load_done_by_its_caller_is_let_pass_too(open_cache, io):
    with open_cache(io_threads=1, verify_threads=0) as cache:
        client, loads, started = Client(cache), [], threading.Event()
        io.before["B"] = started.set
        mine = threading.Thread(
            target=lambda: loads.append(client.load("B", priority=1, wait=True))
        )

        def submit():
            mine.start()
            assert started.wait(30)

        io.before["A"] = submit
        loads.append(client.load("A"))
        client.check(loads[0])
        mine.join(30)
        client.check(*loads)
    assert io.order == "ABBBAA"


def test_an_urgent_load_of_what_a_paused_one_reads_does_not_wait_for_it(open_cache, io):
    with open_cache(io_threads=1, verify_threads=0) as cache:
        client, loads = Client(cache), []
        io.before["A"] = lambda: loads.append(client.load("A", priority=1))
        loads.append(client.load("A", priority=0))
        client.check(*loads)


def test_a_stream_of_urgent_loads_does_not_starve_the_others():
    queue, order = LoadScheduler(1), []
    started, gate, done = threading.Event(), threading.Event(), threading.Event()

    def urgent(urgency):
        order.append("u")
        if order.count("u") < 100:
            queue.submit(urgent, 1)

    def patient(urgency):
        started.set()
        gate.wait(30)
        for _ in range(3):
            urgency.give_way()
            order.append("p")
        done.set()

    queue.submit(patient, 0)
    assert started.wait(30)
    queue.submit(urgent, 1)
    gate.set()
    assert done.wait(30)
    queue.shutdown()
    assert "".join(order).startswith(("u" * MOST_BEFORE_A_PIECE + "p") * 3)


def test_a_waiting_load_is_started_although_more_urgent_ones_keep_coming():
    queue, order = LoadScheduler(1), []
    first, last = threading.Event(), threading.Event()

    def urgent(urgency):
        order.append("u")
        if order.count("u") < 50:
            queue.submit(urgent, 1)
        else:
            last.set()

    queue.submit(lambda urgency: first.wait(30), 2)
    queue.submit(lambda urgency: order.append("p"), 0)
    queue.submit(urgent, 1)
    first.set()
    assert last.wait(30)
    queue.shutdown()
    assert order.index("p") < PICKS_BY_AGE


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 3)), max_size=30), st.integers(1, 3))
def test_every_load_is_done_once_whatever_passes_whom(loads, threads):
    queue, done, lock = LoadScheduler(threads), [], threading.Lock()

    def work(number, pieces):
        def run(urgency):
            for _ in range(pieces):
                urgency.give_way()
            with lock:
                done.append(number)
            if number % 7 == 6:
                raise ValueError("its own affair")

        return run

    for number, (priority, pieces) in enumerate(loads):
        queue.submit(work(number, pieces), priority)
    queue.shutdown()
    assert sorted(done) == list(range(len(loads)))
    with pytest.raises(kvtier.ClosedError):
        queue.submit(work(0, 0), 0)


def test_a_priority_is_a_whole_number(open_cache):
    with open_cache() as cache:
        client = Client(cache)
        for wrong in (1.5, "high", None):
            with pytest.raises(kvtier.ConfigError, match="whole number"):
                client.load("A", priority=wrong)


def test_asyncio_callers_have_priorities_too(open_cache):
    async def main(cache):
        ns = cache.namespace(LAYOUT, model="priority")
        dst = np.zeros((BLOCKS, PAYLOAD), dtype=np.uint8)
        result = await ns.aload(ns.match(prompt("C")), dst=dst, priority=3)
        assert result.ok
        assert (dst == 2).all()

    with open_cache() as cache:
        asyncio.run(main(cache))
