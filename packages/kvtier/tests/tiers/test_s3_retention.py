"""What leaves object storage: drops, lifetimes, leftovers."""

from __future__ import annotations

import pytest

from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.remote.tiers.manifest import latest
from deepinfer_kvtier.remote.tiers.objects import S3TierConfig
from deepinfer_kvtier.remote.tiers.s3 import S3Tier
from deepinfer_kvtier.remote.tiers.s3_gc import S3Collector
from deepinfer_kvtier.testing import ManualClock

pytest.importorskip("obstore", reason="object-storage tests need the extra s3")


def test_dropped_records_are_hidden_everywhere_and_can_be_stored_again(
    open_tier, make_record, make_digest, read_back, clock
):
    one, two = open_tier(), open_tier()
    one.put_from([make_record(n) for n in range(3)])
    two.refresh()
    assert two.delete(0, 0, [make_digest(1)]) == 1
    one.refresh()
    assert read_back(one, range(3))[1] == 2
    assert one.drain_drops() == {(0, 0, make_digest(1)[:16])}
    two.put_from([make_record(1)])
    assert read_back(two, range(3))[1] == 3
    late = open_tier()
    late.refresh()
    assert read_back(late, range(3))[1] == 3


def test_what_is_put_after_a_drop_by_a_clock_that_runs_ahead_is_found(
    objects, make_record, make_digest, read_back
):
    ours, ahead = ManualClock(), ManualClock(start_s=ManualClock().wall() + 900)
    config = S3TierConfig(url="s3://b/p")
    here = S3Tier(config, objects, classes=DEFAULT_CLASSES, clock=ours)
    other = S3Tier(config, objects, classes=DEFAULT_CLASSES, clock=ahead)
    here.put_from([make_record(n) for n in range(3)])
    other.refresh()
    assert other.delete(0, 0, [make_digest(n) for n in range(3)]) == 3
    here.refresh()
    assert read_back(here, range(3))[1] == 0
    here.put_from([make_record(n) for n in range(3)])
    other.refresh()
    assert [read_back(tier, range(3))[1] for tier in (here, other)] == [3, 3]
    for tier in (here, other):
        tier.close()


def test_a_drop_works_against_a_writer_whose_clock_runs_ahead(objects, make_record, read_back):
    ahead, ours = ManualClock(1_800_000_500.0), ManualClock()
    config = S3TierConfig(url="s3://b/p")
    writer = S3Tier(config, objects, classes=DEFAULT_CLASSES, clock=ahead)
    other = S3Tier(config, objects, classes=DEFAULT_CLASSES, clock=ours)
    writer.put_from([make_record(0)])
    other.refresh()
    other.delete(0, 0, [make_record(0).digest])
    late = S3Tier(config, objects, classes=DEFAULT_CLASSES, clock=ours)
    late.refresh()
    assert read_back(late, [0])[1] == 0
    for tier in (writer, other, late):
        tier.close()


def test_expired_segments_leave_the_manifest_first_and_the_store_after_the_grace(
    open_tier, objects, make_record, read_back, clock
):
    tier = open_tier(grace_s=120)
    tier.put_from([make_record(n, cls="scratch") for n in range(3)])
    tier.put_from([make_record(n, cls="pin") for n in range(3, 6)])
    collector = S3Collector(tier)
    clock.advance(3601)
    assert collector.collect().tombstoned == 1
    reader = open_tier()
    reader.refresh()
    assert read_back(reader, range(6))[1] == 3
    assert read_back(tier, range(3))[1] == 3, "who knew the segment still reads it in the grace"
    assert len(objects.list("seg/")) == 2
    collector.collect()
    clock.advance(121)
    assert collector.collect().deleted == 1
    assert len(objects.list("seg/")) == 1
    assert len(objects.list("idx/")) == 1
    assert read_back(tier, range(3))[1] == 0, "a deleted object is a miss"
    assert latest(objects, tier._writer)[0].grave == ()


def test_a_segment_that_is_read_lives_on(open_tier, objects, make_record, read_back, clock):
    tier = open_tier(grace_s=0)
    tier.put_from([make_record(0, cls="scratch")])
    collector = S3Collector(tier)
    for _ in range(4):
        clock.advance(1800)
        assert read_back(tier, [0])[1] == 1
        assert collector.collect().tombstoned == 0
    clock.advance(3601)
    assert collector.collect().tombstoned == 1


def test_leftovers_of_a_killed_writer_are_swept_after_a_day(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    objects.plan = lambda call, path: "fail" if call == "create" and "manifest" in path else None
    assert tier.put_from([make_record(1)]) == [Status.ERROR]
    objects.plan = lambda call, path: None
    assert len(objects.list("seg/")) == 2
    from deepinfer_kvtier.base.timing import SystemClock

    clock = SystemClock()
    tier.clock = clock
    assert S3Collector(tier).collect().orphans == 0, "it may be on its way"

    class Tomorrow(SystemClock):
        def wall(self):
            return super().wall() + 25 * 3600

    tier.clock = Tomorrow()
    assert S3Collector(tier).collect().orphans == 2
    assert read_back(tier, [0])[1] == 1


def test_a_read_is_remembered_for_the_collectors_of_other_machines(
    open_tier, make_record, read_back, clock
):
    reader, other = open_tier(), open_tier()
    reader.put_from([make_record(0, cls="scratch")])
    clock.advance(1800)
    assert read_back(reader, [0])[1] == 1
    reader.collector.collect()
    clock.advance(2000)
    assert S3Collector(other).collect().tombstoned == 0, "used 2,000 s ago, stored 3,800 s ago"
    clock.advance(1601)
    assert S3Collector(other).collect().tombstoned == 1


def test_a_collection_with_nothing_to_do_writes_nothing(open_tier, objects, make_record):
    tier = open_tier()
    tier.put_from([make_record(0)])
    tier.collector.collect()
    objects.calls.clear()
    tier.collector.collect()
    assert {call for call, _ in objects.calls} <= {"list", "get"}
