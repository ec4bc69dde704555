"""Engines for segment files: the same bytes, whichever way they take."""

from __future__ import annotations

import errno
import os
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.faultrun import run_faults
from deepinfer_kvtier.io import PosixIo, read_fully, write_all
from deepinfer_kvtier.store.direct import DirectIo
from deepinfer_kvtier.store.staged import StagedIo
from deepinfer_kvtier.store.usrbio import REQUEST_BYTES, UsrbioIo

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
        assert model.store(tokens, durability="fsync").wait(10)
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
        model.store(tokens, durability="flushed").wait(10)
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


# -- USRBIO: 3FS itself is not at hand, this is an imitation of its Python interface


class FakeRing:
    """Serves requests backwards; can fail, come short, or hang."""

    def __init__(self, module, for_read):
        self.module = module
        self.for_read = for_read
        self.pending = []

    def prepare(self, iov, read, fd, off, userdata=None):
        assert read == self.for_read, "a ring is for reads or for writes"
        assert fd in self.module.registered, "only registered descriptors can be used"
        self.pending.append((iov, fd, off, userdata))
        return self

    def submit(self):
        return self

    def wait(self, *, max_results=0, min_results=0, timeout=None):
        if self.module.hang:
            return []
        taken, self.pending = self.pending[-2:], self.pending[:-2]
        return [self.serve(*request) for request in reversed(taken)]

    def serve(self, iov, fd, off, userdata):
        memory = self.module.memory[iov.shm][iov.start : iov.stop]
        if self.module.error:
            result = -self.module.error
        elif self.for_read:
            result = os.preadv(fd, [memory[: len(memory) - self.module.short]], off)
        else:
            result = os.pwrite(fd, memory, off)
        return types.SimpleNamespace(result=result, userdata=userdata)


class FakeIov:
    def __init__(self, shm, start, stop):
        self.shm, self.start, self.stop = shm, start, stop

    def __getitem__(self, part):
        start, stop, step = part.indices(self.stop - self.start)
        assert step == 1
        return FakeIov(self.shm, self.start + start, self.start + stop)


@pytest.fixture
def threefs(monkeypatch, tmp_path):
    module = types.ModuleType("hf3fs_fuse.io")
    module.registered, module.memory = set(), {}
    module.hang, module.error, module.short = False, 0, 0

    def make_iovec(shm, mount, block_size=0, numa=-1):
        assert mount == "/3fs"
        module.memory[shm.name] = shm.buf
        return FakeIov(shm.name, 0, shm.size)

    def deregister(fd):
        module.registered.remove(fd)

    module.make_iovec = make_iovec
    module.make_ioring = lambda mount, entries, for_read=True, io_depth=0: FakeRing(
        module, for_read
    )
    module.register_fd = module.registered.add
    module.deregister_fd = deregister
    module.extract_mount_point = lambda path: "/3fs" if path.startswith(str(tmp_path)) else None
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", types.ModuleType("hf3fs_fuse"))
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", module)
    yield module
    module.memory.clear()


def test_usrbio_moves_the_same_bytes_in_requests_that_end_in_any_order(threefs, store, make_model):
    with kvtier.open(store, io="usrbio", mode=None, host_bytes=0) as cache:
        layout = kvtier.LayoutSpec(4, {"block": kvtier.parts(("kv", 300_000))})
        ns = cache.namespace(layout, model="3fs")
        prompt = list(range(4 * 20 + 1))
        source = np.random.default_rng(0).integers(0, 256, (20, 300_000), dtype=np.uint8)
        assert ns.put(ns.match(prompt).digests, source, durability="fsync").wait(10)
        room = np.zeros_like(source)
        with ns.match(prompt) as match:
            assert ns.load(match, dst=room).wait().ok
        assert np.array_equal(room, source)
        assert cache.stats()["io"] == {"engine": "usrbio", "timeouts": 0}
    assert not threefs.registered, "descriptors are given back before they are closed"


def test_usrbio_stops_at_a_short_answer(threefs, tmp_path):
    io, path = UsrbioIo(tmp_path), tmp_path / "a.kvs"
    path.write_bytes(os.urandom(2 * REQUEST_BYTES + 100))
    fd = io.open_read(path)
    room = bytearray(3 * REQUEST_BYTES)
    assert io.preadv(fd, [room], 0) == 2 * REQUEST_BYTES + 100
    assert room[: 2 * REQUEST_BYTES + 100] == path.read_bytes()
    threefs.short = 7
    assert io.preadv(fd, [room], 0) == REQUEST_BYTES - 7
    io.close(fd)


def test_a_request_that_3fs_does_not_answer_costs_its_deadline_and_its_memory(threefs, tmp_path):
    io, path = UsrbioIo(tmp_path, timeout_s=0.01), tmp_path / "a.kvs"
    path.write_bytes(b"x" * PAGE)
    fd = io.open_read(path)
    room = bytearray(PAGE)
    threefs.hang = True
    with pytest.raises(OSError, match="in time") as error:
        io.preadv(fd, [room], 0)
    assert error.value.errno == errno.ETIMEDOUT
    assert io.facts()["timeouts"] == 1
    threefs.hang = False
    assert io.preadv(fd, [room], 0) == PAGE
    assert len(threefs.memory) == 2, "memory that a late answer may write to is not used again"
    threefs.error = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        io.preadv(fd, [room], 0)
    io.close(fd)


def test_the_fault_layer_works_over_usrbio(threefs, tmp_path):
    run = run_faults(tmp_path / "kv", reads=800, seed=4, engine=lambda: UsrbioIo(tmp_path))
    assert (run.reads >= 800, run.wrong) == (True, 0)


def test_without_3fs_the_error_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hf3fs_fuse", None)
    with pytest.raises(kvtier.ConfigError, match="built with 3FS"):
        kvtier.open(tmp_path, io="usrbio")
    with pytest.raises(kvtier.ConfigError, match="needs a path"):
        kvtier.open(io="usrbio")
    with pytest.raises(kvtier.ConfigError, match="io"):
        kvtier.open(tmp_path, io="magic")


def test_a_directory_that_is_not_on_3fs_is_refused(threefs, tmp_path_factory):
    with pytest.raises(kvtier.ConfigError, match="not on one"):
        kvtier.open(tmp_path_factory.mktemp("elsewhere") / "kv", io="usrbio")
