"""For tests of the cache and of what is built on it: checkable bytes, a clock, a breaking disk,
and what every tier promises.

A tier of yours is tested by a subclass, in a file that pytest collects::

    class TestMyTier(TierContract):
        def make(self):
            return MyTier("somewhere empty")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.base.values import APPROXIMATE_BIT, KIND_CODES, NO_ROW, Status
from deepinfer_kvtier.faults import Effect, FaultIo
from deepinfer_kvtier.flow.tier import Tier
from deepinfer_kvtier.log.format import EncodedRecord, Origin
from deepinfer_kvtier.log.reading import Wanted

__all__ = ["Effect", "FaultIo", "ManualClock", "TierContract", "payload_of"]


def payload_of(digest: bytes, nbytes: int) -> NDArray[np.uint8]:
    """The bytes a record with this digest should have: checkable without storing them."""
    return np.frombuffer(blake3(digest).digest(length=nbytes), dtype=np.uint8).copy()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 1_800_000_000.0) -> None:
        self._start_s = start_s
        self._passed_s = 0.0

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._passed_s += seconds

    def wall(self) -> float:
        return self._start_s + self._passed_s

    def monotonic(self) -> float:
        return self._passed_s


class TierContract(ABC):
    """What every tier promises; subclass it as a test class and say how one is made.

    Records are blocks of one chain, their bytes a function of their digests. `nbytes` is the size
    of one, for tiers that have limits.
    """

    nbytes = 5_003

    @abstractmethod
    def make(self) -> Tier:
        """A tier on an empty store of its own. It is closed here."""
        ...

    def test_what_is_put_comes_back_with_its_marks(self) -> None:
        tier = self.make()
        numbers = range(min(9, tier.caps.max_batch))
        assert self._put(tier, numbers) == [Status.OK] * len(numbers)
        assert self._good(tier, numbers) == len(numbers)
        tier.close()

    def test_a_probe_tells_sizes_and_marks(self) -> None:
        tier = self.make()
        self._put(tier, range(4))
        rows = tier.probe(0, 0, [_digest(n) for n in range(6)])
        assert rows["length"].tolist() == [self.nbytes] * 4 + [NO_ROW] * 2
        flags = [self._record(n) for n in range(4)]
        marks = [r.generation | (APPROXIMATE_BIT if r.approximate else 0) for r in flags]
        assert rows["flags"][:4].tolist() == marks
        tier.close()

    def test_what_is_not_there_is_a_miss(self) -> None:
        tier = self.make()
        wanted = [self._want(n)[0] for n in (0, 1)]
        assert list(tier.get_into(0, 0, wanted, in_time=_always)) == [Status.MISS] * 2
        assert tier.probe(0, 0, [_digest(0)])["length"].tolist() == [NO_ROW]
        assert tier.delete(0, 0, [_digest(0)]) == 0
        tier.close()

    def test_a_miss_leaves_its_neighbours_alone(self) -> None:
        tier = self.make()
        self._put(tier, (0, 2))
        assert self._good(tier, (0, 1, 2)) == 2
        tier.close()

    def test_kinds_and_shards_are_apart(self) -> None:
        tier = self.make()
        self._put(tier, (0,))
        for kind, shard in ((KIND_CODES["state"], 0), (0, 1)):
            assert tier.probe(kind, shard, [_digest(0)])["length"].tolist() == [NO_ROW]
        tier.close()

    def test_storing_again_is_ok_and_changes_nothing(self) -> None:
        tier = self.make()
        self._put(tier, range(3))
        assert self._put(tier, range(3)) == [Status.OK] * 3
        assert self._good(tier, range(3)) == 3
        tier.close()

    def test_what_is_deleted_is_gone_and_can_be_stored_again(self) -> None:
        tier = self.make()
        self._put(tier, range(3))
        assert tier.delete(0, 0, [_digest(1), _digest(2)]) == 2
        assert self._good(tier, range(3)) == 1
        self._put(tier, (1, 2))
        assert self._good(tier, range(3)) == 3
        tier.close()

    def test_nothing_is_started_when_the_time_is_over(self) -> None:
        tier = self.make()
        self._put(tier, (0,))
        (status,) = tier.get_into(0, 0, [self._want(0)[0]], in_time=lambda: False)
        assert status in (Status.TIMEOUT, Status.MISS), status
        tier.close()

    def test_a_listing_names_what_is_there(self) -> None:
        tier = self.make()
        self._put(tier, range(3))
        found: set[bytes] = set()
        page, cursor = tier.scan(None)
        found |= {entry.key for entry in page}
        while cursor is not None:
            page, cursor = tier.scan(cursor)
            found |= {entry.key for entry in page}
        assert {_digest(n)[:16] for n in range(3)} <= found
        tier.close()

    def test_the_calls_of_the_cache_itself_work(self) -> None:
        tier = self.make()
        assert tier.name not in ("", "host", "disk")
        assert tier.health() == "ok"
        self._put(tier, (0,))
        tier.sync()
        tier.maintain()
        assert all(isinstance(value, int) for value in tier.usage().values())
        tier.close()

    def test_another_cache_finds_through_it_what_one_has_stored(self) -> None:
        tier = self.make()
        layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 640))})
        prompt = list(range(5 * 128 + 1))

        def opened() -> kvtier.Cache:
            lent = cast(Tier, _Unclosed(tier))
            return kvtier.open(host_bytes=1 << 20, secret=bytes(32), tiers=[lent])

        with opened() as one:
            space = one.namespace(layout, model="m", salt="tenant")
            digests = space.match(prompt).digests
            space.put(digests, [payload_of(d, 640) for d in digests], durability="flushed").wait(60)
            assert one.flush().done
        with opened() as two:
            space = two.namespace(layout, model="m", salt="tenant")
            room = np.zeros((5, 640), dtype=np.uint8)
            with space.match(prompt) as match:
                assert match.n_blocks == 5, match.spans
                result = space.load(match, dst=room).wait(60)
                assert result is not None
                assert result.ok
            for row, digest in zip(room, digests, strict=True):
                assert np.array_equal(row, payload_of(digest, 640))
        tier.close()

    def _record(self, n: int) -> EncodedRecord:
        data = payload_of(_digest(n), self.nbytes)
        origin = Origin(
            kind=0,
            shard=0,
            cls="chat",
            cls_code=DEFAULT_CLASSES["chat"].code,
            fingerprint=bytes(32),
            namespace=1,
            approximate=n % 3 == 2,
            generation=n % 5,
        )
        parent = _digest(n - 1) if n else bytes(32)
        views = [data[:1000].data, data[1000:].data]
        checksum = checksum_of([data.data])
        return EncodedRecord(
            origin, _digest(n), parent, n + 1, views, self.nbytes, checksum=checksum
        )

    def _want(self, n: int) -> tuple[Wanted, NDArray[np.uint8]]:
        room = np.full(self.nbytes, 0xAA, dtype=np.uint8)
        return Wanted(_digest(n), [room[:2000].data, room[2000:].data]), room

    def _put(self, tier: Tier, numbers: Sequence[int]) -> list[Status]:
        return list(tier.put_from([self._record(n) for n in numbers]))

    def _good(self, tier: Tier, numbers: Sequence[int]) -> int:
        """How many come back; a wrong byte or mark under status OK fails."""
        pairs = [self._want(n) for n in numbers]
        statuses = tier.get_into(0, 0, [wanted for wanted, _ in pairs], in_time=_always)
        assert len(statuses) == len(pairs)
        good = 0
        for n, status, (wanted, room) in zip(numbers, statuses, pairs, strict=True):
            if status is Status.OK:
                record = self._record(n)
                assert np.array_equal(room, payload_of(_digest(n), self.nbytes)), f"bytes of {n}"
                assert wanted.parent[:16] == record.parent[:16], f"parent of {n}"
                marks = (wanted.depth, wanted.approximate, wanted.generation)
                assert marks == (record.depth, record.approximate, record.generation), n
                good += 1
        return good


class _Unclosed:
    """A tier that outlives the cache that was opened with it."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def close(self) -> None:
        pass


def _digest(n: int) -> bytes:
    return payload_of(n.to_bytes(4, "little"), 32).tobytes()


def _always() -> bool:
    return True
