"""The Mooncake tier on a fake of the documented methods of its client; see the session for a real
master."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import NO_ROW, Status
from deepinfer_kvtier.remote.tiers import build
from deepinfer_kvtier.remote.tiers.mooncake import MooncakeTier, MooncakeTierConfig
from deepinfer_kvtier.testing import ManualClock

NBYTES = 5_003


class FakePool:
    """Hand-written from the documentation of the client: keys, addresses and numeric answers."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.values: dict[str, bytes] = {}
        self.capacity = capacity
        self.dead = False
        self.gate: threading.Event | None = None
        self.registered: list[tuple[int, int]] = []
        self.closed = False

    def register_buffer(self, buffer_ptr, size):
        self.registered.append((buffer_ptr, size))
        return 0

    def batch_is_exist(self, keys):
        if self.gate is not None:
            self.gate.wait(30)
        return [-900 if self.dead else int(key in self.values) for key in keys]

    def get_size(self, key):
        return len(self.values[key]) if key in self.values else -704

    def batch_put_from(self, keys, buffer_ptrs, sizes):
        answers = []
        for key, place, size in zip(keys, buffer_ptrs, sizes, strict=True):
            self._inside(place, size)
            if self.dead:
                answers.append(-900)
            elif sum(map(len, self.values.values())) + size > self.capacity:
                answers.append(-200)
            else:
                self.values.setdefault(key, ctypes.string_at(place, size))
                answers.append(0)
        return answers

    def batch_get_into(self, keys, buffer_ptrs, sizes):
        answers = []
        for key, place, size in zip(keys, buffer_ptrs, sizes, strict=True):
            self._inside(place, size)
            value = self.values.get(key)
            if self.dead:
                answers.append(-900)
            elif value is None:
                answers.append(-704)
            elif len(value) > size:
                answers.append(-600)
            else:
                ctypes.memmove(place, value, len(value))
                answers.append(len(value))
        return answers

    def remove(self, key):
        return 0 if self.values.pop(key, None) is not None else -704

    def close(self):
        self.closed = True
        return 0

    def _inside(self, place, size):
        assert any(at <= place and place + size <= at + room for at, room in self.registered)


@pytest.fixture
def pool():
    return FakePool()


@pytest.fixture
def tier(pool):
    config = MooncakeTierConfig(master="127.0.0.1:1", staging_bytes=40_000, timeout_s=5.0)
    tier = MooncakeTier(config, pool, ManualClock())
    yield tier
    if pool.gate is not None:
        pool.gate.set()
    tier.close()


@pytest.fixture
def exact(make_record):
    """Records that no bounded replay has touched."""

    def make(n, **keywords):
        record = make_record(n, **keywords)
        record.origin = replace(record.origin, approximate=False, generation=0)
        return record

    return make


def load(tier, make_digest, numbers):
    from deepinfer_kvtier.log.reading import Wanted
    from deepinfer_kvtier.testing import payload_of

    rooms = [np.full(NBYTES, 0xAA, dtype=np.uint8) for _ in numbers]
    wanted = [Wanted(make_digest(n), [room.data]) for n, room in zip(numbers, rooms, strict=True)]
    statuses = tier.get_into(0, 0, wanted, in_time=lambda: True)
    good = 0
    for n, room, status in zip(numbers, rooms, statuses, strict=True):
        if status is Status.OK:
            assert np.array_equal(room, payload_of(make_digest(n), NBYTES)), f"wrong bytes in {n}"
            good += 1
    return statuses, good


def test_what_was_put_is_found_with_its_size_and_read_back(tier, pool, exact, make_digest):
    assert tier.put_from([exact(n) for n in range(30)]) == [Status.OK] * 30
    rows = tier.probe(0, 0, [make_digest(n) for n in range(32)])
    assert rows["length"].tolist() == [NBYTES] * 30 + [NO_ROW] * 2
    assert load(tier, make_digest, range(30))[1] == 30
    assert len(pool.values) == 30


def test_approximate_records_are_not_kept(tier, pool, exact):
    fuzzy = exact(1)
    fuzzy.origin = replace(fuzzy.origin, approximate=True)
    assert tier.put_from([fuzzy]) == [Status.OK]
    assert pool.values == {}
    assert tier.counts["skipped_approximate"] == 1


