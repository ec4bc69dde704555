from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.config import DEFAULT_CLASSES, check_class_name
from deepinfer_kvtier.log.compaction import SegmentStats, choose_expired, choose_victims
from deepinfer_kvtier.testing import FaultIo, ManualClock

HOUR = 3600
BLOCK_BYTES = 5_000


def disk_bytes(store) -> int:
    return sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())


def segments(store) -> int:
    return len(list(store.rglob("*.kvs")))


@pytest.fixture
def clock():
    return ManualClock()


def test_each_class_lives_its_own_time_after_the_last_hit(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        prompts = {}
        for seed, cls in enumerate(("scratch", "agent", "chat", "pin")):
            prompts[cls] = model.prompt(seed, 2)
            model.store(prompts[cls], cls=cls, durability="flushed").wait(60)

        def alive() -> set[str]:
            cache.gc()
            return {
                cls
                for cls, tokens in prompts.items()
                if (cache.disk.index.probe(0, 0, model.digests(tokens))["length"] == 5_000).all()
            }

        clock.advance(0.9 * HOUR)
        assert alive() == {"scratch", "agent", "chat", "pin"}
        clock.advance(0.2 * HOUR)
        assert alive() == {"agent", "chat", "pin"}
        clock.advance(71 * HOUR)
        assert alive() == {"chat", "pin"}
        clock.advance(96 * HOUR)
        assert alive() == {"pin"}
        assert segments(store) == 1


def test_a_hit_renews_the_lifetime_also_for_other_processes(store, make_model, clock):
    with kvtier.open(store, clock=clock) as cache, kvtier.open(store, clock=clock) as other:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        model.store(tokens, cls="agent", durability="flushed").wait(60)
        cache.disk.seal()
        clock.advance(50 * HOUR)
        assert model.block_hits(tokens) == 2
        cache.flush()
        clock.advance(50 * HOUR)
        assert other.gc().segments_expired == 0
        assert make_model(other).block_hits(tokens) == 2
        other.flush()
        clock.advance(73 * HOUR)
        assert other.gc().segments_expired == 1
    assert segments(store) == 0


@pytest.mark.parametrize("hours", [100, 200])  # within its lifetime, and past it but still there
def test_what_is_flushed_again_lives_from_then_on_for_every_process(
    store, make_model, clock, hours
):
    with kvtier.open(store, clock=clock) as cache, kvtier.open(store, clock=clock) as other:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        for _ in range(2):
            assert model.store(tokens, durability="flushed").wait(60)
            cache.disk.seal()
            clock.advance(hours * HOUR)
        clock.advance((100 - hours) * HOUR)
        other.gc()
        assert make_model(other).block_hits(tokens) == 2
        cache.gc()
        assert model.block_hits(tokens) == 2


def test_the_renewed_lifetime_survives_a_restart(store, make_model, clock):
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        model.store(tokens, cls="agent", durability="flushed").wait(60)
        clock.advance(50 * HOUR)
        model.block_hits(tokens)
    clock.advance(50 * HOUR)
    with kvtier.open(store, clock=clock) as cache:
        cache.gc()
        assert make_model(cache).block_hits(tokens) == 2


def test_the_quota_holds_and_the_least_recently_used_go_first(store, make_model, clock):
    quota = 1 << 20
    with kvtier.open(store, clock=clock, quota_bytes=quota, host_bytes=0) as cache:
        model = make_model(cache)
        for seed in range(60):
            model.store(model.prompt(seed, 4), durability="flushed").wait(60)
            clock.advance(60)
            cache.gc()
            assert disk_bytes(store) <= quota + quota // 8 + (1 << 16)
        assert model.block_hits(model.prompt(59, 4)) == 4
        assert model.block_hits(model.prompt(0, 4)) == 0
        stats = cache.stats()
        assert stats["disk"]["gc_evicted_segments"] > 0
        assert stats["disk"]["evicted_before_floor"] > 0
        assert stats["health"] == "degraded"


def test_the_quota_counts_what_lay_there_before_the_restart(store, make_model, clock):
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        for seed in range(40):
            model.store(model.prompt(seed, 4), durability="flushed").wait(60)
    before = disk_bytes(store)
    with kvtier.open(store, clock=clock, quota_bytes=before // 2) as cache:
        report = cache.gc()
        assert report.bytes_freed > 0
        assert report.within_limits
    assert disk_bytes(store) < before // 2


def test_short_lived_classes_are_evicted_before_long_lived_ones_and_pins_never(
    store, make_model, clock
):
    quota = 1 << 20
    with kvtier.open(store, clock=clock, quota_bytes=quota, host_bytes=0) as cache:
        model = make_model(cache)
        pinned, scratch = model.prompt(1_000, 4), model.prompt(1_001, 4)
        model.store(pinned, cls="pin", durability="flushed").wait(60)
        clock.advance(60)
        model.store(scratch, cls="scratch", durability="flushed").wait(60)
        for seed in range(40):
            model.store(model.prompt(seed, 4), cls="chat", durability="flushed").wait(60)
            clock.advance(10)
            cache.gc()
        assert model.load_all(pinned) == (4, 4)
        assert model.block_hits(scratch) == 0


def test_a_dry_run_changes_nothing(store, make_model, clock):
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        model.store(tokens, cls="scratch", durability="flushed").wait(60)
        cache.disk.seal()
        clock.advance(2 * HOUR)
        report = cache.gc(dry_run=True)
        assert (report.segments_expired, report.records_removed) == (1, 2)
        assert segments(store) == 1
        assert cache.gc().records_removed == 2
        assert segments(store) == 0


def test_a_leased_segment_is_collected_once_its_lease_is_over(store, make_model, clock):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, cls="scratch", durability="flushed").wait(60)
        match = model.ns.match(tokens, want=("block",), lease_s=10 * HOUR)
        cache.disk.seal()
        clock.advance(2 * HOUR)
        assert cache.gc().segments_expired == 0
        dst = np.zeros((3, BLOCK_BYTES), np.uint8)
        assert model.check(match, model.ns.load(match, dst=dst).wait(), dst) == 3
        match.release()
        assert cache.disk.segments.users() == 0
        assert cache.gc().segments_expired == 1
        assert model.block_hits(tokens) == 0


def test_a_neighbour_notices_collected_segments(store, make_model, clock):
    with kvtier.open(store, clock=clock) as cache, kvtier.open(store, clock=clock) as other:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, cls="scratch", durability="flushed").wait(60)
        neighbour = make_model(other)
        assert neighbour.block_hits(tokens) == 3
        cache.disk.seal()
        clock.advance(2 * HOUR)
        cache.gc()
        other.gc()
        assert neighbour.block_hits(tokens) == 0


