"""Long runs: several threads share the pieces of one read, and none outlives it."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo

BLOCKS, PAYLOAD = 24, 100_000  # 100 KiB a slot: ten to a piece
LAYOUT = kvtier.LayoutSpec(4, {"block": kvtier.parts(("kv", PAYLOAD))})
PROMPT = list(range(4 * BLOCKS + 1))


class Hooked(PosixIo):
    """Asks before a read which lets it go on, wait for another one, or fail."""

    def __init__(self):
        self.before = None

    def preadv(self, fd, buffers, offset):
        if self.before is not None:
            self.before()
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def io():
    return Hooked()


@pytest.fixture
def cache(store, io):
    with kvtier.open(store, host_bytes=0, io=io, verify_threads=1) as cache:
        yield cache


def stored(cache):
    ns = cache.namespace(LAYOUT, model="reading")
    source = np.random.default_rng(0).integers(0, 256, (BLOCKS, PAYLOAD), dtype=np.uint8)
    assert ns.put(ns.match(PROMPT).digests, source, durability="flushed").wait(60)
    return ns, source


def load(ns, dst):
    with ns.match(PROMPT) as match:
        assert match.n_blocks == BLOCKS
        return ns.load(match, dst=dst, wait=True).wait()


def test_two_threads_share_the_pieces_of_a_run(cache, io):
    ns, source = stored(cache)
    both = threading.Barrier(2)
    met = threading.local()

    def meet_once():
        if not hasattr(met, "done"):
            met.done = True
            both.wait(30)  # alone, either of them would break the barrier here

    io.before = meet_once
    dst = np.zeros_like(source)
    assert load(ns, dst).ok
    assert np.array_equal(dst, source)


def test_a_helper_that_does_not_come_is_not_waited_for(cache, io):
    ns, source = stored(cache)
    free = threading.Event()
    busy = cache.disk.verifiers.submit(free.wait, 30)
    readers = set()
    io.before = lambda: readers.add(threading.get_ident())
    dst = np.zeros_like(source)
    try:
        assert load(ns, dst).ok
        assert not busy.done()
    finally:
        free.set()
    assert np.array_equal(dst, source)
    assert readers == {threading.get_ident()}


def test_a_failed_read_returns_after_the_other_thread_has_left_the_destination(cache, io):
    ns, source = stored(cache)
    caller, inside, raised = threading.get_ident(), threading.Event(), threading.Event()
    left = []

    def before():
        if threading.get_ident() == caller:
            assert inside.wait(30)
            raised.set()
            raise OSError(errno.EIO, "broken")
        inside.set()
        assert raised.wait(30)
        for number in range(200_000):  # longer than the way back of the caller
            last = number
        left.append(last)

    io.before = before
    result = load(ns, np.zeros_like(source))
    assert left, "the other thread was still writing when the call returned"
    assert set(result.blocks) == {kvtier.Status.ERROR}
    assert cache.stats()["disk"]["read_errors"] == 1


@pytest.mark.parametrize("threads", [0, 1])
def test_behind_the_end_of_a_cut_file_everything_is_a_miss(store, threads):
    with kvtier.open(store) as cache:
        _, source = stored(cache)
    with kvtier.open(store, host_bytes=0, verify_threads=threads) as cache:
        ns = cache.namespace(LAYOUT, model="reading")
        with ns.match(PROMPT) as match:
            (segment,) = store.rglob("*.kvs")
            with segment.open("r+b") as file:
                file.truncate(4096 + 13 * 102_400 + 50)
            dst = np.zeros_like(source)
            result = ns.load(match, dst=dst, wait=True).wait()
        ok, miss = kvtier.Status.OK, kvtier.Status.MISS
        read = result.blocks.count(ok)
        assert result.blocks == (ok,) * read + (miss,) * (BLOCKS - read)
        assert read == 13
        assert np.array_equal(dst[:read], source[:read])
        assert cache.stats()["disk"]["short_reads"] == BLOCKS - read
