"""One machine matches, another loads, a third collects: on a mount time protects what was found."""

from __future__ import annotations

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock

GRACE_S = 120.0
FAST = {"poll_s": 3600.0, "heartbeat_s": 3600.0, "adopt_after_s": 36_000.0, "grace_s": GRACE_S}


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def open_mount(tmp_path, clock):
    opened = []

    def make(**changes):
        settings = {"mount": FAST, "host_bytes": 0, "auto_gc": False, "min_free_share": 0.0}
        cache = kvtier.open(tmp_path / "kv", mode="shared-fs", clock=clock, **settings, **changes)
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


@pytest.fixture
def collected(open_mount, make_model, clock, tmp_path):
    """A writer, a worker that knew the records, and a prompt whose segment a third has given up."""
    writer = make_model(open_mount())
    tokens = writer.prompt(1, 6)
    assert writer.store(tokens, cls="scratch", durability="flushed").wait(60)
    writer.cache.disk.seal()
    worker = make_model(open_mount())
    assert worker.block_hits(tokens) == 6
    clock.advance(2 * 3600)
    collector = open_mount()
    assert collector.gc().segments_expired > 0
    assert make_model(collector).block_hits(tokens) == 0
    worker.cache.disk.refresh()
    return worker, collector, tokens


def test_what_a_scheduler_found_a_worker_loads_although_it_was_given_up_meanwhile(collected):
    worker, _, tokens = collected
    assert worker.load_all(tokens) == (6, 6)


def test_after_half_of_the_grace_nobody_finds_it_and_after_all_of_it_the_file_goes(
    collected, clock, tmp_path
):
    worker, collector, tokens = collected
    clock.advance(GRACE_S / 2)
    worker.cache.disk.refresh()
    assert worker.block_hits(tokens) == 0
    collector.gc()
    assert list(tmp_path.rglob("*.kvs"))
    clock.advance(GRACE_S / 2)
    collector.gc()
    assert not list(tmp_path.rglob("*.kvs"))


def test_it_counts_for_nothing_else(collected):
    worker, _, tokens = collected
    cache = worker.cache
    assert len(cache.disk.index.rows()) == 0
    report = cache.gc()
    assert (report.segments_expired, report.segments_evicted, report.bytes_freed) == (0, 0, 0)
    # A put is a new record, not a mark of use on one that is about to go.
    worker.store(tokens)
    assert cache.flush().done
    assert cache.stats()["disk"]["written_payload_bytes"] == 6 * 5_000


def test_a_record_put_again_meanwhile_outlives_the_old_one(collected, clock):
    worker, collector, tokens = collected
    assert worker.store(tokens, durability="flushed").wait(60)
    clock.advance(GRACE_S)
    worker.cache.disk.refresh()
    collector.gc()
    assert worker.load_all(tokens) == (6, 6)


def test_who_opens_later_never_hears_of_it(collected, open_mount, make_model):
    _, _, tokens = collected
    late = make_model(open_mount())
    assert late.block_hits(tokens) == 0
    assert late.cache.stats()["disk"]["entries"] == 0
