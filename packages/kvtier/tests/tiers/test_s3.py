from __future__ import annotations

import contextlib
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.retention import DEFAULT_CLASSES
from deepinfer_kvtier.table import NO_ROW
from deepinfer_kvtier.testing import ManualClock
from deepinfer_kvtier.tiers.manifest import change, latest
from deepinfer_kvtier.tiers.objects import (
    Absent,
    Exists,
    Objects,
    S3TierConfig,
    Unavailable,
    open_objects,
)
from deepinfer_kvtier.tiers.s3 import S3Tier
from deepinfer_kvtier.tiers.s3_gc import S3Collector

pytest.importorskip("obstore", reason="object-storage tests need the extra s3")


class Faulty:
    """A store that fails by plan: `plan(call, path)` names an effect or None."""

    def __init__(self, inner: Objects) -> None:
        self.inner = inner
        self.counts = inner.counts
        self.plan = lambda call, path: None
        self.calls: list[tuple[str, str]] = []

    def _before(self, call, path):
        self.calls.append((call, path))
        effect = self.plan(call, path)
        if effect == "fail":
            raise Unavailable("injected")
        if effect == "lost":
            raise Absent
        return effect

    def get(self, path):
        effect = self._before("get", path)
        return _spoil(self.inner.get(path), effect)

    def get_ranges(self, path, ranges):
        effect = self._before("get_ranges", path)
        parts = self.inner.get_ranges(path, ranges)
        return [memoryview(_spoil(bytes(part), effect)) for part in parts]

    def create(self, path, content):
        effect = self._before("create", path)
        self.inner.create(path, content)
        if effect == "answer lost":
            raise Unavailable("injected after the fact")
        if effect == "repeated":
            raise Exists

    def list(self, prefix):
        self._before("list", prefix)
        return self.inner.list(prefix)

    def delete(self, path):
        self._before("delete", path)
        self.inner.delete(path)


def _spoil(raw: bytes, effect) -> bytes:
    if effect == "cut":
        return raw[: len(raw) // 2]
    if effect == "flip":
        at = random.Random(len(raw)).randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :]
    if effect == "foreign":
        return bytes(len(raw))
    return raw


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture(params=["memory", "file"])
def objects(request, clock, tmp_path):
    url = "memory:///p" if request.param == "memory" else f"file://{tmp_path}/bucket"
    return Faulty(open_objects(S3TierConfig(url=url)))


@pytest.fixture
def open_tier(objects, clock):
    tiers = []

    def make(**changes):
        config = S3TierConfig(url="s3://unused/prefix", **changes)
        tier = S3Tier(config, objects, classes=DEFAULT_CLASSES, clock=clock)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


def test_another_machine_reads_what_was_stored_after_its_next_poll(
    open_tier, make_record, read_back
):
    writer, reader = open_tier(), open_tier()
    assert writer.put_from([make_record(n) for n in range(20)]) == [Status.OK] * 20
    assert read_back(writer, range(20))[1] == 20
    assert read_back(reader, range(20))[1] == 0
    reader.refresh()
    assert read_back(reader, range(20))[1] == 20


def test_a_lookup_makes_no_request(open_tier, objects, make_record, make_digest):
    tier = open_tier()
    tier.put_from([make_record(n) for n in range(5)])
    objects.calls.clear()
    rows = tier.probe(0, 0, [make_digest(n) for n in range(6)])
    assert (rows["length"] != NO_ROW).tolist() == [True] * 5 + [False]
    assert objects.calls == []


def test_blocks_of_one_segment_come_in_one_ranged_request(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(n) for n in range(64)])
    objects.calls.clear()
    assert read_back(tier, range(64))[1] == 64
    assert [call for call, _ in objects.calls] == ["get_ranges"]


def test_a_segment_object_is_a_segment_file(open_tier, objects, make_record):
    from deepinfer_kvtier import format as fmt

    tier = open_tier()
    tier.put_from([make_record(3)])
    (path,) = [path for path, _ in objects.list("seg/")]
    raw = objects.get(path)
    header = fmt.parse_segment_header(raw[: fmt.PAGE])
    assert header is not None
    assert header.writer.hex() in path
    trailer = fmt.parse_trailer(raw[fmt.PAGE + fmt.trailer_offset(5_003) :][: fmt.TRAILER_BYTES])
    assert trailer is not None
    assert trailer.digest == make_record(3).digest


def test_many_writers_lose_nothing_to_each_other(open_tier, make_record, read_back):
    tiers = [open_tier() for _ in range(4)]

    def work(k: int) -> None:
        for i in range(5):
            tiers[k].put_from([make_record(100 * k + 10 * i + j) for j in range(4)])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader = open_tier()
    reader.refresh()
    every = [100 * k + 10 * i + j for k in range(4) for i in range(5) for j in range(4)]
    assert read_back(reader, every)[1] == len(every)


