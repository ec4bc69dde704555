"""Engines for segment files: the same bytes, whichever way they take."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo, read_fully, write_all
from deepinfer_kvtier.faultrun import run_faults
from deepinfer_kvtier.log.direct_io import DirectIo, StagedIo

PAGE = 4096


class SmallStages(StagedIo):
    """Two granules of staging memory, so that every transfer is cut."""

    granule = 16

    def _open_segment(self, path, flags):
        return os.open(path, flags, 0o600), True

    def _staging(self):
        return memoryview(bytearray(32))

    def _read(self, fd, room, offset):
        assert offset % 16 == len(room) % 16 == 0
        return os.preadv(fd, [room], offset)

    def _write(self, fd, span, offset):
        assert offset % 16 == len(span) % 16 == 0
        return os.pwrite(fd, span, offset)


@given(
    st.binary(max_size=200),
    st.integers(0, 220),
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
)
def test_staged_reads_agree_with_plain_ones(tmp_path_factory, content, offset, sizes):
    path = tmp_path_factory.mktemp("staged") / "a.kvs"
    path.write_bytes(content)
    found = []
    for io in (SmallStages(), PosixIo()):
        fd = io.open_read(path)
        buffers = [bytearray(b"\xaa" * size) for size in sizes]
        found.append((io.preadv(fd, buffers, offset), buffers))
        io.close(fd)
    assert found[0] == found[1]


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(0, 40))
def test_staged_writes_agree_with_plain_ones(tmp_path_factory, sizes, offset):
    pieces = [bytes([i + 1]) * size for i, size in enumerate(sizes)]
    if sum(sizes) % 2:
        offset = offset // 16 * 16
        pieces.append(bytes(-sum(sizes) % 16))
    written = []
    for io in (SmallStages(), PosixIo()):
        path = tmp_path_factory.mktemp("staged") / "a.kvs"
        fd = io.create(path)
        write_all(io, fd, list(pieces), offset)
        io.close(fd)
        written.append(path.read_bytes())
    assert written[0] == written[1]


def takes_direct(folder):
    io = DirectIo()
    io.close(io.create(folder / "probe.kvs"))
    (folder / "probe.kvs").unlink()
    return not io.facts()["fallbacks"]


def test_direct_files_are_direct_and_hold_the_same_bytes(tmp_path):
    if not takes_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    io, path = DirectIo(), tmp_path / "a.kvs"
    fd = io.create(path)
    assert os.get_inheritable(fd) is False
    data = os.urandom(3 * (1 << 20) + PAGE)
    write_all(io, fd, [data[:100_000], data[100_000:]], 0)
    write_all(io, fd, [b"odd"], 5_000)  # no multiple of a page: through the page cache
    expected = data[:5_000] + b"odd" + data[5_003:]
    assert path.read_bytes() == expected
    rooms = [bytearray(n) for n in (1, 113_920, 672, 2_000_000, PAGE)]
    reader = io.open_read(path)
    total = sum(map(len, rooms))
    assert read_fully(io, reader, [memoryview(r) for r in rooms], 4_321, total) == total
    assert b"".join(rooms) == expected[4_321 : 4_321 + total]
    tail = bytearray(10_000)
    assert io.preadv(reader, [tail], len(data) - 77) == 77
    assert tail[:77] == expected[-77:]
    io.close(fd)
    io.close(reader)
    assert io.facts() == {"engine": "odirect", "fallbacks": 0, "reason": ""}


@pytest.fixture(params=["odirect", "posix"])
def engine(request):
    return request.param


def test_a_store_written_one_way_is_read_the_other(store, make_model, engine):
    other = {"odirect": "posix", "posix": "odirect"}[engine]
    with kvtier.open(store, io=engine, host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 40)
        assert model.store(tokens, durability="fsync").wait(60)
        assert model.load_all(tokens) == (40, 40)
        assert cache.stats()["io"]["engine"] == engine
        with kvtier.open(kvtier.KVTierConfig(path=store, io=other, host_bytes=0)) as neighbour:
            assert make_model(neighbour).load_all(tokens) == (40, 40)
    with kvtier.open(store, io=other, host_bytes=0) as cache:
        assert make_model(cache).load_all(tokens) == (40, 40)


def test_where_o_direct_is_refused_the_page_cache_is_used_and_named(
    store, make_model, monkeypatch, caplog
):
    real = os.open

    def refuse(path, flags, *rest, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refuse)
    with kvtier.open(store, io="odirect", host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 5)
        model.store(tokens, durability="flushed").wait(60)
        assert model.load_all(tokens) == (5, 5)
        facts = cache.stats()["io"]
        assert "refuses O_DIRECT" in facts["reason"]
        assert f"kvtier_io_fallbacks_total {facts['fallbacks']}" in cache.metrics()
    assert caplog.text.count("page cache") == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs at hand")
def test_files_that_open_directly_but_refuse_transfers_are_demoted(tmp_path, monkeypatch):
    io, path = DirectIo(), tmp_path / "a.kvs"
    if not takes_direct(tmp_path):
        pytest.skip("this file system refuses O_DIRECT")
    real, refused = os.pwrite, []

    def refuse_once(fd, data, offset):
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_once)
    fd = io.create(path)
    write_all(io, fd, [bytes(PAGE)], 0)
    io.close(fd)
    assert path.read_bytes() == bytes(PAGE)
    assert io.facts()["fallbacks"] == 1


def test_an_error_that_is_not_about_alignment_is_passed_on(tmp_path, monkeypatch):
    io = DirectIo()
    fd = io.create(tmp_path / "a.kvs")

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    if io.facts()["fallbacks"]:
        pytest.skip("this file system refuses O_DIRECT")
    with pytest.raises(OSError, match="full"):
        io.pwritev(fd, [bytes(PAGE)], 0)
    io.close(fd)


def test_the_fault_layer_works_over_direct_files(tmp_path):
    run = run_faults(tmp_path, reads=1_500, seed=3, engine=DirectIo)
    assert run.reads >= 1_500
    assert run.wrong == 0
    assert sum(run.injected.values()) > 50
