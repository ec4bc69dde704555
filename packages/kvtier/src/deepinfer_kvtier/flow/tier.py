"""A tier below the local directory: what it promises (`Tier`), and how the cache uses one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import bytes_of
from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.timing import Breaker, Clock
from deepinfer_kvtier.base.values import NO_ROW, Status
from deepinfer_kvtier.flow.encode import expanded
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.reading import Wanted


@runtime_checkable
class PinsMemory(Protocol):
    """What a tier adds to `Tier` when it gains from registered memory (RDMA, shared rings)."""

    def register_memory(self, address: int, length: int) -> None:
        """Prepare a range for transfers. raises: OSError."""
        ...

    def unregister_memory(self, address: int, length: int) -> None:
        """Forget a range; no transfer uses it any more. raises: OSError."""
        ...


class Registration:
    """One registered buffer; keeps it alive until `close`. Works as a context manager."""

    def __init__(self, buffer: Any, address: int, length: int, tiers: list[PinsMemory]) -> None:
        self._buffer = buffer
        self.tiers = tiers
        self.address = address
        self.length = length

    def close(self) -> None:
        """End the registration; a second call does nothing. raises: OSError."""
        while self.tiers:
            self.tiers.pop().unregister_memory(self.address, self.length)
        self._buffer = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def register(buffer: Any, tiers: Sequence[object]) -> Registration:
    """Register a buffer with every tier that pins memory; all or none. raises: OSError."""
    view = np.frombuffer(bytes_of(buffer), dtype=np.uint8)
    address = int(view.__array_interface__["data"][0])
    registration = Registration(buffer, address, view.nbytes, [])
    for tier in tiers:
        if isinstance(tier, PinsMemory):
            try:
                tier.register_memory(address, view.nbytes)
            except OSError:
                registration.close()
                raise
            registration.tiers.append(tier)
    return registration


# What `probe` says about a record: `length` is its payload in bytes, NO_ROW where there is none;
# `flags` is 0x80 for approximate records plus the replay generation (at most 127).
FOUND: Final = np.dtype([("length", "<u4"), ("flags", "u1")])
SCAN_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class TierCaps:
    """What a tier can do.

    persistent: what it stored survives the end of every process of this machine.
    shared:     other machines see it.
    max_batch:  records in one `get_into` or `put_from`; the cache splits longer batches.
    seals:      it keeps `extra` and `sealed` of records and gives them back as `Wanted.seal`;
                other tiers are not given encrypted records.
    compressed: it keeps `expanded_bytes` of records and gives such records back expanded, as
                `expanding.open_compressed` does; other tiers are given them expanded.
    commit_bytes, commit_delay_s: what its write queue collects for one `put_from`, and how long a
                record waits for that; None = the settings of the cache.
    maintain_s: seconds between two calls of `maintain`; None = `gc_interval_s` of the cache.
    """

    persistent: bool
    shared: bool
    max_batch: int = 256
    seals: bool = False
    compressed: bool = False
    commit_bytes: int | None = None
    commit_delay_s: float | None = None
    maintain_s: float | None = None


@dataclass(frozen=True, slots=True)
class ScanEntry:
    """One stored record, as `scan` lists it: address (first 16 bytes of the digest) and sizes."""

    kind: int
    shard: int
    key: bytes
    payload_bytes: int
    created_s: int


def scan_page(rows: NDArray[Any], cursor: str | None) -> tuple[Sequence[ScanEntry], str | None]:
    """A page of an index's rows and the cursor of the next, for `Tier.scan`."""
    start = int(cursor or 0)
    end = start + SCAN_PAGE
    page = [
        ScanEntry(
            int(row["kind"]),
            int(row["shard"]),
            fmt.key_bytes(row),
            int(row["length"]),
            int(row["seen_s"]),
        )
        for row in rows[start:end]
    ]
    return page, str(end) if end < len(rows) else None


class Tier(Protocol):
    """A store below the local directory. All calls are batched and may come from several threads.

    Storage trouble is a status or an OSError, both of which the cache contains; any other exception
    means misuse and is let through. Every call must end by itself within the tier's own time
    limits. Digests are 32 bytes; a tier may address by fewer but must compare all on reading.
    """

    @property
    def name(self) -> str:
        """Short and unique in one cache, for spans, metrics and costs; not "host" or "disk"."""
        ...

    @property
    def caps(self) -> TierCaps: ...

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """FOUND rows for digests of one chain, in chain order (for states: deepest last).

        The caller uses the leading hits of a block probe, so a tier may report everything behind
        its first miss as absent. Nothing is pinned: a record may be gone when it is loaded.
        """
        ...

    def get_into(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        *,
        in_time: Callable[[], bool],
    ) -> Sequence[Status]:
        """Fill `wanted[i].views` with verified bytes and set the fields a trailer would tell.

        Digest, kind, shard, length and checksum must have been compared before OK is answered.
        in_time: once false nothing more is started; the rest is TIMEOUT.
        """
        ...

    def put_from(self, batch: Sequence[EncodedRecord]) -> Sequence[Status]:
        """Store records, parents before children; OK for what is there already.

        The views of a record may be read until the call returns. FULL = no room now; anything else
        but OK is tried again later.
        """
        ...

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Forget records now and for other readers soon; returns how many were known to be here."""
        ...

    def scan(self, cursor: str | None) -> tuple[Sequence[ScanEntry], str | None]:
        """One page of a listing and the cursor of the next page; None ends it."""
        ...

    def usage(self) -> dict[str, int]:
        """Entries, bytes, counters; for `stats()`."""
        ...

    def health(self) -> Literal["ok", "degraded", "down"]:
        """From what was seen last; does no I/O."""
        ...

    def sync(self) -> None:
        """Make everything stored so far as durable as the tier can. raises: OSError."""
        ...

    def maintain(self) -> None:
        """Periodic work (poll, expire), called by the tier's writing thread. raises: OSError."""
        ...

    def close(self) -> None:
        """Give everything back; called once, after the last other call has returned."""
        ...


