"""Leases between processes: one matches, another loads, a third collects."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base import files as filelocks
from deepinfer_kvtier.testing import ManualClock, payload_of

BLOCKS, BLOCK_BYTES = 6, 5_000
LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", BLOCK_BYTES))})
PROMPT = list(range(BLOCKS * 128 + 1))

PROCESS = """
import sys
import numpy as np
import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of

def say(*what):
    print(*what, flush=True)

layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 5_000))})
prompt = list(range(6 * 128 + 1))
with kvtier.open(sys.argv[2], host_bytes=0, auto_gc=False) as cache:
    ns = cache.namespace(layout, model="leases")
    if sys.argv[1] == "hold":
        match = ns.match(prompt, lease_s=600)
        say(match.n_blocks)
        sys.stdin.readline()
        match.release()
        say("released")
        sys.stdin.readline()
    else:
        say("ready")
        sys.stdin.readline()
        with ns.match(prompt) as match:
            room = np.zeros((match.n_blocks, 5_000), np.uint8)
            ok = ns.load(match, dst=room).wait().ok_prefix
        right = [np.array_equal(row, payload_of(d, 5_000)) for row, d in zip(room, match.digests)]
        say(ok, sum(right))
"""


@pytest.fixture
def process(store):
    running = []

    def start(role):
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", PROCESS, role, str(store)]
        running.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return running[-1]

    yield start
    for one in running:
        one.kill()
        one.communicate()


def line(process, send=None):
    if send is not None:
        process.stdin.write(send + "\n")
        process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.fixture
def stored(store):
    with kvtier.open(store) as cache:
        ns = cache.namespace(LAYOUT, model="leases")
        digests = ns.match(PROMPT).digests
        blocks = [payload_of(d, BLOCK_BYTES) for d in digests]
        assert ns.put(digests, blocks, durability="flushed").wait(60)
    return store


def collect(store, cli):
    """What a run of the collector takes that may keep next to nothing."""
    return cli.facts("gc", store, "--quota-bytes", "4096", "--yes")["segments_evicted"]


def test_what_one_process_leased_another_one_loads_after_a_third_has_collected(
    stored, process, cli
):
    holder, loader = process("hold"), process("load")
    assert line(holder) == str(BLOCKS)
    assert line(loader) == "ready"
    assert collect(stored, cli) == 0
    assert line(loader, "go") == f"{BLOCKS} {BLOCKS}"
    assert line(holder, "release") == "released"
    assert collect(stored, cli) == 1
    assert not list(stored.rglob("*.kvs"))


def test_a_lease_ends_with_its_process_however_it_dies(stored, process, cli):
    holder = process("hold")
    assert line(holder) == str(BLOCKS)
    holder.kill()
    holder.wait()
    assert collect(stored, cli) == 1


@pytest.mark.parametrize("read_only", [True, False])
def test_a_lease_is_over_after_its_time_also_where_nothing_else_happens(stored, cli, read_only):
    with kvtier.open(
        stored, read_only=read_only, host_bytes=0, auto_gc=False, gc_interval_s=0.05
    ) as cache:
        ns = cache.namespace(LAYOUT, model="leases")
        assert ns.match(PROMPT, lease_s=0.2).n_blocks == BLOCKS
        patience = threading.Event()
        for _ in range(1000):
            if not len(cache.leases):
                break
            patience.wait(0.01)
        assert collect(stored, cli) == 1


def test_a_quota_is_kept_by_evicting_what_nobody_leases(store, make_model):
    clock = ManualClock()
    settings = {"clock": clock, "host_bytes": 0, "auto_gc": False}
    with kvtier.open(store, **settings) as cache:
        model = make_model(cache)
        old, new = model.prompt(1, 4), model.prompt(2, 4)
        for tokens in (old, new):
            assert model.store(tokens, durability="flushed").wait(60)
            cache.disk.seal()
            clock.advance(60)
        match = model.ns.match(old, want=("block",))
        with kvtier.open(store, quota_bytes=75_000, **settings) as other:
            assert other.gc().segments_evicted == 1
        assert (model.block_hits(old), model.block_hits(new)) == (4, 0)
        match.release()


def test_a_quota_of_a_namespace_spares_what_is_leased(store, make_model):
    clock = ManualClock()
    with kvtier.open(store, clock=clock, host_bytes=0, auto_gc=False) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 4)
        assert model.store(tokens, durability="flushed").wait(60)
        name = model.ns.id[:8]
        match = model.ns.match(tokens, want=("block",))
        with kvtier.open(
            store, clock=clock, host_bytes=0, auto_gc=False, namespace_quotas={name: 1}
        ) as other:
            assert other.gc().records_removed == 0
            assert model.block_hits(tokens) == 4
            match.release()
            assert other.gc().records_removed == 4


def test_who_collects_is_not_waited_for_and_its_file_is_a_miss(stored):
    (segment,) = stored.rglob("*.kvs")
    with kvtier.open(stored, host_bytes=0) as cache, segment.open("r+b") as file:
        assert filelocks.claim(file.fileno())
        ns = cache.namespace(LAYOUT, model="leases")
        assert ns.match(PROMPT).n_blocks == 0


def test_a_file_that_lost_its_name_is_not_promised_to_anybody(stored):
    with kvtier.open(stored, host_bytes=0) as cache:
        ns = cache.namespace(LAYOUT, model="leases")
        with ns.match(PROMPT) as match:
            assert match.n_blocks == BLOCKS
        (segment,) = stored.rglob("*.kvs")
        segment.unlink()  # the descriptor is still open here, but nobody else could load it
        assert ns.match(PROMPT).n_blocks == 0


def test_where_there_are_no_locks_leases_hold_in_their_own_process(
    stored, monkeypatch, check_leaks
):
    def refuse(*_):
        raise OSError(38, "no locks here")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    with kvtier.open(stored, host_bytes=0) as cache:
        ns = cache.namespace(LAYOUT, model="leases")
        with ns.match(PROMPT) as match:
            room = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
            assert ns.load(match, dst=room).wait().ok_prefix == BLOCKS
        cache.gc()
        check_leaks(cache)


def test_a_collection_that_was_asked_for_ends_the_refusals_of_one_that_found_no_room(
    store, make_model
):
    """What is leased keeps the quota from being met, and puts are refused, until it is released."""
    with kvtier.open(store, auto_gc=False, host_bytes=0, quota_bytes=150_000) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 20), durability="flushed").wait(60)
        with model.ns.match(model.prompt(1, 20), want=("block",)):
            assert not cache.gc().within_limits
            assert set(model.store(model.prompt(2, 2)).reasons) == {"disk_full"}
        assert cache.gc().within_limits
        assert model.store(model.prompt(2, 2), durability="flushed").wait(60)
        assert model.block_hits(model.prompt(2, 2)) == 2
