"""A second chance: what was used since it was written outlives an evicted segment."""

from __future__ import annotations

import errno
from itertools import count, islice
from random import Random

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.log.compaction import collect_stats
from deepinfer_kvtier.log.gc import KEPT_SHARE, evict, worth_keeping, write_again
from deepinfer_kvtier.log.index import ROW, EntryTable
from deepinfer_kvtier.simulation.replay import ReplayClock, replay
from deepinfer_kvtier.simulation.trace import Request
from deepinfer_kvtier.testing import ManualClock

SLOT = 8_192  # of a block of 5,000 bytes
QUOTA = 400 * SLOT


@pytest.fixture(autouse=True)
def eight_segments(monkeypatch):
    """What these tests count in: a quota of so many segments."""
    monkeypatch.setattr("deepinfer_kvtier.log.disk.SEGMENTS_AT_LEAST", 8)


@pytest.fixture
def clock():
    return ManualClock()


def put(model, seed: int, blocks: int = 16):
    tokens = model.prompt(seed, blocks)
    assert model.store(tokens, durability="flushed").wait(60)
    return tokens


def open_small(store, clock, **settings):
    return kvtier.open(
        store, clock=clock, host_bytes=0, auto_gc=False, quota_bytes=QUOTA, **settings
    )


def fill(model, clock, seeds: range, hot=()) -> None:
    """Put prompts, a quarter of an hour apart; those in `hot` are asked for in between."""
    for seed in seeds:
        put(model, seed)
        for tokens in hot:
            model.block_hits(tokens)
        clock.advance(900)
        model.cache.gc()


def test_what_is_asked_for_all_the_time_stays_and_its_neighbours_go(store, make_model, clock):
    with open_small(store, clock) as cache:
        model = make_model(cache)
        hot, cold = put(model, 1000), put(model, 1001)
        fill(model, clock, range(80), hot=[hot])
        assert model.load_all(hot) == (16, 16)
        assert model.block_hits(cold) == 0
        disk = cache.stats()["disk"]
        assert disk["gc_spared_records"] > 16, "more than once"
        assert disk["gc_copied_bytes"] == disk["gc_spared_records"] * SLOT
        assert disk["gc_evicted_records"] + disk["entries"] == 82 * 16
        assert cache.gc().bytes_left <= QUOTA
    with open_small(store, clock) as cache:
        assert make_model(cache).load_all(hot) == (16, 16)


def test_a_copy_has_to_earn_its_next_chance(store, make_model, clock):
    with open_small(store, clock) as cache:
        model = make_model(cache)
        once = put(model, 1000)
        model.block_hits(once)
        fill(model, clock, range(15))
        fill(model, clock, range(15, 27))
        spared = cache.stats()["disk"]["gc_spared_records"]
        assert (spared, model.cache.disk.index.hit_rows().size) == (16, 0)
        fill(model, clock, range(27, 80))
        assert cache.stats()["disk"]["gc_spared_records"] == 16
        assert model.block_hits(once) == 0


def test_the_quota_holds_where_everything_is_used(store, make_model, clock):
    with open_small(store, clock) as cache:
        model, prompts = make_model(cache), []
        for seed in range(40):
            prompts.append(put(model, seed))
            for tokens in prompts:
                model.block_hits(tokens)
            clock.advance(900)
            report = cache.gc()
            assert report.within_limits
            assert report.bytes_left <= QUOTA
            assert report.bytes_copied <= KEPT_SHARE * report.bytes_freed
        kept = [model.load_all(tokens) for tokens in prompts]
        assert all(matched == good for matched, good in kept)
        assert sum(matched for matched, _ in kept) > 200


def test_heads_of_chains_are_kept_before_their_tails(store, make_model, clock):
    with open_small(store, clock) as cache:
        model = make_model(cache)
        long = put(model, 1000, blocks=40)  # a segment holds 49 blocks, half of them may stay
        model.block_hits(long)
        fill(model, clock, range(25))
        assert 0 < cache.stats()["disk"]["gc_spared_records"] < 40
        matched, good = model.load_all(long)
        assert matched == good == cache.stats()["disk"]["gc_spared_records"]


def test_a_dry_run_says_what_will_happen(store, make_model, clock):
    with open_small(store, clock) as cache:
        model = make_model(cache)
        for seed in range(30):
            model.block_hits(put(model, seed)) if seed % 3 == 0 else put(model, seed)
            clock.advance(900)
        said = cache.gc(dry_run=True)
        did = cache.gc()
        assert did.bytes_copied == said.bytes_copied > 0
        assert did.records_removed == said.records_removed
        assert did.segments_evicted == said.segments_evicted