def test_changes_of_one_manifest_by_many_are_all_kept(objects):
    def work(k: int) -> None:
        for i in range(5):
            number = 10 * k + i
            change(
                objects,
                "a" * 32,
                lambda m, number=number: _with_tomb(m, number),
            )

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manifest, _ = latest(objects, "a" * 32)
    assert sorted(manifest.tombs) == sorted(10 * k + i for k in range(3) for i in range(5))


def _with_tomb(manifest, number):
    from dataclasses import replace

    if number in manifest.tombs:
        return None
    return replace(manifest, tombs=(*manifest.tombs, number))


@pytest.mark.parametrize("effect", ["repeated", "answer lost"])
def test_a_put_whose_answer_got_lost_is_not_a_wrong_or_double_record(
    open_tier, objects, make_record, read_back, effect
):
    tier = open_tier()
    objects.plan = lambda call, path: effect if call == "create" and "manifest" in path else None
    statuses = tier.put_from([make_record(1)])
    objects.plan = lambda call, path: None
    if statuses != [Status.OK]:
        assert tier.put_from([make_record(1)]) == [Status.OK]
    reader = open_tier()
    reader.refresh()
    assert read_back(reader, [1])[1] == 1


@pytest.mark.parametrize(
    ("effect", "status"),
    [
        ("fail", Status.ERROR),
        ("lost", Status.MISS),
        ("cut", Status.MISS),
        ("flip", Status.CORRUPT),
        ("foreign", Status.CORRUPT),
    ],
)
def test_a_bad_answer_is_never_a_wrong_byte(
    open_tier, objects, make_record, read_back, effect, status
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    objects.plan = lambda call, path: effect if call == "get_ranges" else None
    statuses, good = read_back(tier, [0])
    assert good == 0
    assert statuses == [status] or (effect == "flip" and statuses[0] is not Status.OK)


def test_slots_of_another_record_under_the_right_name_are_a_miss(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(0), make_record(1)])
    real = objects.inner.get_ranges

    def swapped(path, ranges):
        return list(reversed(real(path, ranges)))

    objects.inner.get_ranges = swapped
    statuses, good = read_back(tier, [0, 1])
    assert (good, statuses) == (0, [Status.MISS] * 2)
    assert tier.counts["digest_mismatch"] == 2


def test_a_lost_segment_is_forgotten_and_its_twin_is_used(
    open_tier, objects, make_record, read_back
):
    first, second = open_tier(), open_tier()
    first.put_from([make_record(0)])
    second.put_from([make_record(0)])
    reader = open_tier()
    reader.refresh()
    row = reader.index.probe(0, 0, [make_record(0).digest])[0]
    used = reader.index.segment(int(row["segment"]))
    objects.delete(f"seg/{used.writer}/{used.number}.kvs")
    assert read_back(reader, [0])[0] == [Status.MISS]
    assert read_back(reader, [0])[1] == 1


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_under_random_faults_every_byte_is_right_or_absent(seed):
    from .conftest import read, record

    rng = random.Random(seed)
    clock = ManualClock()
    objects = Faulty(open_objects(S3TierConfig(url="memory:///p")))
    tiers = [
        S3Tier(S3TierConfig(url="s3://b/p"), objects, classes=DEFAULT_CLASSES, clock=clock)
        for _ in range(2)
    ]
    effects = [None] * 6 + ["fail", "lost", "cut", "flip", "foreign", "answer lost", "repeated"]

    def plan(call, path):
        effect = rng.choice(effects)
        return None if effect == "lost" and not call.startswith("get") else effect

    objects.plan = plan
    for step in range(12):
        tier = rng.choice(tiers)
        action = rng.randrange(4)
        if action == 0:
            tier.put_from([record(rng.randrange(12)) for _ in range(3)])
        elif action == 1:
            read(tier, [rng.randrange(12) for _ in range(4)])
        else:
            with contextlib.suppress(Unavailable):
                tier.refresh() if action == 2 else S3Collector(tier).collect()
        clock.advance(3 if step % 4 else 11)
    objects.plan = lambda call, path: None
    clock.advance(60)
    fresh = S3Tier(S3TierConfig(url="s3://b/p"), objects, classes=DEFAULT_CLASSES, clock=clock)
    fresh.refresh()
    read(fresh, range(12))
    for tier in (*tiers, fresh):
        tier.close()


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
    assert collector.collect().buried == 1
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
        assert collector.collect().buried == 0
    clock.advance(3601)
    assert collector.collect().buried == 1


