"""A cache that is closed, or left behind in a forked child, while others are still using it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo

LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 5_000))})
PROMPT = list(range(6 * 128 + 1))


class ClosesIn(PosixIo):
    """Closes the cache, as another thread might, just before one call of a kind."""

    cache: kvtier.Cache | None = None

    def __init__(self, call: str) -> None:
        self._call = call

    def _close_now(self, call: str) -> None:
        if self.cache is not None and call == self._call:
            cache, self.cache = self.cache, None
            cache.close()

    def claim(self, path):
        self._close_now("claim")
        return super().claim(path)

    def preadv(self, fd, buffers, offset):
        self._close_now("preadv")
        return super().preadv(fd, buffers, offset)


def test_a_collection_overtaken_by_close_deletes_nothing(store, make_model):
    io = ClosesIn("claim")
    cache = kvtier.open(store, io=io, auto_gc=False, quota_bytes=200_000)
    model = make_model(cache)
    tokens = model.prompt(1, 30)
    assert model.store(tokens, durability="flushed").wait(60)
    io.cache = cache
    with pytest.raises(kvtier.ClosedError):
        cache.gc()
    with kvtier.open(store, auto_gc=False) as again:
        assert make_model(again).block_hits(tokens) == 30


def test_a_drop_overtaken_by_close_writes_to_nobody_elses_file(store, tmp_path, make_model):
    cache = kvtier.open(store, auto_gc=False)
    model = make_model(cache)
    tokens = model.prompt(1, 4)
    assert model.store(tokens, durability="flushed").wait(60)
    cache.close()
    # These get the numbers of the descriptors that the cache has given back.
    others = [(tmp_path / str(i)).open("w+b", buffering=0) for i in range(20)]
    cache.closed = None  # the drop has asked before the cache was closed
    with pytest.raises(kvtier.ClosedError):
        model.ns.drop(model.digests(tokens))
    assert [os.fstat(other.fileno()).st_size for other in others] == [0] * 20
    for other in others:
        other.close()


def test_a_load_that_is_reading_while_the_cache_closes_gets_its_blocks(store, make_model):
    io = ClosesIn("preadv")
    cache = kvtier.open(store, io=io, host_bytes=0, auto_gc=False, readback_every=0)
    model = make_model(cache)
    tokens = model.prompt(1, 4)
    assert model.store(tokens, durability="flushed").wait(60)
    match = model.ns.match(tokens, want=("block",))
    room = np.zeros((match.n_blocks, 5_000), np.uint8)
    io.cache = cache
    result = model.ns.load(match, dst=room, wait=True).wait(60)
    assert cache.closed is not None
    assert model.check(match, result, room) == 4
    assert cache.disk.segments.users() == 0
    assert cache.disk.segments.descriptors() == []


FORKED = """
import os, signal, sys, warnings
import deepinfer_kvtier as kvtier

warnings.simplefilter("ignore")  # forking with threads is what this is about
layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 5_000))})
prompt = list(range(6 * 128 + 1))
cache = kvtier.open(sys.argv[2], host_bytes=0, auto_gc=False)
ns = cache.namespace(layout, model="forked")
digests = ns.match(prompt).digests
assert ns.put(digests[:3], bytes(3 * 5_000), durability="flushed").wait(60)
match = ns.match(prompt)
child = os.fork()
if sys.argv[1] == "orphan" and child:
    os.kill(os.getpid(), signal.SIGKILL)
if child == 0:
    if sys.argv[1] == "orphan":
        print("orphan", flush=True)
        sys.stdin.readline()
        os._exit(0)
    calls = [lambda: ns.match(prompt), lambda: ns.load(match, dst=bytearray(15_000)),
             lambda: ns.put(digests, bytes(6 * 5_000)), lambda: ns.drop(digests)]
    for call in calls:
        try:
            call()
        except kvtier.ClosedError:
            print("closed", flush=True)
    match.release()
    cache.close()
    os._exit(0)
os.waitpid(child, 0)
assert ns.put(digests[3:], bytes(3 * 5_000), parents=digests[2], first_block=3,
              durability="flushed").wait(60)
print(ns.match(prompt).n_blocks, flush=True)
cache.close()
"""


def test_a_forked_child_finds_its_cache_closed_and_leaves_that_of_its_parent_alone(store):
    run = [sys.executable, "-c", FORKED, "child", str(store)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["closed"] * 4 + ["6"]
    with kvtier.open(store) as cache:
        assert cache.namespace(LAYOUT, model="forked").match(PROMPT).n_blocks == 6


def test_neither_the_folder_nor_the_leases_of_a_killed_process_live_on_in_its_children(store):
    run = [sys.executable, "-c", FORKED, "orphan", str(store)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "orphan\n"
        parent.wait(60)
        with kvtier.open(store, auto_gc=False) as cache:
            assert cache.gc().adopted_writers == 1
            segments = cache.disk.segments
            assert [segments.is_leased(segment) for segment in segments.all()] == [False]
        parent.stdin.write("\n")
        parent.stdin.flush()


def test_a_script_that_ends_with_a_cache_in_hand_says_nothing(tmp_path):
    script = (
        f"import deepinfer_kvtier as k; cache = k.open({str(tmp_path / 'kv')!r}); cache.close()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
