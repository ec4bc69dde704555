from __future__ import annotations

import contextlib
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import NO_ROW, Status
from deepinfer_kvtier.remote.tiers.manifest import change, latest
from deepinfer_kvtier.remote.tiers.objects import S3TierConfig, Unavailable, open_objects
from deepinfer_kvtier.remote.tiers.s3 import S3Tier
from deepinfer_kvtier.remote.tiers.s3_gc import S3Collector
from deepinfer_kvtier.testing import ManualClock

pytest.importorskip("obstore", reason="object-storage tests need the extra s3")


def _with_tomb(manifest, number):
    from dataclasses import replace

    if number in manifest.tombs:
        return None
    return replace(manifest, tombs=(*manifest.tombs, number))


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
    from deepinfer_kvtier.log import format as fmt

    tier = open_tier()
    tier.put_from([make_record(3)])
    (path,) = [path for path, _ in objects.list("seg/")]
    raw = objects.get(path)
    assert raw.startswith(fmt.SEGMENT_MAGIC)
    assert bytes.fromhex(path.split("/")[-2]) in raw[: fmt.PAGE]
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
def test_under_random_faults_every_byte_is_right_or_absent(faulty, seed):
    from .conftest import read, record

    rng = random.Random(seed)
    clock = ManualClock()
    objects = faulty(open_objects(S3TierConfig(url="memory:///p")))
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


def test_a_poll_during_a_put_does_not_lose_the_new_segment(
    open_tier, objects, make_record, read_back
):
    tier = open_tier()
    tier.put_from([make_record(0)])
    tier._follower._generations.clear()
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