@pytest.mark.parametrize("where", ["trailer", "payload", "cut", "foreign", "swapped"])
def test_no_rubbish_of_the_pool_is_ever_returned(tier, pool, exact, make_digest, where):
    tier.put_from([exact(0), exact(1)])
    first, second = sorted(pool.values)
    value = bytearray(pool.values[first])
    if where == "trailer":
        value[20] ^= 4
    elif where == "payload":
        value[1000] ^= 4
    elif where == "cut":
        value = value[:-10]
    elif where == "foreign":
        value = bytearray(random.Random(1).randbytes(len(value)))
    else:
        value = bytearray(pool.values[second])
    pool.values[first] = bytes(value)
    statuses, good = load(tier, make_digest, [0, 1])
    assert good == 1
    assert sum(status is not Status.OK for status in statuses) == 1
    if Status.CORRUPT in statuses:
        assert first not in pool.values, "removed, so that a good record can take its place"


def test_a_dead_master_is_an_error_and_a_restarted_one_a_miss(tier, pool, exact, make_digest):
    tier.put_from([exact(0)])
    pool.dead = True
    with pytest.raises(OSError, match="-900"):
        tier.probe(0, 0, [make_digest(0)])
    assert load(tier, make_digest, [0])[0] == [Status.ERROR]
    assert tier.put_from([exact(1)]) == [Status.ERROR]
    pool.dead = False
    pool.values.clear()
    assert load(tier, make_digest, [0])[0] == [Status.MISS]
    assert tier.put_from([exact(0)]) == [Status.OK]
    assert load(tier, make_digest, [0])[1] == 1


def test_a_full_pool_says_so(pool, exact):
    pool.capacity = 3 * 5_300
    tier = MooncakeTier(MooncakeTierConfig(master="m:1"), pool, ManualClock())
    statuses = tier.put_from([exact(n) for n in range(5)])
    assert statuses == [Status.OK] * 3 + [Status.FULL] * 2
    tier.close()


def test_a_call_that_hangs_is_left_and_nothing_else_uses_its_buffer(pool, exact, make_digest):
    config = MooncakeTierConfig(master="m:1", timeout_s=0.05)
    tier = MooncakeTier(config, pool, ManualClock())
    pool.gate = threading.Event()
    with pytest.raises(OSError, match="does not answer"):
        tier.probe(0, 0, [make_digest(0)])
    with pytest.raises(OSError, match="not come back"):
        tier.put_from([exact(0)])
    assert tier.health() == "down"
    pool.gate.set()
    tier._hung.result(60)
    pool.gate = None
    assert tier.put_from([exact(0)]) == [Status.OK]
    assert tier.health() == "ok"
    tier.close()


def test_records_larger_than_the_staging_buffer_are_left_out(pool, exact, make_digest):
    tier = MooncakeTier(MooncakeTierConfig(master="m:1", staging_bytes=4096), pool, ManualClock())
    assert tier.put_from([exact(0)]) == [Status.OK]
    assert pool.values == {}
    assert load(tier, make_digest, [0])[0] == [Status.MISS]
    tier.close()


def test_the_whole_cache_uses_a_pool(tmp_path, make_model, pool, monkeypatch):
    monkeypatch.setattr(build, "connect", lambda config: pool)
    url = "mooncake://127.0.0.1:50051?segment_bytes=0"
    with kvtier.open(tmp_path / "one", secret=bytes(32), tiers=[url]) as one:
        model = make_model(one)
        tokens = model.prompt(1, 8)
        model.store(tokens)
        assert one.flush().done
    with kvtier.open(tmp_path / "two", secret=bytes(32), tiers=[url]) as two:
        other = make_model(two)
        assert other.load_all(tokens) == (8, 8)
        assert two.stats()["hits"]["hit_tokens_mooncake"] == 8 * 128
        other.ns.drop(other.digests(tokens))
        assert pool.values == {}


def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match=r"./packages/kvtier\[mooncake\]"):
        kvtier.open(tmp_path / "s", secret=bytes(32), tiers=["mooncake://127.0.0.1:50051"])


def test_a_wrong_setting_in_the_url_is_named():
    with pytest.raises(ConfigError, match="protocol"):
        build.parse_tier("mooncake://m:1?protocol=pigeon")
    with pytest.raises(ConfigError, match="mooncake://"):
        build.parse_tier("gopher://m:1")
