"""Collection beyond whole dead segments: rewriting, quotas by part, grace, pins, admission."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.flow.tiers import PutHistory
from deepinfer_kvtier.log.compaction import (
    SPARSE_SHARE,
    SegmentStats,
    choose_sparse,
    collect_stats,
    copy_forward,
    reclassify,
)
from deepinfer_kvtier.log.namespaces import drop_namespace, list_namespaces
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.testing import ManualClock

HOUR = 3600
OK = kvtier.Status.OK


@pytest.fixture
def clock():
    return ManualClock()


def segments(store, cls: str = "*"):
    return sorted(store.rglob(f"seg-{cls}-*.kvs"))


def used(store) -> int:
    return sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())


def wanted(model, tokens):
    """Destinations for a read below the namespace: unlike a match it renews no lifetime."""
    return [Wanted(d, [memoryview(bytearray(5_000))]) for d in model.digests(tokens)]


def put(model, seed: int, blocks: int = 4, cls: str = "chat"):
    tokens = model.prompt(seed, blocks)
    assert model.store(tokens, cls=cls, durability="flushed").wait(60)
    return tokens


def test_the_refreshed_tenth_of_a_segment_moves_and_the_rest_goes(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = [put(model, seed, cls="agent") for seed in range(10)]
        cache.disk.seal()
        clock.advance(50 * HOUR)
        assert model.block_hits(prompts[3]) == 4
        clock.advance(30 * HOUR)
        report = cache.gc()
        assert (report.segments_expired, report.records_removed) == (1, 36)
        assert report.bytes_copied == 4 * 8192
        assert model.load_all(prompts[3]) == (4, 4)
        assert model.block_hits(prompts[4]) == 0
        assert cache.stats()["disk"]["gc_copied_bytes"] == 4 * 8192
        cache.disk.seal()
        clock.advance(71 * HOUR)
        assert cache.gc().segments_expired == 0, "72 hours after the last use, not before"
        clock.advance(2 * HOUR)
        assert cache.gc().segments_expired == 1
        assert segments(store) == []


def test_what_moved_is_there_for_neighbours_and_after_a_restart(store, make_model, clock):
    with kvtier.open(store, clock=clock) as cache, kvtier.open(store, clock=clock) as other:
        model = make_model(cache)
        prompts = [put(model, seed, cls="agent") for seed in range(10)]
        cache.disk.seal()
        clock.advance(50 * HOUR)
        model.block_hits(prompts[0])
        clock.advance(30 * HOUR)
        assert cache.gc().bytes_copied > 0
        other.disk.refresh()
        rows = other.disk.index.probe(0, 0, model.digests(prompts[0]))
        assert other.disk.get_into(0, 0, wanted(model, prompts[0]), rows=rows) == [OK] * 4
    with kvtier.open(store, clock=clock) as cache:
        clock.advance(41 * HOUR)
        cache.gc()
        assert segments(store) != []
        clock.advance(2 * HOUR)
        cache.gc()
        assert make_model(cache).block_hits(prompts[0]) == 0


def test_a_segment_with_more_life_than_that_waits(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = [put(model, seed, cls="agent") for seed in range(10)]
        cache.disk.seal()
        clock.advance(50 * HOUR)
        for tokens in prompts[:3]:
            model.block_hits(tokens)
        clock.advance(30 * HOUR)
        report = cache.gc()
        assert (report.segments_expired, report.bytes_copied) == (0, 0)
        assert model.load_all(prompts[0]) == (4, 4)


def test_dropped_records_give_their_space_back_before_their_class_expires(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = [put(model, seed, cls="pin") for seed in range(10)]
        cache.disk.seal()
        for tokens in prompts[1:]:
            model.ns.drop(model.digests(tokens))
        (old,) = segments(store)
        cache.gc()
        cache.disk.seal()
        (new,) = segments(store)
        assert (old != new, new.stat().st_size) == (True, 4096 + 4 * 8192)
        assert model.load_all(prompts[0]) == (4, 4)


def test_a_damaged_record_is_left_behind_and_never_copied(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = [put(model, seed, cls="agent") for seed in range(10)]
        cache.disk.seal()
        (segment,) = segments(store)
        raw = bytearray(segment.read_bytes())
        raw[4096 + 8192 + 7] ^= 1  # second block of the first chain
        segment.write_bytes(raw)
        clock.advance(50 * HOUR)
        model.block_hits(prompts[0])
        clock.advance(30 * HOUR)
        assert cache.gc().bytes_copied == 3 * 8192
        assert model.block_hits(prompts[0]) == 1


def test_the_share_of_time_ends_a_pass_between_two_segments(store, make_model, clock):
    class SlowDisk(PosixIo):
        def preadv(self, fd, buffers, offset):
            if [memoryview(b).nbytes for b in buffers] == [8192]:
                clock.advance(2)
            return super().preadv(fd, buffers, offset)

    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        kept = []
        for group in range(4):
            kept.append(put(model, 100 + group, blocks=4, cls="agent"))
            for seed in range(6):
                put(model, 10 * group + seed, cls="agent")
            cache.disk.seal()
        clock.advance(50 * HOUR)
        for tokens in kept:
            model.block_hits(tokens)
        clock.advance(30 * HOUR)
    settings = {"clock": clock, "io": SlowDisk(), "host_bytes": 0, "gc_interval_s": 200}
    with kvtier.open(store, **settings) as cache:
        # 5% of 200 s are 10 s: two segments of 4 records at 2 s each.
        assert cache.gc().bytes_copied == 2 * 4 * 8192
        assert cache.gc().bytes_copied == 2 * 4 * 8192
        assert cache.gc().bytes_copied == 0
        assert all(make_model(cache).load_all(tokens) == (4, 4) for tokens in kept)


@given(
    st.lists(
        st.builds(
            SegmentStats,
            local=st.integers(0, 99),
            cls=st.just("chat"),
            bytes=st.integers(1, 100),
            records=st.integers(0, 5),
            alive_bytes=st.integers(0, 100),
            last_seen_s=st.integers(0, 99),
            youngest_floor=st.booleans(),
            deletable=st.booleans(),
            growing=st.booleans(),
        )
    )
)
def test_only_finished_mostly_dead_segments_are_rewritten(states):
    for state in choose_sparse(states):
        assert state.deletable
        assert not state.growing
        assert 0 < state.alive_bytes < SPARSE_SHARE * state.bytes


def test_a_class_has_its_own_quota_and_others_keep_theirs(store, make_model, clock):
    kvtier.init(store, class_quotas={"scratch": 1 << 19})
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        chat = [put(model, seed) for seed in range(10)]
        for seed in range(100, 160):
            put(model, seed, cls="scratch")
            clock.advance(1)
            cache.gc()
            size = sum(path.stat().st_blocks * 512 for path in segments(store, "scratch"))
            assert size <= (1 << 19) + (1 << 16) + 8192
        assert all(model.block_hits(tokens) == 4 for tokens in chat)
        assert model.block_hits(model.prompt(159, 4)) == 4
        assert model.block_hits(model.prompt(100, 4)) == 0


def test_a_full_class_that_never_expires_refuses_more_of_it_and_of_nothing_else(
    store, make_model, clock
):
    kvtier.init(store, class_quotas={"pin": 1 << 18})
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        for seed in range(12):
            model.store(model.prompt(seed, 4), cls="pin", durability="flushed").wait(60)
            cache.gc()
        refused = model.store(model.prompt(99, 4), cls="pin")
        assert set(refused.reasons) == {"class_full"}
        assert model.block_hits(model.prompt(0, 4)) == 4, "what was pinned stays"
        put(model, 100, cls="chat")


def test_a_namespace_over_its_quota_loses_its_oldest_and_its_neighbour_nothing(
    store, make_model, clock
):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        greedy, modest = make_model(cache, salt="greedy"), make_model(cache, salt="modest")
        for seed in range(20):
            put(greedy, seed)
            clock.advance(1)
        kept = put(modest, 1)
        kvtier.init(store, namespace_quotas={greedy.ns.id[:8]: 40 * 8192})
        report = cache.gc()
        assert report.records_removed == 80 - 36
        assert modest.load_all(kept) == (4, 4)
        assert greedy.block_hits(greedy.prompt(19, 4)) == 4
        assert greedy.block_hits(greedy.prompt(0, 4)) == 0
        assert cache.gc().records_removed == 0
        found = {usage.name: usage.records for usage in list_namespaces(cache.disk)}
        assert found == {greedy.ns.id[:8]: 36, modest.ns.id[:8]: 4}


def test_dropping_a_namespace_takes_all_of_it_in_every_process(store, make_model):
    with kvtier.open(store) as cache, kvtier.open(store) as other:
        one, two = make_model(cache, salt="one"), make_model(cache, salt="two")
        mine, theirs = put(one, 1), put(two, 1)
        neighbour = make_model(other, salt="one")
        assert neighbour.load_all(mine) == (4, 4)
        assert drop_namespace(cache.disk, one.ns.id) == 4
        other.gc()
        assert neighbour.block_hits(mine) == 0
        assert two.load_all(theirs) == (4, 4)
    with kvtier.open(store) as cache:
        assert make_model(cache, salt="one").block_hits(mine) == 0
        assert make_model(cache, salt="two").load_all(theirs) == (4, 4)


def test_the_namespace_survives_adoption_of_an_unindexed_record(store, make_model):
    """The trailer names it too, since the log of a killed process may lack its last frames."""
    with kvtier.open(store) as cache:
        model = make_model(cache)
        put(model, 1)
        name = model.ns.id[:8]
    (log,) = store.rglob("idx-0.kvx")
    log.write_bytes(b"")
    with kvtier.open(store) as cache:
        cache.gc()
        assert [u.records for u in list_namespaces(cache.disk) if u.name == name] == [4]


def test_a_quota_holds_while_writing_not_only_at_the_interval(store, make_model):
    """Collection starts when a segment's worth was written, so no more than that passes."""
    quota = 4 << 20
    kvtier.init(store, quota_bytes=quota, floor_s=0)
    with kvtier.open(store, host_bytes=0, gc_interval_s=3_600) as cache:
        model = make_model(cache)
        peak = 0
        for seed in range(150):
            model.store(model.prompt(seed, 8), durability="flushed").wait(60)
            peak = max(peak, used(store))
        assert peak <= quota + quota // 8 + (1 << 20)
        assert cache.stats()["disk"]["gc_evicted_segments"] > 0


