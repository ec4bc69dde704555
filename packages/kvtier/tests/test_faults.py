"""Whatever the disk does, a record is right or absent."""

from __future__ import annotations

import errno
import os
import random
import sys

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.testing import FaultIo, ManualClock

BLOCK_BYTES = 5_000

PLAN = {
    "preadv": {"eio": 0.02, "short": 0.05, "flip": 0.05, "estale": 0.01},
    "pwritev": {"eio": 0.02, "short": 0.05, "flip": 0.04, "lost": 0.08, "torn": 0.05},
    "datasync": {"eio": 0.05},
    "create": {"enospc": 0.03},
    "open_read": {"eio": 0.02},
}


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_no_wrong_byte_under_random_faults(store, make_model, seed):
    """Reads are checked against the bytes each record must have, all the time."""
    io = FaultIo(seed, PLAN)
    clock = ManualClock()
    chooser = random.Random(seed)
    reads = hits = 0
    for _ in range(3):
        try:
            cache = kvtier.open(
                store,
                io=io,
                clock=clock,
                host_bytes=12 * BLOCK_BYTES,
                segment_bytes=1 << 17,
                commit_delay_s=0,
            )
        except kvtier.ConfigError:
            continue  # the fault hit the very first look at the directory
        model = make_model(cache)
        for _ in range(160):
            tokens = model.prompt(chooser.randrange(12), chooser.randrange(1, 7))
            if chooser.random() < 0.5:
                model.store(tokens, durability="flushed")
            cache.flush(0.2)
            matched, good = model.load_all(tokens)
            reads, hits = reads + matched, hits + good
            clock.advance(chooser.choice((0, 1, 20)))
        cache.close(timeout=0.2)
    assert {"preadv flip", "pwritev lost", "pwritev torn", "preadv short"} <= set(io.injected)
    assert reads > 100
    assert hits > 50


def test_the_fault_test_notices_a_missing_checksum(store, make_model, monkeypatch):
    """Proof that the test above can fail: without the checksum, flipped bits come back as good."""
    constant = b"\0" * 16
    monkeypatch.setattr(native, "routines", None)
    for name, module in list(sys.modules.items()):
        if name.startswith("deepinfer_kvtier") and hasattr(module, "checksum_of"):
            monkeypatch.setattr(module, "checksum_of", lambda views: constant)
    io = FaultIo(3)
    with kvtier.open(store, io=io, host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 6)
        model.store(tokens, durability="flushed").wait(60)
        io.set_rates({"preadv": {"flip": 1.0}})

        def read_many_times() -> None:
            for _ in range(50):
                model.load_all(tokens)

        with pytest.raises(AssertionError, match="wrong bytes"):
            read_many_times()


def written_once(store, make_model, blocks: int = 4):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, blocks)
        assert model.store(tokens, durability="flushed").wait(60)
    (segment,) = store.rglob("*.kvs")
    return tokens, segment


SLOT = 8_192


@pytest.mark.parametrize(
    ("name", "offset"),
    [
        ("payload", 4096 + SLOT + 77),
        ("trailer", 4096 + SLOT + 5_000 + 40),
        ("magic", 4096 + SLOT + 5_000),
    ],
)
def test_a_flipped_bit_on_disk_is_a_miss_and_the_block_can_be_stored_again(
    store, make_model, name, offset
):
    tokens, segment = written_once(store, make_model)
    with segment.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))
    with kvtier.open(store) as cache:
        model = make_model(cache)
        match = model.ns.match(tokens, want=("block",))
        dst = np.zeros((4, BLOCK_BYTES), np.uint8)
        result = model.ns.load(match, dst=dst).wait()
        assert result.ok_prefix == 1
        assert result.blocks[1] is kvtier.Status.CORRUPT
        assert model.check(match, result, dst) == 3
        assert cache.stats()["disk"]["corrupt"] == 1
        assert cache.stats()["health"] == "degraded"
        assert model.block_hits(tokens) == 1
        match.release()
        assert model.store(tokens, durability="flushed").wait(60)
        assert model.load_all(tokens) == (4, 4)
    with kvtier.open(store) as cache:
        assert make_model(cache).load_all(tokens) == (4, 4)


def test_a_truncated_segment_loses_its_tail_only(store, make_model):
    tokens, segment = written_once(store, make_model)
    os.truncate(segment, 4096 + 2 * SLOT + 100)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        match = model.ns.match(tokens, want=("block",))
        dst = np.full((4, BLOCK_BYTES), 0xEE, np.uint8)
        result = model.ns.load(match, dst=dst).wait()
        assert result.ok_prefix == 2
        assert model.check(match, result, dst) == 2
        assert cache.stats()["disk"]["short_reads"] == 2


def test_a_vanished_segment_is_a_miss_at_match(store, make_model):
    tokens, segment = written_once(store, make_model)
    with kvtier.open(store) as cache:
        segment.unlink()
        assert make_model(cache).block_hits(tokens) == 0


def test_a_segment_that_vanishes_after_match_is_still_readable(store, make_model):
    """The lease holds the file open."""
    tokens, segment = written_once(store, make_model)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        match = model.ns.match(tokens, want=("block",))
        segment.unlink()
        dst = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert model.check(match, model.ns.load(match, dst=dst).wait(), dst) == 4


def test_two_swapped_slots_are_misses(store, make_model):
    """Right bytes in the wrong place: only the digest in the record tells."""
    tokens, segment = written_once(store, make_model)
    raw = bytearray(segment.read_bytes())
    one, two = slice(4096, 4096 + SLOT), slice(4096 + SLOT, 4096 + 2 * SLOT)
    raw[one], raw[two] = raw[two], raw[one]
    segment.write_bytes(raw)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert model.load_all(tokens) == (4, 2)
        assert cache.stats()["disk"]["digest_mismatch"] == 2