def test_leftovers_of_a_killed_writer_are_swept_after_a_day(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    objects.plan = lambda call, path: "fail" if call == "create" and "manifest" in path else None
    assert tier.put_from([make_record(1)]) == [Status.ERROR]
    objects.plan = lambda call, path: None
    assert len(objects.list("seg/")) == 2
    from deepinfer_kvtier.clock import SystemClock

    clock = SystemClock()
    tier.clock = clock
    assert S3Collector(tier).collect().orphans == 0, "it may be on its way"

    class Tomorrow(SystemClock):
        def wall(self):
            return super().wall() + 25 * 3600

    tier.clock = Tomorrow()
    assert S3Collector(tier).collect().orphans == 2
    assert read_back(tier, [0])[1] == 1


def test_what_the_storage_client_says_is_not_passed_on():
    class Broken:
        def get(self, store, path):
            raise OSError("secret-in-a-message")

    objects = open_objects(S3TierConfig(url="memory:///p"))
    objects._obstore = Broken()
    with pytest.raises(Unavailable) as caught:
        objects.get("x")
    assert "secret" not in str(caught.value)


def test_credentials_appear_nowhere():
    config = S3TierConfig.model_validate(
        {"url": "s3://b/p", "access_key_id": "AKIAX", "secret_access_key": "hunter2"}
    )
    assert "hunter2" not in repr(config)
    assert "hunter2" not in str(config.model_dump())
    for url in ("s3://me:hunter2@b/p", "s3://b/p?secret_access_key=hunter2"):
        with pytest.raises(ConfigError) as caught:
            S3TierConfig.parse(url)
        assert "hunter2" not in str(caught.value)


def test_a_wrong_setting_in_the_url_is_named():
    with pytest.raises(ConfigError, match="poll_s"):
        S3TierConfig.parse("s3://b/p?poll_s=often")
    with pytest.raises(ConfigError, match="endpiont"):
        S3TierConfig.parse("s3://b/p?endpiont=http://x")
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
        open_objects(S3TierConfig.parse("ftp://b/p"))


def test_a_prefix_with_something_else_in_it_is_refused_not_overwritten(
    open_tier, objects, make_record
):
    objects.create("FORMAT.json", [b'{"format": 99, "store": "00"}'])
    tier = open_tier()
    assert tier.put_from([make_record(0)]) == [Status.ERROR]
    with pytest.raises(Unavailable, match="format version"):
        tier.refresh()
    assert objects.get("FORMAT.json") == b'{"format": 99, "store": "00"}'


def test_a_read_is_remembered_for_the_collectors_of_other_machines(
    open_tier, make_record, read_back, clock
):
    reader, other = open_tier(), open_tier()
    reader.put_from([make_record(0, cls="scratch")])
    clock.advance(1800)
    assert read_back(reader, [0])[1] == 1
    reader.collector.collect()
    clock.advance(2000)
    assert S3Collector(other).collect().buried == 0, "used 2,000 s ago, stored 3,800 s ago"
    clock.advance(1601)
    assert S3Collector(other).collect().buried == 1


def test_a_collection_with_nothing_to_do_writes_nothing(open_tier, objects, make_record):
    tier = open_tier()
    tier.put_from([make_record(0)])
    tier.collector.collect()
    objects.calls.clear()
    tier.collector.collect()
    assert {call for call, _ in objects.calls} <= {"list", "get"}


def test_a_poll_during_a_put_does_not_lose_the_new_segment(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    tier._generations.clear()
    reading, go_on = threading.Event(), threading.Event()

    def plan(call, path):
        if call == "get" and "manifest" in path and threading.current_thread() is poll:
            reading.set()
            assert go_on.wait(20)

    objects.plan = plan
    poll = threading.Thread(target=tier.refresh)
    put = threading.Thread(target=tier.put_from, args=([make_record(1)],))
    poll.start()
    assert reading.wait(20)
    put.start()
    put.join(0.3)
    go_on.set()
    poll.join()
    put.join()
    objects.plan = lambda call, path: None
    assert read_back(tier, [0, 1])[1] == 2
    tier.refresh()
    assert read_back(tier, [0, 1])[1] == 2


def test_one_damaged_answer_does_not_make_a_manifest_forget(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    tier.put_from([make_record(1)])
    damaged = iter(["flip"])
    objects.plan = lambda call, path: (
        next(damaged, None) if call == "get" and "manifest" in path else None
    )
    tier.put_from([make_record(2)])
    objects.plan = lambda call, path: None
    reader = open_tier()
    reader.refresh()
    assert read_back(reader, range(3))[1] == 3