def test_a_tombstoned_file_outlives_its_grace_for_readers_that_do_not_know_yet(
    store, make_model, clock
):
    with (
        kvtier.open(store, clock=clock, delete_grace_s=120, host_bytes=0) as cache,
        kvtier.open(store, clock=clock, delete_grace_s=120, host_bytes=0) as other,
    ):
        model, reader = make_model(cache), make_model(other)
        tokens = put(model, 1, cls="scratch")
        assert reader.block_hits(tokens) == 4
        cache.disk.seal()
        clock.advance(2 * HOUR)
        report = cache.gc()
        assert (report.segments_expired, report.bytes_left > 100_000) == (1, False)
        assert len(segments(store)) == 1
        assert model.block_hits(tokens) == 0
        assert reader.load_all(tokens) == (4, 4), "it has not heard of the tombstone"
        clock.advance(119)
        cache.gc()
        assert len(segments(store)) == 1
        clock.advance(2)
        cache.gc()
        assert segments(store) == []


def test_pinning_moves_records_to_the_class_that_stays_and_unpinning_starts_a_new_life(
    store, make_model, clock
):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        tokens, other = put(model, 1, cls="agent"), put(model, 2, cls="agent")
        rows = cache.disk.index.probe(0, 0, model.digests(tokens))
        assert reclassify(cache.disk, rows, "pin") == 4
        assert reclassify(cache.disk, cache.disk.index.rows(), "agent") == 4
        rows = cache.disk.index.probe(0, 0, model.digests(tokens))
        assert reclassify(cache.disk, rows, "pin") == 4
        cache.disk.seal()
        clock.advance(1_000 * HOUR)
        cache.gc()
        assert model.load_all(tokens) == (4, 4)
        assert model.block_hits(other) == 0
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        assert model.load_all(tokens) == (4, 4)
        assert reclassify(cache.disk, cache.disk.index.rows(), "chat") == 4
        cache.disk.seal()
        clock.advance(167 * HOUR)
        cache.gc()
        assert model.block_hits(tokens) == 4
        clock.advance(170 * HOUR)
        cache.gc()
        assert model.block_hits(tokens) == 0
        assert segments(store) == []