def test_nothing_is_written_again_on_a_file_system_that_is_short_of_space(store, make_model, clock):
    class Short(PosixIo):
        size = 1 << 40

        def space(self, path):
            return self.size - (1 << 30), self.size

    io = Short()
    with open_small(store, clock, io=io, min_free_share=0.0) as cache:
        model = make_model(cache)
        hot = put(model, 1000)
        for seed in range(22):
            put(model, seed)
            model.block_hits(hot)
            clock.advance(900)
    with kvtier.open(
        store, clock=clock, io=io, host_bytes=0, auto_gc=False, min_free_share=0.9999
    ) as cache:
        make_model(cache).block_hits(hot)
        assert cache.gc().segments_evicted > 0
        assert cache.stats()["disk"]["gc_copied_bytes"] == 0


def test_a_disk_that_fills_up_meanwhile_evicts_all_the_same(store, make_model, clock):
    class Full(PosixIo):
        full = False

        def pwritev(self, fd, buffers, offset):
            if self.full and sum(memoryview(b).nbytes for b in buffers) > 5_000:
                raise OSError(errno.ENOSPC, "full")
            return super().pwritev(fd, buffers, offset)

    io = Full()
    with open_small(store, clock, io=io) as cache:
        model = make_model(cache)
        hot = put(model, 1000)
        for seed in range(24):
            put(model, seed)
            model.block_hits(hot)
            clock.advance(900)
        io.full = True
        report = cache.gc()
        assert (report.segments_evicted > 0, report.bytes_copied) == (True, 0)
        io.full = False
        assert model.load_all(hot) == (0, 0)
        assert model.load_all(put(model, 99)) == (16, 16)


def test_what_was_written_again_is_not_once_more_where_its_segment_cannot_go(
    store, make_model, clock
):
    with open_small(store, clock) as cache:
        model = make_model(cache)
        hot = put(model, 1000)
        model.block_hits(hot)
        fill(model, clock, range(6))
        stats = collect_stats(cache.disk)
        worth = worth_keeping(cache.disk, stats.states)
        kept = write_again(cache.disk, stats.states, worth, dry_run=False)
        assert (sum(kept.records.values()), kept.bytes) == (16, 16 * SLOT)
        assert worth_keeping(cache.disk, stats.states) == {}


def test_there_is_no_second_chance_where_even_the_growing_segment_must_go(store, make_model, clock):
    with open_small(store, clock) as cache:
        model = make_model(cache)
        hot = put(model, 1000)
        model.block_hits(hot)
        fill(model, clock, range(6))
        states = collect_stats(cache.disk).states
        worth = worth_keeping(cache.disk, states)
        assert worth
        assert any(state.growing for state in states)
        done = evict(cache.disk, lambda kept: states, worth, dry_run=False)
        assert (done.kept_records, done.lost_records) == (0, 7 * 16)
        assert len(done.deleted.segments) == len(states)


def test_a_row_that_is_used_again_starts_without_the_marks_of_the_last(store):
    table = EntryTable(capacity=2)
    row = np.zeros(1, dtype=ROW)
    row["key_lo"] = 7
    table.insert(row)
    table.mark_hit(np.array([0]))
    assert len(table.hit_rows()) == 1
    table.remove(np.array([0]))
    assert len(table.hit_rows()) == 0
    row["key_lo"] = 8
    table.insert(row)
    assert len(table.hit_rows()) == 0


@pytest.mark.slow
def test_a_second_chance_raises_the_hit_rate_of_a_small_disk(tmp_path, monkeypatch, make_store):
    class Clock(ReplayClock):
        def wall(self) -> float:
            return 1_800_000_000.0 + self.at_s

    random, fresh = Random(1), count(1_000)
    popular = [tuple(range(20 * i, 20 * i + 20)) for i in range(20)]
    requests = [
        Request(float(at), 20 * 512, random.choice(popular) if at % 2 else tuple(islice(fresh, 20)))
        for at in range(600)
    ]
    rates = {}
    for chances in ("two", "one"):
        if chances == "one":
            monkeypatch.setattr("deepinfer_kvtier.log.gc.worth_keeping", lambda *_: {})
        clock = Clock()
        with kvtier.open(
            make_store(tmp_path / chances),
            host_bytes=0,
            clock=clock,
            quota_bytes=1_000 * 4096,
            gc_interval_s=1e9,
            commit_delay_s=0.0,
        ) as cache:
            rates[chances] = replay(cache, clock, requests, flush=True).hit_rate
    assert rates["two"] > rates["one"] + 0.02, rates
