"""On a mount a writer fills several segments of a class at a time, side by side."""

from __future__ import annotations

import errno
import threading

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo

BLOCKS, BLOCK_BYTES = 64, 5_000
LAYOUT = kvtier.LayoutSpec(4, {"block": kvtier.parts(("kv", BLOCK_BYTES))})
PROMPT = list(range(4 * BLOCKS + 1))


class Segments(PosixIo):
    """Calls a hook before each write and each flush of a segment, header apart."""

    def __init__(self):
        self.paths = {}
        self.hook = lambda what, path: None

    def create(self, path):
        fd = super().create(path)
        if path.suffix == ".kvs":
            self.paths[fd] = path
        return fd

    def pwritev(self, fd, buffers, offset):
        if fd in self.paths and offset:
            self.hook("write", self.paths[fd])
        return super().pwritev(fd, buffers, offset)

    def datasync(self, fd):
        if fd in self.paths:
            self.hook("flush", self.paths[fd])
        super().datasync(fd)


@pytest.fixture
def io():
    return Segments()


@pytest.fixture
def open_mount(tmp_path):
    def make(io=None, **mount):
        return kvtier.open(
            tmp_path / "kv",
            mode="shared-fs",
            io=io,
            host_bytes=0,
            auto_gc=False,
            min_free_share=0.0,
            mount={"poll_s": 0.02, "heartbeat_s": 0.1, **mount},
        )

    return make


def put(cache, seed=0, blocks=BLOCKS):
    ns = cache.namespace(LAYOUT, model="files")
    prompt = [seed, *PROMPT[: 4 * blocks]]
    digests = ns.match(prompt, leave_last=False).digests
    source = np.random.default_rng(seed).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
    ticket = ns.put(digests, source, durability="flushed")
    cache.flush()
    return prompt, source, ticket


def check(cache, prompt, source):
    ns = cache.namespace(LAYOUT, model="files")
    room = np.zeros_like(source)
    with ns.match(prompt, leave_last=False) as match:
        assert match.n_blocks == len(source)
        assert ns.load(match, dst=room).wait().ok
    assert np.array_equal(room, source)


@pytest.mark.parametrize("files", [1, 2, 4])
def test_a_batch_is_spread_over_the_files_and_comes_back_on_every_machine(
    open_mount, tmp_path, files
):
    with open_mount(segment_files=files) as cache:
        kept = [put(cache, seed)[:2] for seed in range(3)]
        assert len(list(tmp_path.rglob("*.kvs"))) == files
        for prompt, source in kept:
            check(cache, prompt, source)
    with open_mount() as other:
        for prompt, source in kept:
            check(other, prompt, source)


def test_small_batches_take_turns_and_stay_whole(open_mount, tmp_path):
    with open_mount(segment_files=2) as cache:
        kept = [put(cache, seed, blocks=5)[:2] for seed in range(4)]
        sizes = [path.stat().st_size for path in tmp_path.rglob("*.kvs")]
        assert len(sizes) == 2
        assert sizes[0] == sizes[1]
        for prompt, source in kept:
            check(cache, prompt, source)


def test_the_files_are_written_and_flushed_side_by_side(open_mount, io):
    meeting = {"write": threading.Barrier(2), "flush": threading.Barrier(2)}
    with open_mount(io, segment_files=2) as cache:
        io.hook = lambda what, path: meeting[what].wait(30)  # alone, either would break it
        prompt, source, ticket = put(cache)
        io.hook = lambda what, path: None
        assert ticket.wait(60)
        check(cache, prompt, source)


@pytest.mark.parametrize("broken", [1, 2])
def test_a_file_that_fails_is_left_and_nothing_of_the_batch_is_lost(
    open_mount, io, tmp_path, broken
):
    failed, again = set(), []

    def fail_once(what, path):
        if what == "write" and path in failed:
            again.append(path)
        if what == "write" and len(failed) < broken and path not in failed:
            failed.add(path)
            raise OSError(errno.EIO, "a bad place")

    with open_mount(io, segment_files=2) as cache:
        io.hook = fail_once
        prompt, source, ticket = put(cache)
        assert ticket.wait(60)
        check(cache, prompt, source)
        later = put(cache, 1)
        assert later[2].wait(60)
        check(cache, *later[:2])
        assert cache.disk.segments.users() == 0
    with open_mount() as other:
        check(other, prompt, source)
    assert len(failed) == broken
    assert not again, "a bad place is not hit twice"


def test_locally_there_is_one_file_of_a_class(store):
    with kvtier.open(store, mount={"segment_files": 4}) as cache:
        put(cache)
        assert len(list(store.rglob("*.kvs"))) == 1