def test_second_hit_keeps_what_is_put_once_off_the_disk(store, make_model):
    with kvtier.open(store, admission="second_hit", host_bytes=1 << 20) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 4)
        first = model.store(tokens, durability="flushed")
        assert set(first.reasons) == {"first_put"}
        assert model.load_all(tokens) == (4, 4), "host memory has it all the same"
        assert segments(store) == []
        assert model.store(tokens, durability="flushed").wait(60)
        assert all(model.store(model.prompt(2, 4)).accepted)
    with kvtier.open(store) as cache:
        assert make_model(cache).load_all(tokens) == (4, 4)
        assert make_model(cache).block_hits(model.prompt(2, 4)) == 0


def test_the_history_of_puts_is_bounded_and_forgets_the_oldest():
    history = PutHistory(capacity=2)
    keys = [bytes([i]) * 32 for i in range(3)]
    assert not any(history.second_time(0, key) for key in keys)
    assert not history.second_time(0, keys[0])
    assert history.second_time(0, keys[2])
    assert not history.second_time(1, keys[2]), "another kind is another record"


def test_ten_thousand_expired_blocks_go_with_their_files_not_one_by_one(store, clock):
    class Counting(PosixIo):
        calls = 0

        def unlink(self, path):
            self.calls += 1
            super().unlink(path)

        def listdir(self, path):
            self.calls += 1
            return super().listdir(path)

    io = Counting()
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 256))})
    settings = {"clock": clock, "io": io, "host_bytes": 0, "segment_bytes": 16 << 20}
    with kvtier.open(store, **settings) as cache:
        ns = cache.namespace(layout, model="m", salt="s")
        data = np.zeros((1_000, 256), np.uint8)
        for chain in range(10):
            hasher = ns.hasher()
            hasher.extend(np.full(128_000, chain))
            assert ns.put(hasher.digests, data, cls="agent", durability="flushed").wait(20)
        cache.disk.seal()
        files = len(segments(store))
        clock.advance(73 * HOUR)
        io.calls = 0
        assert cache.gc().records_removed == 10_000
        assert segments(store) == []
        assert io.calls <= files + 8


