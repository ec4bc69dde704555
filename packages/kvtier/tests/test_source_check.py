"""`put(copy=False)`: a source that changes before the ticket is done is exposed, never served."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.flow import encode as encode_module
from deepinfer_kvtier.flow import write_queue as queue_module
from deepinfer_kvtier.log import writer
from deepinfer_kvtier.log.writer import SegmentWriter

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
    [{}, {"part_sums": True}, {"encryption_key": KEY}, {"compression": "zstd-1"}],
    ids=["as it is", "part sums", "sealed", "compressed"],
)
@pytest.mark.parametrize("kind", ["rows", "parts"])
@pytest.mark.parametrize("step", ["before the sum", "between sum and copy"])
def test_a_source_overwritten_before_done_is_exposed_and_never_served(
    store, monkeypatch, caplog, durability, host_bytes, settings, kind, step
):
    if step == "before the sum":
        if not settings:
            pytest.skip("summed when it is handed over: nothing lies between")
        gate = Gate(encode_module.encode)
        monkeypatch.setattr(encode_module, "encode", gate)
    else:
        gate = Gate(queue_module.WriteQueue._stage)
        monkeypatch.setattr(
            queue_module.WriteQueue, "_stage", lambda self, batch: gate(self, batch)
        )
    with kvtier.open(store, host_bytes=host_bytes, **settings) as cache:
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


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("kind", ["rows", "parts"])
@pytest.mark.parametrize("part_sums", [False, True])
def test_a_source_that_stays_as_it_is_passes(store, host_bytes, kind, part_sums):
    with kvtier.open(store, host_bytes=host_bytes, part_sums=part_sums) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, kind)
        assert ns.put(digests, source, copy=False, durability="flushed").wait(20)
        assert served(cache, ns, pool) == BLOCKS
        assert cache.stats()["queue"].get("source_changed", 0) == 0


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("at", [0, 9, 1023, 20_000, PAYLOAD - 1])
def test_a_single_changed_byte_is_noticed_wherever_it_is(store, monkeypatch, host_bytes, at):
    gate = Gate(queue_module.WriteQueue._stage)
    monkeypatch.setattr(queue_module.WriteQueue, "_stage", lambda self, batch: gate(self, batch))
    with kvtier.open(store, host_bytes=host_bytes) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        original = pool.copy()
        ticket = ns.put(digests, source, copy=False)
        assert gate.reached.wait(20)
        pool[2, at] ^= 1
        gate.open.set()
        assert not ticket.wait(20)
        assert ticket.reasons[2] == "source_changed"
        assert cache.flush().done
        assert served(cache, ns, original) == 2


@pytest.mark.parametrize("settings", [{}, {"part_sums": True}], ids=["whole", "part sums"])
@pytest.mark.parametrize("leased", [False, True], ids=["no memory", "memory full of leases"])
def test_nobody_sees_a_changed_source_between_its_write_and_its_end(
    store, monkeypatch, settings, leased
):
    """A reader looks at every moment at which it could: after each write of the writer."""
    gate = Gate(encode_module.encode)
    gate.open.set()
    monkeypatch.setattr(encode_module, "encode", gate)
    io, host_bytes = SlowWrites(), BLOCKS * PAYLOAD if leased else 0
    with (
        kvtier.open(store, host_bytes=host_bytes, io=io, **settings) as cache,
        kvtier.open(store, host_bytes=0, **settings) as reader,
    ):
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        other = reader.namespace(LAYOUT, model="m", salt="t")
        if leased:
            full = [n + 1 for n in PROMPT]
            pool, source = source_for(ns.match(full).digests, "rows")
            assert ns.put(ns.match(full).digests, source, durability="flushed").wait(20)
            held = ns.match(full, leave_last=False)
            assert held.n_blocks == BLOCKS
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        original = pool.copy()
        seen: list[int] = []

        def look() -> None:
            pool.fill(0x77)
            with other.match(PROMPT, leave_last=False) as match:
                seen.append(match.n_blocks)
            assert served(reader, other, original) == 0

        io.after = look
        gate.open.clear()
        ticket = ns.put(digests, source, copy=False, durability="flushed")
        pool[:, PAYLOAD // 2 :] = 0x77
        gate.open.set()
        assert not ticket.wait(20)
        io.after = None
        assert ticket.reasons == ("source_changed",) * BLOCKS
        assert not any(seen), "not even found"
        assert served(reader, other, original) == 0
        assert cache.stats()["disk"].get("corrupt", 0) == 0


def test_what_a_killed_writer_left_of_a_changed_source_is_not_adopted(store, tmp_path):
    """It dies between the write of the bytes and the entry in the log."""
    script = f"""
        import os
        import numpy as np
        import deepinfer_kvtier as kvtier
        from deepinfer_kvtier.base.files import PosixIo

        pool = np.zeros(({BLOCKS}, {PAYLOAD}), np.uint8)
        class Dies(PosixIo):
            def pwritev(self, fd, buffers, offset):
                wide = sum(map(len, buffers)) > {PAYLOAD}
                if wide:
                    pool[1:] = 0x77
                done = super().pwritev(fd, buffers, offset)
                if wide:
                    os._exit(9)
                return done

        cache = kvtier.open({str(store)!r}, host_bytes=0, io=Dies())
        layout = kvtier.LayoutSpec(128, {{"block": kvtier.parts(("a", 10_000), ("b", 30_000))}})
        ns = cache.namespace(layout, model="m", salt="t")
        digests = ns.match(list(range({BLOCKS} * 128))).digests
        for row, digest in zip(pool, digests):
            row[:] = np.frombuffer(digest * ({PAYLOAD} // 32), np.uint8)
        ns.put(digests, pool, copy=False, durability="flushed").wait(20)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60)
    assert run.returncode == 9
    with kvtier.open(store, host_bytes=0) as cache:
        cache.gc()
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        pool, _ = source_for(ns.match(PROMPT).digests, "rows")
        with ns.match(PROMPT, leave_last=False) as match:
            assert match.n_blocks == 1, "the one that was right is there, the others are not"
        assert served(cache, ns, pool) == 1
        assert cache.stats()["disk"].get("corrupt", 0) == 0


def test_a_tier_that_shows_at_once_what_it_is_given_is_given_checked_bytes(tmp_path, monkeypatch):
    """Without directory and without room in memory the source would go there as it is."""
    pytest.importorskip("obstore")
    gate = Gate(queue_module.WriteQueue._stage)
    monkeypatch.setattr(queue_module.WriteQueue, "_stage", lambda self, batch: gate(self, batch))
    url = f"file://{tmp_path}/bucket?linger_s=0"
    with kvtier.open(host_bytes=0, tiers=[url], secret=KEY) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        pool, source = source_for(digests, "rows")
        original = pool.copy()
        ticket = ns.put(digests, source, copy=False, durability="flushed")
        assert gate.reached.wait(20)
        pool[2] ^= 0xFF
        gate.open.set()
        assert not ticket.wait(20)
        assert ticket.reasons[2] == "source_changed"
        assert served(cache, ns, original) == 2


@pytest.mark.parametrize("delayed", [False, True])
def test_one_token_changed_in_a_block_is_never_served(store, delayed):
    """528 bytes in each of 64 blocks, at once and while the writing thread is at it."""
    size, count, token = 113_920, 64, 528
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", size))})
    chooser = random.Random(1)
    gate = threading.Event()
    wrong = served_right = 0
    io = SlowWrites()
    with kvtier.open(store, host_bytes=0, auto_gc=False, io=io) as cache:
        ns = cache.namespace(layout, model="m", salt="s")
        for turn in range(3):
            digests = [bytes([turn, i]) + os.urandom(30) for i in range(count)]
            pool = np.stack(
                [np.frombuffer((d * (size // 32 + 1))[:size], np.uint8) for d in digests]
            )
            original = pool.copy()
            if delayed:
                io.after = gate.set
            ticket = ns.put(
                digests, pool, copy=False, parents=[ns.root] * count, durability="flushed"
            )
            if delayed:
                gate.wait(0.2)
            for row in pool:
                at = token * chooser.randrange(size // token)
                row[at : at + token] ^= 0xFF
            ticket.wait(20)
            assert ticket.done
            for digest, expected in zip(digests, original, strict=True):
                with ns.match([0] * 128, digests=[digest], leave_last=False) as match:
                    room = np.zeros((match.n_blocks, size), np.uint8)
                    result = ns.load(match, dst=room, wait=True).wait()
                    if match.n_blocks and result.ok:
                        same = np.array_equal(room[0], expected)
                        wrong, served_right = wrong + (not same), served_right + same
    assert wrong == 0


def test_bytes_are_compared_before_the_log_speaks_of_them(store, monkeypatch):
    """The order is the promise: without the comparison before it the entry would be logged."""
    order: list[str] = []
    log = SegmentWriter.log
    monkeypatch.setattr(
        SegmentWriter, "log", lambda self, entries: (order.append("log"), log(self, entries))[1]
    )
    check = writer.note_changes
    monkeypatch.setattr(
        writer, "note_changes", lambda batch: (order.extend(["check"] * len(batch)), check(batch))
    )
    with kvtier.open(store, host_bytes=0) as cache:
        ns = cache.namespace(LAYOUT, model="m", salt="t")
        digests = ns.match(PROMPT).digests
        _, source = source_for(digests, "rows")
        assert ns.put(digests, source, copy=False, durability="flushed").wait(20)
        assert order[: BLOCKS + 1] == ["check"] * BLOCKS + ["log"]


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
        lower_queue = cache.stats()["lower_queues"]["s3"]
        assert lower_queue.get("failed_records", 0) == lower_queue.get("source_changed", 0) == 0


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
