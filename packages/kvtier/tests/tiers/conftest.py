from __future__ import annotations

import random

import numpy as np
import pytest

from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.log.format import EncodedRecord, Origin
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.remote.tiers.objects import (
    Absent,
    Exists,
    Objects,
    S3TierConfig,
    Unavailable,
    open_objects,
)
from deepinfer_kvtier.remote.tiers.s3 import S3Tier
from deepinfer_kvtier.testing import ManualClock, payload_of

NBYTES = 5_003


def digest_of(n: int) -> bytes:
    return payload_of(n.to_bytes(4, "little"), 32).tobytes()


def record(n: int, *, nbytes: int = NBYTES, cls: str = "chat", kind: int = 0) -> EncodedRecord:
    """The record of block `n` of one chain; its bytes follow from its digest."""
    data = payload_of(digest_of(n), nbytes)
    origin = Origin(
        kind=kind,
        shard=0,
        cls=cls,
        cls_code={"scratch": 0, "agent": 1, "chat": 2, "pin": 3}[cls],
        fingerprint=bytes(32),
        namespace=n,
        approximate=n % 7 == 6,
        generation=n % 5,
    )
    return EncodedRecord(
        origin,
        digest_of(n),
        digest_of(n - 1) if n else bytes(32),
        n + 1,
        [data[:1000].data, data[1000:].data],
        nbytes,
        checksum=checksum_of([data.data]),
    )


def want(n: int, *, nbytes: int = NBYTES) -> tuple[Wanted, np.ndarray]:
    """A request for block `n` and the array its bytes go to, filled with rubbish."""
    room = np.full(nbytes, 0xAA, dtype=np.uint8)
    return Wanted(digest_of(n), [room[:2000].data, room[2000:].data]), room


def read(tier, numbers, **keywords):
    """(statuses, count of right ones); a wrong byte under status OK fails the test."""
    pairs = [want(n) for n in numbers]
    statuses = tier.get_into(0, 0, [w for w, _ in pairs], **keywords)
    good = 0
    for n, status, (asked, room) in zip(numbers, statuses, pairs, strict=True):
        if status.value == "ok":
            expected = record(n)
            assert np.array_equal(room, payload_of(digest_of(n), NBYTES)), f"wrong bytes in {n}"
            assert asked.parent[:16] == expected.parent[:16]
            assert asked.depth == expected.depth
            assert asked.approximate == expected.approximate
            assert asked.generation == expected.generation
            good += 1
    return statuses, good


@pytest.fixture
def make_record():
    return record


@pytest.fixture
def read_back():
    return read


@pytest.fixture
def make_digest():
    return digest_of


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


@pytest.fixture(scope="session")
def faulty():
    return Faulty


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