def test_metrics_tell_what_collection_did_and_why(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = [put(model, seed, cls="agent") for seed in range(10)]
        cache.disk.seal()
        clock.advance(50 * HOUR)
        model.block_hits(prompts[3])
        clock.advance(30 * HOUR)
        cache.gc()
        text = cache.metrics()
        assert 'kvtier_disk_removed_records_total{reason="expired"} 36\n' in text
        assert f"kvtier_disk_gc_copied_bytes_total {4 * 8192}\n" in text
        kvtier.init(store, quota_bytes=1)
        cache.gc()
        text = cache.metrics()
        assert 'kvtier_disk_removed_records_total{reason="evicted"} 4\n' in text
        amplification = cache.stats()["disk"]["write_amplification"]
        files = 44 * 8192 + 2 * 4096
        assert amplification == pytest.approx(files / (40 * 5_000), rel=0.25)
        assert "kvtier_recovery_seconds 0" in text


def test_a_sparse_segment_whose_records_vanish_before_they_are_read_is_no_error(
    store, make_model, clock
):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = [put(model, seed, cls="agent") for seed in range(10)]
        cache.disk.seal()
        clock.advance(50 * HOUR)
        model.block_hits(prompts[3])
        clock.advance(30 * HOUR)
        sparse = choose_sparse(collect_stats(cache.disk).states)
        assert len(sparse) == 1
        cache.disk.delete(0, 0, model.digests(prompts[3]))
        for tokens in prompts:
            cache.disk.delete(0, 0, model.digests(tokens))
        assert copy_forward(cache.disk, sparse) == (0, 0)
