"""`put(copy=False)`: a source that changes before the ticket is done is exposed, never served."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.buffers import records_in
from deepinfer_kvtier.io import PosixIo
from deepinfer_kvtier.puts import queue as queue_module
from deepinfer_kvtier.puts import summing
from deepinfer_kvtier.puts.handover import SAMPLE_EVERY, take_witnesses

PAYLOAD, BLOCKS = 40_000, 4
LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(("a", 10_000), ("b", 30_000))})
PROMPT = list(range(BLOCKS * 128))
KEY = bytes(range(32))


class Gate:
    """Holds a step of the background work up until the test lets it go on."""

    def __init__(self, step):
        self._step = step
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, *arguments, **keywords):
        self.reached.set()
        assert self.open.wait(20)
        return self._step(*arguments, **keywords)


class SlowWrites(PosixIo):
    """Lets the test act between the write of a segment and what follows it."""

    def __init__(self):
        self.after = None

    def pwritev(self, fd, buffers, offset):
        done = super().pwritev(fd, buffers, offset)
        if self.after is not None and done > PAYLOAD:
            self.after()
        return done


def source_for(digests, kind):
    pool = np.stack([np.frombuffer(d * (PAYLOAD // 32), np.uint8) for d in digests])
    if kind == "rows":
        return pool, pool
    return pool, [[row[:10_000], row[10_000:]] for row in pool]


def served(cache, ns, pool):
    """What comes back is what was handed over, or nothing; returns how many blocks came."""
    with ns.match(PROMPT, leave_last=False) as match:
        room = np.zeros((match.n_blocks, PAYLOAD), np.uint8)
        result = ns.load(match, dst=room, wait=True).wait()
        for i, status in enumerate(result.blocks):
            if status is kvtier.Status.OK:
                assert np.array_equal(room[i], pool[i]), f"block {i} is not what was handed over"
        return result.ok_prefix


@pytest.mark.parametrize(
    ("durability", "host_bytes"), [("flushed", 0), ("behind", 1 << 20)], ids=["no room", "staged"]
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"encryption_key": KEY}, {"compression": "zstd-1"}],
    ids=["as it is", "sealed", "compressed"],
)
@pytest.mark.parametrize(
    ("kind", "check"), [("rows", "sampled"), ("rows", "full"), ("parts", "sampled")]
)
@pytest.mark.parametrize("step", ["before the sum", "between sum and copy"])
def test_a_source_overwritten_before_done_is_exposed_and_never_served(
    store, monkeypatch, caplog, durability, host_bytes, settings, kind, check, step
):
    if step == "before the sum":
        gate = Gate(summing.take_checksums)
        monkeypatch.setattr(summing, "take_checksums", gate)
    else:
        gate = Gate(queue_module.WriteQueue._stage)
        monkeypatch.setattr(
            queue_module.WriteQueue, "_stage", lambda self, batch: gate(self, batch)
        )
    with kvtier.open(store, host_bytes=host_bytes, handover_check=check, **settings) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, kind)
        original = pool.copy()
        ticket = ns.put(digests, source, copy=False, durability=durability)
        assert gate.reached.wait(20)
        pool[2] ^= 0xFF  # the slot is reused too early
        gate.open.set()
        late = settings and host_bytes == 0 and step != "before the sum"
        if late:
            assert ticket.wait(20), "the bytes were taken over while they were right"
            assert cache.flush().done
            assert served(cache, ns, original) == BLOCKS
            return
        assert not ticket.wait(20)
        assert ticket.reasons == (None, None, "source_changed", None)
        assert ticket.stored == (True, True, False, True)
        assert ticket.accepted == (True,) * BLOCKS
        assert cache.flush().done
        assert cache.stats()["queue"]["source_changed"] == 1
        assert "kvtier_queue_source_changed_total 1" in cache.metrics()
        assert "source of put(copy=False) was changed" in caplog.text
        assert served(cache, ns, original) == 2
    with kvtier.open(store, host_bytes=0, **settings) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        assert served(cache, ns, original) == 2
        assert cache.stats()["disk"].get("corrupt", 0) == 0, "what was exposed is not even found"
        assert ns.put(digests, original, durability="flushed").wait(20)
        assert served(cache, ns, original) == BLOCKS


def test_a_source_changed_after_the_write_but_before_done_is_taken_back(store):
    io = SlowWrites()
    with kvtier.open(store, host_bytes=0, io=io) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        original = pool.copy()
        io.after = lambda: pool[2].fill(7)
        ticket = ns.put(digests, source, copy=False, durability="flushed")
        assert not ticket.wait(20)
        io.after = None
        assert ticket.reasons[2] == "source_changed"
        assert served(cache, ns, original) == 2


@pytest.mark.parametrize("check", ["sampled", "full", "off"])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["rows", "parts"])
@pytest.mark.parametrize("part_sums", [False, True])
def test_a_source_that_stays_as_it_is_passes_every_check(store, check, host_bytes, kind, part_sums):
    settings = {"handover_check": check, "part_sums": part_sums}
    with kvtier.open(store, host_bytes=host_bytes, **settings) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, kind)
        assert ns.put(digests, source, copy=False, durability="flushed").wait(20)
        assert served(cache, ns, pool) == BLOCKS
        assert cache.stats()["queue"].get("source_changed", 0) == 0


def test_between_the_sum_and_the_copy_a_single_byte_is_noticed(store, monkeypatch):
    """Until the sum is taken, a moment after the put, only samples are known of a source."""
    gate = Gate(queue_module.WriteQueue._stage)
    monkeypatch.setattr(queue_module.WriteQueue, "_stage", lambda self, batch: gate(self, batch))
    with kvtier.open(store, host_bytes=1 << 20) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        original = pool.copy()
        ticket = ns.put(digests, source, copy=False)
        assert gate.reached.wait(20)
        pool[2, 9] ^= 1
        gate.open.set()
        assert not ticket.wait(20)
        assert ticket.reasons[2] == "source_changed"
        assert cache.flush().done
        assert served(cache, ns, original) == 2


@pytest.mark.parametrize("settings", [{"encryption_key": KEY}, {"compression": "zstd-1"}])
def test_transformed_records_go_on_to_further_tiers_without_their_source(store, tmp_path, settings):
    """Without room in memory the queue owns their bytes; the source is free, and is changed."""
    pytest.importorskip("obstore")
    tiers = [f"file://{tmp_path}/bucket?linger_s=0"]
    with kvtier.open(store, host_bytes=0, tiers=tiers, secret=KEY, **settings) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        assert ns.put(digests, source, copy=False).wait(20)
        pool.fill(3)
        assert cache.flush().done
        assert cache.stats()["tiers"]["s3"]["stored_records"] == BLOCKS
        spill = cache.stats()["spills"]["s3"]
        assert spill.get("failed_records", 0) == spill.get("source_changed", 0) == 0


def test_after_done_the_source_may_change(store):
    with kvtier.open(store, host_bytes=1 << 20) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        original = pool.copy()
        assert ns.put(digests, source, copy=False).wait(20)
        pool.fill(9)
        assert cache.flush().done
        assert served(cache, ns, original) == BLOCKS


@given(st.integers(0, PAYLOAD - 1), st.integers(1, PAYLOAD), st.booleans())
def test_a_sample_sees_1032_changed_bytes_in_a_row_and_a_checksum_sees_one(at, length, full):
    pool = np.random.default_rng(1).integers(0, 256, (3, PAYLOAD + 8), dtype=np.uint8)
    records = records_in(pool, 3, (PAYLOAD,), writable=False)
    (witness,) = take_witnesses(records, [1], "full" if full else "sampled")
    views = records.views(1)
    assert witness.fits(views)
    pool[1, at : min(at + length, PAYLOAD)] ^= 0x55
    changed = min(length, PAYLOAD - at)
    if full or (changed >= SAMPLE_EVERY + 8 and at + changed < PAYLOAD - SAMPLE_EVERY):
        assert not witness.fits(views)


def test_witnesses_of_scattered_records_belong_to_them():
    pool = np.random.default_rng(1).integers(0, 256, (5, PAYLOAD), dtype=np.uint8)
    records = records_in(pool, 5, (PAYLOAD,), writable=False)
    which = [0, 3, 4]
    for i, witness in zip(which, take_witnesses(records, which, "sampled"), strict=True):
        assert [witness.fits(records.views(j)) for j in range(5)] == [i == j for j in range(5)]
