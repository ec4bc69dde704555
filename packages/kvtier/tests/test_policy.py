"""The rules of keeping and deleting belong to the directory, not to whoever opens it."""

from __future__ import annotations

import errno
import json
import logging

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.testing import ManualClock

HOUR = 3600
MONTH = kvtier.RetentionClass(code=1, ttl_s=30 * 24 * HOUR)


class SmallDisk(PosixIo):
    """Pretends to lie on a small file system that others fill, too."""

    def __init__(self, size: int, others: int) -> None:
        self.size, self.others = size, others

    def space(self, path):
        mine = sum(self.disk_bytes(file) for file in path.rglob("*") if file.is_file())
        return max(0, self.size - self.others - mine), self.size


@pytest.fixture
def clock():
    return ManualClock()


def fill(cache, make_model, count: int, clock, cls: str = "chat"):
    model = make_model(cache)
    for seed in range(count):
        assert model.store(model.prompt(seed, 4), cls=cls, durability="flushed").wait(60)
        cache.disk.seal()
        clock.advance(60)
    return model


def test_a_class_kept_for_a_month_is_kept_by_whoever_collects_later(store, make_model, clock):
    classes = {"agent": MONTH, "chat": kvtier.RetentionClass(2, 168.0 * HOUR)}
    with kvtier.open(store, clock=clock, classes=classes) as cache:
        fill(cache, make_model, 1, clock, cls="agent")
    clock.advance(20 * 24 * HOUR)
    with kvtier.open(store, clock=clock) as cache:
        assert cache.config.classes["agent"] == MONTH
        assert cache.gc().segments_expired == 0
        assert make_model(cache).block_hits(make_model(cache).prompt(0, 4)) == 4
    clock.advance(31 * 24 * HOUR)
    with kvtier.open(store, clock=clock) as cache:
        assert cache.gc().segments_expired == 1


def test_an_explicit_setting_of_open_wins_and_is_stored(store):
    kvtier.init(store, quota_bytes=1 << 30, floor_s=5.0)
    with kvtier.open(store, quota_bytes=1 << 31) as cache:
        assert (cache.config.quota_bytes, cache.config.floor_s) == (1 << 31, 5.0)
    with kvtier.open(store) as cache:
        assert (cache.config.quota_bytes, cache.config.floor_s) == (1 << 31, 5.0)
    with kvtier.open(store, quota_bytes=None, read_only=True) as cache:
        assert cache.config.quota_bytes is None
    with kvtier.open(store) as cache:
        assert cache.config.quota_bytes == 1 << 31, "who only looks changes nothing"


def test_settings_that_are_no_policy_are_not_stored(store):
    kvtier.open(store, host_bytes=1 << 20, segment_bytes=1 << 20).close()
    assert json.loads((store / "policy.json").read_text()) == {"min_free_share": 0.0}


def test_a_changed_policy_reaches_a_running_process(store, make_model, clock):
    with kvtier.open(store, clock=clock, segment_bytes=1 << 16) as cache:
        fill(cache, make_model, 20, clock)
        assert cache.gc().segments_evicted == 0
        kvtier.init(store, quota_bytes=1 << 18)
        assert cache.gc().segments_evicted > 0
        assert cache.config.quota_bytes == 1 << 18


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"ttl": 3}', '{"quota_bytes": -1}', '{"classes": {"A-": {}}}']
)
def test_a_policy_that_cannot_be_understood_stops_everything_that_would_delete(
    store, make_model, clock, content
):
    with kvtier.open(store, clock=clock, classes={"agent": MONTH}) as cache:
        fill(cache, make_model, 1, clock, cls="agent")
        (store / "policy.json").write_text(content)
        clock.advance(100 * 24 * HOUR)
        with pytest.raises(kvtier.StoreFormatError, match=r"policy\.json"):
            cache.gc()
    with pytest.raises(kvtier.StoreFormatError, match=r"policy\.json"):
        kvtier.open(store)
    assert len(list(store.rglob("*.kvs"))) == 1


def test_init_takes_policy_settings_only(store):
    with pytest.raises(kvtier.ConfigError, match="host_bytes"):
        kvtier.init(store, host_bytes=5)


def test_a_short_file_system_costs_what_it_lacks_and_no_more(store, make_model, clock, caplog):
    disk = SmallDisk(size=20 << 20, others=18 << 20)
    kvtier.init(store, min_free_share=0.05)
    with kvtier.open(store, clock=clock, io=disk, segment_bytes=1 << 16, host_bytes=0) as cache:
        model = fill(cache, make_model, 20, clock)
        assert cache.gc().segments_evicted == 0, "more than a twentieth is free"
        free, size = disk.space(store)
        disk.others += free - size // 20 + 100_000
        with caplog.at_level(logging.WARNING):
            report = cache.gc()
        assert 100_000 <= report.bytes_freed < 100_000 + (1 << 16)
        assert report.within_limits
        disk_stats = cache.stats()["disk"]
        assert (disk_stats["gc_low_space"], disk_stats["low_space"]) == (1, 1)
        assert cache.stats()["health"] == "degraded"
        assert "lacks" in caplog.text
        assert model.block_hits(model.prompt(19, 4)) == 4
        assert model.block_hits(model.prompt(0, 4)) == 0
        disk.others -= 100_000
        assert cache.gc().segments_evicted == 0
        assert cache.stats()["disk"]["low_space"] == 0


def test_a_short_file_system_is_said_once(store, make_model, clock, caplog):
    kvtier.init(store, min_free_share=0.05)
    with kvtier.open(store, clock=clock, io=SmallDisk(20 << 20, 20 << 20)) as cache:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert not cache.gc().within_limits
        assert len(caplog.records) == 1
        assert cache.stats()["disk"]["gc_low_space"] == 3


def test_a_process_that_must_not_collect_by_itself_does_not(store, make_model, clock):
    with kvtier.open(store, clock=clock, gc_interval_s=0.001, auto_gc=False) as cache:
        fill(cache, make_model, 2, clock, cls="scratch")
        clock.advance(2 * HOUR)
        cache.flush()
        assert len(list(store.rglob("*.kvs"))) == 2
        assert cache.gc().segments_expired == 2


def test_a_disk_too_full_to_prepare_pages_still_takes_what_fits(store, make_model):
    class Cramped(PosixIo):
        def allocate(self, fd, offset, length):
            if length > 1 << 20:
                raise OSError(errno.ENOSPC, "no room to prepare so much")
            super().allocate(fd, offset, length)

    with kvtier.open(store, io=Cramped()) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 4), durability="flushed").wait(60)
        assert model.load_all(model.prompt(1, 4)) == (4, 4)
        assert "write_errors" not in cache.queue.counts