@pytest.mark.parametrize("damage", ["flip", "zero", "foreign"])
def test_a_damaged_index_frame_costs_its_entries_only(store, make_model, damage):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        chains = [model.prompt(seed, 2) for seed in range(3)]
        for tokens in chains:
            assert model.store(tokens, durability="flushed").wait(60)
    (log,) = store.rglob("idx-0.kvx")
    raw = bytearray(log.read_bytes())
    if damage == "flip":
        raw[4096 + 100] ^= 1
    elif damage == "zero":
        raw[4096:8192] = bytes(4096)
    else:
        raw[4096:8192] = raw[:4096]
    log.write_bytes(raw)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert [model.load_all(tokens) for tokens in chains] == [(2, 2), (0, 0), (2, 2)]
        assert cache.stats()["disk"]["bad_index_frames"] == 1


def test_a_full_disk_refuses_and_recovers(store, make_model):
    io = FaultIo(1)
    with kvtier.open(store, io=io, commit_delay_s=0) as cache:
        model = make_model(cache)
        io.set_rates({"create": {"enospc": 1.0}, "pwritev": {"enospc": 1.0}})
        tokens = model.prompt(1, 3)
        ticket = model.store(tokens, durability="flushed")
        assert not ticket.wait(30)
        assert ticket.done
        assert model.load_all(tokens) == (3, 3), "host memory still serves"
        io.set_rates({})
        assert model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store) as cache:
        assert make_model(cache).load_all(tokens) == (3, 3)


def test_writes_that_fail_leave_no_files_behind(store, make_model):
    io = FaultIo(1)
    with kvtier.open(store, io=io, commit_delay_s=0, auto_gc=False) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(0, 2), durability="flushed").wait(30)
        kept = list(store.rglob("*.kvs"))
        cache.disk.seal()

        def fails_for_slots(fd, buffers, offset, write=io.pwritev):
            if offset >= 4096 and len(buffers) > 1:
                raise OSError(errno.ENOSPC, "full")
            return write(fd, buffers, offset)

        io.pwritev = fails_for_slots
        for seed in range(1, 4):
            assert not model.store(model.prompt(seed, 3), durability="flushed").wait(30)
        assert list(store.rglob("*.kvs")) == kept
        del io.pwritev
        assert model.store(model.prompt(1, 3), durability="flushed").wait(30)
    with kvtier.open(store, auto_gc=False) as cache:
        model = make_model(cache)
        assert [model.load_all(model.prompt(seed, n)) for seed, n in ((0, 2), (1, 3))] == [
            (2, 2),
            (3, 3),
        ]


def test_a_failing_disk_is_left_alone_for_a_while_and_then_tried_again(store, make_model):
    tokens, _ = written_once(store, make_model)
    clock = ManualClock()
    io = FaultIo(1, {"preadv": {"eio": 1.0}})
    io.set_rates({})
    with kvtier.open(store, io=io, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        match = model.ns.match(tokens, want=("block",))
        io.set_rates({"preadv": {"eio": 1.0}})
        dst = np.zeros((4, BLOCK_BYTES), np.uint8)
        for _ in range(5):
            result = model.ns.load(match, dst=dst).wait()
            assert set(result.blocks) == {kvtier.Status.ERROR}
        before = io.injected["preadv eio"]
        model.ns.load(match, dst=dst).wait()
        assert io.injected["preadv eio"] == before, "an open circuit reads nothing"
        assert model.block_hits(tokens) == 0
        io.set_rates({})
        clock.advance(11)
        assert model.load_all(tokens) == (4, 4)


def test_puts_never_wait_for_a_stuck_disk(store, make_model):
    io = FaultIo(1, {"pwritev": {"eio": 1.0}})
    with kvtier.open(store, io=io, queue_bytes=20 * BLOCK_BYTES, commit_delay_s=0) as cache:
        model = make_model(cache)
        tickets = [model.store(model.prompt(seed, 4)) for seed in range(12)]
        reasons = {reason for ticket in tickets for reason in ticket.reasons}
        assert "queue_full" in reasons
        assert model.load_all(model.prompt(11, 4)) == (4, 4)
        report = cache.close(timeout=0)
        assert not report.done or report.failed


def test_a_write_that_a_crash_overtakes_changes_no_file(tmp_path):
    class CrashesInBetween(PosixIo):
        def preadv(self, fd, buffers, offset):
            dying.crash()
            # Another file gets the number of the closed descriptor.
            other = os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR)
            assert other == fd
            return 0

    dying = FaultIo(track=True, over=CrashesInBetween())
    fd = dying.create(tmp_path / "first")
    with pytest.raises(OSError, match="dead"):
        dying.pwritev(fd, [b"late"], 0)
    os.close(fd)
    assert dying.power_loss() == 0
    assert (tmp_path / "first").read_bytes() == (tmp_path / "other").read_bytes() == b""


def test_a_write_that_a_crash_overtakes_late_changes_no_other_file(tmp_path, monkeypatch):
    dying = FaultIo(rates={"pwritev": {"delay": 1.0}})
    fd = dying.create(tmp_path / "first")

    def crash(seconds):
        dying.crash()
        # Another file gets the number of the closed descriptor.
        assert os.open(tmp_path / "other", os.O_CREAT | os.O_RDWR) == fd

    monkeypatch.setattr("deepinfer_kvtier.faults.time.sleep", crash)
    with pytest.raises(OSError, match="dead"):
        dying.pwritev(fd, [b"late"], 0)
    os.close(fd)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "other").read_bytes() == b""