@runtime_checkable
class ReportsDrops(Protocol):
    """A tier through which drops of other machines arrive."""

    def drain_drops(self) -> set[tuple[int, int, bytes]]:
        """(kind, shard, first 16 bytes of the digest) of what was dropped since the last call."""
        ...


class GuardedTier:
    """A further tier as the cache uses it: batches split, failures counted, a breaker in front."""

    validates = False

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self.tier = tier
        self.name = tier.name
        self.breaker = Breaker(clock)  # of reads
        self.write_breaker = Breaker(clock)
        self.counts: Counter[str] = Counter()

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """FOUND rows; all absent while the tier is left alone or when it fails."""
        absent: NDArray[Any] = np.zeros(len(digests), dtype=FOUND)
        absent["length"] = NO_ROW
        if not digests or self.breaker.is_open:
            return absent
        try:
            found = self.tier.probe(kind, shard, digests)
        except OSError:
            self._failed("probe_errors")
            return absent
        self.breaker.success()
        return found

    def get_into(
        self, kind: int, shard: int, wanted: Sequence[Wanted], *, in_time: Callable[[], bool]
    ) -> list[Status]:
        """One status a record; an error of the tier is Status.ERROR for the batch it hit."""
        statuses: list[Status] = []
        step = max(1, self.tier.caps.max_batch)
        started = time.perf_counter()
        for start in range(0, len(wanted), step):
            some = wanted[start : start + step]
            if self.breaker.is_open:
                self.counts["breaker_skips"] += 1
                statuses.extend([Status.ERROR] * len(some))
            elif not in_time():
                statuses.extend([Status.TIMEOUT] * len(some))
            else:
                statuses.extend(self._get_batch(kind, shard, some, in_time))
        self.counts["get_records"] += sum(status is Status.OK for status in statuses)
        self.counts["get_us"] += int((time.perf_counter() - started) * 1e6)
        return statuses

    def put_from(self, batch: Sequence[EncodedRecord]) -> list[Status]:
        """One status a record, in order. raises: OSError."""
        statuses: list[Status] = []
        step = max(1, self.tier.caps.max_batch)
        skipped = [record.sealed and self._too_sealed(record) for record in batch]
        if any(skipped):
            self.counts["sealed_skipped"] += sum(skipped)
            clear = [r for r, skip in zip(batch, skipped, strict=True) if not skip]
            stored = iter(self.put_from(clear))
            return [Status.SKIPPED if skip else next(stored) for skip in skipped]
        if not self.tier.caps.compressed and any(record.expanded_bytes for record in batch):
            batch = [expanded(record) for record in batch]
        for start in range(0, len(batch), step):
            statuses.extend(self.tier.put_from(batch[start : start + step]))
        self.counts["put_records"] += sum(status is Status.OK for status in statuses)
        return statuses

    def _too_sealed(self, record: EncodedRecord) -> bool:
        """Whether the tier could not give this encrypted record back."""
        caps = self.tier.caps
        return not (caps.seals and (caps.compressed or not record.expanded_bytes))

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """How many the tier knew; 0 when it fails, which is counted."""
        try:
            return self.tier.delete(kind, shard, digests)
        except OSError:
            self._failed("delete_errors")
            return 0

    def sync(self) -> None:
        """raises: OSError."""
        self.tier.sync()

    def sync_in_s(self) -> float:
        """Further tiers are synced on request."""
        return float("inf")

    def write_control(self) -> None:
        """Further tiers have no control entries of ours."""

    def queue_config(self, config: KVTierConfig) -> KVTierConfig:
        """Settings of this tier's write queue."""
        caps = self.tier.caps
        changes: dict[str, Any] = {}
        if caps.commit_bytes is not None:
            # Whatever fits the bytes, however many records that is.
            changes |= {"commit_bytes": caps.commit_bytes, "commit_blocks": caps.max_batch}
        if caps.commit_delay_s is not None:
            changes["commit_delay_s"] = caps.commit_delay_s
        if caps.maintain_s is not None:
            changes["gc_interval_s"] = caps.maintain_s
        return config.model_copy(update=changes)

    def drain_drops(self) -> set[tuple[int, int, bytes]]:
        """What other machines dropped since the last call, where the tier reports it."""
        return self.tier.drain_drops() if isinstance(self.tier, ReportsDrops) else set()

    def maintain(self) -> None:
        """Periodic work of the tier, its failures counted."""
        try:
            self.tier.maintain()
        except OSError:
            self._failed("maintain_errors")

    def close(self) -> None:
        """raises: OSError."""
        self.tier.close()

    def usage(self) -> dict[str, int | str]:
        """The tier's own figures plus ours."""
        return {
            **self.tier.usage(),
            **self.counts,
            "health": self._health(),
        }

    def _get_batch(
        self, kind: int, shard: int, some: Sequence[Wanted], in_time: Callable[[], bool]
    ) -> Sequence[Status]:
        try:
            statuses = self.tier.get_into(kind, shard, some, in_time=in_time)
        except OSError:
            self._failed("get_errors")
            return [Status.ERROR] * len(some)
        if Status.ERROR in statuses:
            self._failed("get_errors")
        else:
            self.breaker.success()
        return statuses

    def _health(self) -> str:
        if self.breaker.is_open:
            return "down"
        return "degraded" if self.write_breaker.is_open else self.tier.health()

    def _failed(self, what: str) -> None:
        self.counts[what] += 1
        self.breaker.error()
