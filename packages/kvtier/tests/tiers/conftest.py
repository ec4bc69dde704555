from __future__ import annotations

import numpy as np
import pytest

from deepinfer_kvtier.host import checksum_of
from deepinfer_kvtier.outgoing import Origin, Outgoing
from deepinfer_kvtier.reading import Wanted
from deepinfer_kvtier.testing import payload_of

NBYTES = 5_003


def digest_of(n: int) -> bytes:
    return payload_of(n.to_bytes(4, "little"), 32).tobytes()


def record(n: int, *, nbytes: int = NBYTES, cls: str = "chat", kind: int = 0) -> Outgoing:
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
    return Outgoing(
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
