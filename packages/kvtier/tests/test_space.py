"""What lies in the folder counts, whoever holds it or put it there, and deleting frees space."""

from __future__ import annotations

import os

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock

LAYOUT = kvtier.LayoutSpec(16, {"block": kvtier.parts(("kv", 8192))})
QUOTA = 2 << 20


def bytes_in(root):
    found = 0
    for path, _, files in os.walk(root):
        for file in files:
            found += os.lstat(os.path.join(path, file)).st_blocks * 512
    return found


def fill(cache, count, first=0):
    ns = cache.namespace(LAYOUT, model="m", salt="s")
    most = 0
    tickets = []
    for n in range(first, first + count):
        tokens = np.random.default_rng(n).integers(0, 1 << 20, 16 * 32)
        with ns.match(tokens, want=("block",), leave_last=False) as match:
            ticket = ns.put(match.digests, np.zeros((32, 8192), np.uint8), durability="flushed")
        ticket.wait(20)
        tickets.append(ticket)
        most = max(most, bytes_in(cache.disk.root))
    return most, tickets


@pytest.mark.parametrize("mode", ["embedded", "shared-fs"])
def test_a_quota_counts_what_waits_for_its_grace_and_says_so(tmp_path, mode):
    settings = {"quota_bytes": QUOTA, "segment_bytes": 128 << 10, "min_free_share": 0.0}
    with kvtier.open(tmp_path / "s", mode=mode, host_bytes=0, floor_s=0, **settings) as cache:
        most, tickets = fill(cache, 24)
        assert most <= QUOTA + 2 * (128 << 10) + 32 * 12_288
        report = cache.gc()
        assert report.bytes_left == pytest.approx(bytes_in(tmp_path / "s"), abs=64 << 10)
        assert report.within_limits == (report.bytes_left <= QUOTA)
        refused = [r for ticket in tickets for r in ticket.reasons if r == "disk_full"]
        assert bool(refused) == (mode == "shared-fs")
        reasons = cache.stats()["health_reasons"]
        assert ("disk_full" in reasons) == (not report.within_limits)


def test_after_the_grace_there_is_room_again(tmp_path):
    clock = ManualClock()
    settings = {"quota_bytes": QUOTA, "min_free_share": 0.0, "floor_s": 0, "host_bytes": 0}
    with kvtier.open(tmp_path / "s", mode="shared-fs", clock=clock, **settings) as cache:
        fill(cache, 24)
        cache.gc()
        clock.advance(200)
        cache.gc()
        report = cache.gc()
        assert report.within_limits
        assert fill(cache, 1, first=100)[1][0].reasons == (None,) * 32


def test_foreign_files_count(tmp_path):
    settings = {"quota_bytes": QUOTA, "min_free_share": 0.0, "floor_s": 0, "host_bytes": 0}
    with kvtier.open(tmp_path / "s", **settings) as cache:
        fill(cache, 4)
        before = cache.gc().bytes_left
        (tmp_path / "s" / "notes").mkdir()
        (tmp_path / "s" / "notes" / "core.1234").write_bytes(bytes(1 << 20))
        (tmp_path / "s" / "w" / "junk").write_bytes(bytes(1 << 16))
        report = cache.gc(dry_run=True)
        assert report.bytes_left + report.bytes_freed >= before + (1 << 20) + (1 << 16)


def test_a_deleted_file_holds_no_space_though_an_idle_reader_keeps_it_open(tmp_path):
    settings = {"min_free_share": 0.0, "floor_s": 0, "host_bytes": 0, "segment_bytes": 128 << 10}
    with (
        kvtier.open(tmp_path / "s", **settings) as cache,
        kvtier.open(tmp_path / "s", auto_gc=False, **settings) as reader,
    ):
        fill(cache, 8)
        ns = reader.namespace(LAYOUT, model="m", salt="s")
        for n in range(8):
            tokens = np.random.default_rng(n).integers(0, 1 << 20, 16 * 32)
            with ns.match(tokens, want=("block",), leave_last=False) as match:
                room = np.zeros((match.n_blocks, 8192), np.uint8)
                assert ns.load(match, dst=room, wait=True).wait().ok
        held = reader.disk.segments.descriptors()
        assert held
        cache.config = cache.disk.config = cache.config.model_copy(update={"quota_bytes": 1 << 20})
        assert cache.gc(dry_run=True).segments_evicted
        from deepinfer_kvtier.log.gc import collect

        assert collect(cache.disk).segments_evicted
        gone = [os.fstat(fd) for fd in held]
        assert sum(not seen.st_nlink for seen in gone)
        assert all(seen.st_blocks == 0 for seen in gone if not seen.st_nlink)
        tokens = np.random.default_rng(0).integers(0, 1 << 20, 16 * 32)
        with ns.match(tokens, want=("block",), leave_last=False) as match:
            assert match.n_blocks < 32  # it looks again, and finds less


def test_one_eviction_takes_at_most_a_sixteenth(tmp_path, monkeypatch):
    from deepinfer_kvtier.base.files import PosixIo

    monkeypatch.setattr(PosixIo, "space", lambda self, path: (40 << 20, 50 << 20))
    with kvtier.open(tmp_path / "s", min_free_share=0.0, host_bytes=0) as cache:
        fill(cache, 1)
        assert cache.disk._writer.segment_bytes <= (50 << 20) // 16