def test_folders_of_ended_writers_go_with_their_last_segment_and_drops_stay(
    store, make_model, clock
):
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        kept = model.prompt(1, 2)
        model.store(kept, cls="chat", durability="flushed").wait(60)
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        model.store(model.prompt(2, 2), cls="scratch", durability="flushed").wait(60)
        model.ns.drop(model.digests(kept)[1:])
    assert len(list((store / "w").iterdir())) == 2
    clock.advance(2 * HOUR)
    with kvtier.open(store, clock=clock) as cache:
        cache.gc()
        cache.flush()
    names = {path.name for path in (store / "w").iterdir()}
    with kvtier.open(store, clock=clock) as cache:
        assert make_model(cache).block_hits(kept) == 1, "the drop was forgotten with its log"
    assert len(names) == 2


def test_an_unlink_that_fails_is_tried_again(store, make_model, clock):
    io = FaultIo(1)
    with kvtier.open(store, clock=clock, io=io) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 2), cls="scratch", durability="flushed").wait(60)
        cache.disk.seal()
        clock.advance(2 * HOUR)
        io.set_rates({"unlink": {"eio": 1.0}})
        with pytest.raises(OSError, match="injected"):
            cache.gc()
        assert segments(store) == 1
        io.set_rates({})
    with kvtier.open(store, clock=clock) as cache:
        cache.gc()
    assert segments(store) == 0


STATES = st.builds(
    SegmentStats,
    local=st.integers(0, 99),
    cls=st.sampled_from(["scratch", "agent", "chat", "pin", "other"]),
    bytes=st.integers(0, 100),
    records=st.integers(0, 5),
    alive_bytes=st.integers(0, 100),
    last_seen_s=st.integers(0, 10 * 24 * HOUR),
    youngest_floor=st.booleans(),
    deletable=st.booleans(),
    growing=st.booleans(),
)
RANKS = {"scratch": 0, "agent": 1, "chat": 2}


@given(st.lists(STATES, max_size=20), st.integers(0, 600))
def test_victims_free_enough_and_never_more_than_needed(states, excess):
    victims = choose_victims(states, excess, RANKS)
    assert all(v.deletable and v.cls in RANKS for v in victims)
    freed = sum(v.bytes for v in victims)
    candidates = [s for s in states if s.deletable and s.cls in RANKS]
    assert freed >= excess or len(victims) == len(candidates)
    if victims:
        assert freed - victims[-1].bytes < excess
    order = [(RANKS[v.cls], v.last_seen_s) for v in victims]
    assert order == sorted(order)


@given(st.lists(STATES, max_size=20), st.integers(0, 20 * 24 * HOUR))
def test_only_what_is_past_its_time_or_empty_expires(states, now):
    gone = choose_expired(states, DEFAULT_CLASSES, now)
    for state in states:
        policy = DEFAULT_CLASSES.get(state.cls)
        mortal = policy is not None and policy.ttl_s is not None
        past = mortal and now - state.last_seen_s >= policy.ttl_s
        assert (state in gone) == (state.deletable and (past or state.records == 0))


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({}, "chat"),
        ({"tools": True}, "agent"),
        ({"tool_results": True}, "agent"),
        ({"explicit": "scratch"}, "chat"),
        ({"explicit": "scratch", "may_choose": True, "tools": True}, "scratch"),
    ],
)
def test_the_class_of_a_request(keywords, expected):
    assert kvtier.traffic_class(**keywords) == expected


@pytest.mark.parametrize("name", ["", "a-b", "../x", "Chat", "a" * 40])
def test_class_names_that_would_not_be_file_names_are_refused(name, store):
    with pytest.raises(kvtier.ConfigError, match="class name"):
        check_class_name(name)
    with pytest.raises(kvtier.ConfigError, match="class name"):
        kvtier.open(store, classes={name: kvtier.RetentionClass(1, 5.0)})
