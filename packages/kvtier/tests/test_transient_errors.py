"""What a file system says once is no word about a file: nothing is forgotten for one bad answer."""

from __future__ import annotations

import errno
import os

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.log.compaction import collect_stats, copy_forward

ERRORS = (errno.ESTALE, errno.EINTR, errno.EIO)


class Moody(PosixIo):
    """Fails the next operations of a kind on segment files."""

    def __init__(self):
        self.left = {"open": 0, "read": 0, "write": 0}
        self.error = errno.EIO
        self._segments = set()

    def _moody(self, kind):
        if self.left[kind]:
            self.left[kind] -= 1
            raise OSError(self.error, os.strerror(self.error))

    def open_read(self, path):
        if path.suffix == ".kvs":
            self._moody("open")
        fd = super().open_read(path)
        if path.suffix == ".kvs":
            self._segments.add(fd)
        return fd

    def close(self, fd):
        self._segments.discard(fd)
        super().close(fd)

    def preadv(self, fd, buffers, offset):
        if fd in self._segments:
            self._moody("read")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self._moody("write")
        return super().pwritev(fd, buffers, offset)


@pytest.fixture(params=["embedded", "shared-fs"])
def filled(request, tmp_path, make_model):
    root = tmp_path / "store"
    kvtier.init(root, mode=request.param, min_free_share=0.0)
    with kvtier.open(root, host_bytes=0) as cache:
        model = make_model(cache)
        for seed in range(4):
            assert model.store(model.prompt(seed, 4), durability="flushed").wait(20)
    return root


def hits(model):
    return sum(model.block_hits(model.prompt(seed, 4)) for seed in range(4))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", ["open", "read"])
def test_one_bad_answer_costs_nothing(filled, make_model, kind, error):
    io = Moody()
    with kvtier.open(filled, io=io, host_bytes=0) as cache:
        model = make_model(cache)
        assert hits(model) == 16
        if kind == "open":  # descriptors of earlier lookups are kept
            for segment in cache.disk.segments.all():
                cache.disk.segments.mark_gone(segment)
                segment.gone = False
        io.error, io.left[kind] = error, 1
        assert model.load_all(model.prompt(1, 4)) == (4, 4)
        assert hits(model) == 16
        assert not cache.stats()["health_reasons"]


@pytest.mark.parametrize("error", ERRORS)
def test_a_file_system_that_fails_for_a_while_loses_no_record(filled, make_model, error):
    io = Moody()
    with kvtier.open(filled, io=io, host_bytes=0, auto_gc=False) as cache:
        model = make_model(cache)
        assert hits(model) == 16
        io.error, io.left["read"] = error, 3
        assert model.load_all(model.prompt(1, 4)) == (4, 0)
        io.left["read"] = 0
        assert hits(model) == 16
        assert model.load_all(model.prompt(1, 4)) == (4, 4)
        cache.gc()
        assert hits(model) == 16


def test_failing_writes_leave_reads_alone(filled, make_model):
    io = Moody()
    with kvtier.open(filled, io=io, host_bytes=0, commit_delay_s=0.0) as cache:
        model = make_model(cache)
        assert model.load_all(model.prompt(0, 4)) == (4, 4)
        io.left["write"] = 1_000
        ticket = model.store(model.prompt(9, 4), durability="flushed")
        assert not ticket.wait(30)
        assert set(ticket.reasons) == {"write_failed"}
        stats = cache.stats()
        assert (stats["disk"]["write_breaker_open"], stats["disk"]["breaker_open"]) == (1, 0)
        assert "writes_failing" in stats["health_reasons"]
        assert model.load_all(model.prompt(1, 4)) == (4, 4)
        io.left["write"] = 0


def test_a_repair_hides_nothing_that_it_could_not_read(filled, make_model):
    from deepinfer_kvtier.ops.check import verify

    io = Moody()
    with kvtier.open(filled, io=io, host_bytes=0) as cache:
        io.left["read"] = 10
        report = verify(cache.disk, repair=True)
        assert sum(report.bad.values()) == 5  # each was tried twice
        assert report.repaired == 0
        assert hits(make_model(cache)) == 16


def test_a_segment_that_cannot_be_read_now_is_not_compacted_away(filled, make_model):
    io = Moody()
    with kvtier.open(filled, io=io, host_bytes=0) as cache:
        (state, *_) = collect_stats(cache.disk).states
        io.left["read"] = 1_000
        assert copy_forward(cache.disk, [state]) == (0, 0)
        io.left["read"] = 0
        assert not cache.disk.segments.get(state.local).moved
        assert cache.stats()["disk"]["gc_unreadable_segments"] == 1
        assert hits(make_model(cache)) == 16
