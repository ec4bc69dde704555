"""Object-storage tier: immutable segment objects, index objects, and a manifest for each writer.

::

    FORMAT.json                          store id, created once
    manifest/<writer>/<generation>.json  what is alive, see `manifest`
    seg/<writer>/<number>.kvs            byte for byte a sealed segment file
    idx/<writer>/<number>.kvx            byte for byte index frames, numbered from 0

Lookups only ask the table in memory; the store is listed at the start and every `poll_s`.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.config import RetentionClass
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import NO_ROW, Status
from deepinfer_kvtier.flow.tier import FOUND, ScanEntry, TierCaps, scan_page
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.remote.tiers.manifest import Manifest, SegmentInfo, change
from deepinfer_kvtier.remote.tiers.objects import (
    Absent,
    Exists,
    ObjectStore,
    S3TierConfig,
    Unavailable,
)
from deepinfer_kvtier.remote.tiers.remote_index import RemoteIndex
from deepinfer_kvtier.remote.tiers.s3_follow import S3Follower
from deepinfer_kvtier.remote.tiers.s3_gc import S3Collector
from deepinfer_kvtier.remote.tiers.s3_layout import (
    index_path,
    pack_segment,
    read_groups,
    segment_path,
)
from deepinfer_kvtier.remote.tiers.slots import open_slot

READ_THREADS = 8
MAX_BATCH = 4096
MAX_SEGMENTS_PER_WRITER = 256


class S3Tier:
    """One process's view of one prefix. Reads and writes may run at the same time."""

    def __init__(
        self,
        config: S3TierConfig,
        objects: ObjectStore,
        *,
        classes: dict[str, RetentionClass],
        clock: Clock,
        read_only: bool = False,
    ) -> None:
        self.name = config.name
        self.caps = TierCaps(
            persistent=True,
            shared=True,
            seals=True,
            compressed=True,
            max_batch=MAX_BATCH,
            commit_bytes=config.segment_bytes,
            commit_delay_s=config.linger_s,
            maintain_s=config.poll_s,
        )
        self.config = config
        self.objects = objects
        self.classes = classes
        self.clock = clock
        self.read_only = read_only
        self.index = RemoteIndex()
        self.counts: Counter[str] = Counter()
        self._write_lock = threading.RLock()
        self._writer = secrets.token_hex(16)
        self._next_number = 0
        self._sequence = 0
        self._last_tomb_ms = 0
        self._touches: dict[int, int] = {}
        self._touch_lock = threading.Lock()
        self._poll_failed = False
        self._next_gc = clock.monotonic() + config.gc_interval_s
        self.collector = S3Collector(self)
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kvtier-s3-read")
        self._follower = S3Follower(
            objects, self.index, self.counts, self._readers, read_only=read_only
        )

    # -- index

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """FOUND rows for digests, in order. No request: only what the last poll brought counts."""
        rows = self.index.probe(kind, shard, digests)
        found = np.zeros(len(rows), dtype=FOUND)
        found["length"], found["flags"] = rows["length"], rows["flags"]
        return found

    def refresh(self) -> None:
        """Take in what other writers have changed since the last call. raises: Unavailable."""
        self._follower.refresh()

    # -- reading

    def get_into(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        *,
        in_time: Callable[[], bool] = lambda: True,
    ) -> list[Status]:
        """Fill destinations with verified bytes; one status each, never an exception."""
        statuses = [Status.MISS] * len(wanted)
        if not wanted:
            return statuses
        rows = self.index.probe(kind, shard, [want.digest for want in wanted])

        def read(group: tuple[int, list[int]]) -> None:
            local, members = group
            found = Status.TIMEOUT
            if in_time():
                found = self._read_group(kind, shard, local, members, rows, wanted, statuses)
            if found is not None:
                for i in members:
                    statuses[i] = found

        groups = read_groups(rows, wanted)
        if len(groups) == 1:
            read(groups[0])
        else:
            list(self._readers.map(read, groups))
        return statuses

    def _read_group(
        self,
        kind: int,
        shard: int,
        local: int,
        members: list[int],
        rows: NDArray[Any],
        wanted: Sequence[Wanted],
        statuses: list[Status],
    ) -> Status | None:
        """Fill in the statuses of slots of one object; a status that holds for all of them else."""
        segment = self.index.segment(local)
        lengths: list[int] = rows["length"][members].tolist()
        starts = [page * fmt.PAGE for page in rows["page"][members].tolist()]
        ranges = [
            (start, start + fmt.slot_bytes(length))
            for start, length in zip(starts, lengths, strict=True)
        ]
        try:
            parts = self.objects.get_ranges(segment_path(segment.writer, segment.number), ranges)
        except Absent:
            self.counts["lost_segments"] += 1
            self.index.forget_segment(segment)
            return Status.MISS
        except Unavailable:
            return Status.ERROR
        for i, raw, length in zip(members, parts, lengths, strict=True):
            at = fmt.trailer_offset(length)
            trailer = raw[at : at + fmt.TRAILER_BYTES]
            statuses[i] = open_slot(raw, trailer, wanted[i], kind, shard, self.counts)
            if statuses[i] is not Status.OK:
                # Only here: a bad network must not take a good record away from everybody.
                self.index.forget(kind, shard, wanted[i].digest, local)
        with self._touch_lock:
            self._touches[local] = int(self.clock.wall())
        return None

    # -- writing

    def put_from(self, batch: Sequence[EncodedRecord]) -> list[Status]:
        """Store records as one segment object for each class; they are visible here at once.

        Everybody else sees them at their next poll. returns: OK for what is stored, ERROR for what
        is not.
        """
        statuses = [Status.OK] * len(batch)
        absent = self._absent(batch)
        by_class: dict[str, list[int]] = {}
        for i, record in enumerate(batch):
            if absent[i] and not record.dropped:
                by_class.setdefault(record.cls, []).append(i)
        for members in by_class.values():
            try:
                self._store_segment([batch[i] for i in members])
            except Unavailable:
                self.counts["write_errors"] += 1
                for i in members:
                    statuses[i] = Status.ERROR
        return statuses

    def _absent(self, batch: Sequence[EncodedRecord]) -> list[bool]:
        """Which records nobody is known to have stored."""
        absent = [False] * len(batch)
        groups: dict[tuple[int, int], list[int]] = {}
        for i, record in enumerate(batch):
            groups.setdefault((record.kind, record.shard), []).append(i)
        for (kind, shard), members in groups.items():
            lengths = self.index.probe(kind, shard, [batch[i].digest for i in members])["length"]
            for i, length in zip(members, lengths.tolist(), strict=True):
                absent[i] = length == NO_ROW
        return absent

    def _store_segment(self, records: Sequence[EncodedRecord]) -> None:
        with self._write_lock:
            store = self._follower.identity()
            writer, number = self._take_number()
            # Records written after a tombstone must count as later than it, whatever its clock.
            names = [(record.kind, record.shard, record.digest) for record in records]
            tomb_ms = max(self._last_tomb_ms, self.index.newest_tomb_ms(names))
            now_ms = max(int(self.clock.wall() * 1000), tomb_ms + 1)
            body, entries, nbytes = pack_segment(
                records, store, writer, number, now_ms=now_ms, sequence=self._sequence
            )
            self._sequence += len(records)
            # The bytes before their index, the index before the manifest that makes both visible.
            self._create(segment_path(writer, number), body)
            self._create(
                index_path(writer, number),
                fmt.pack_frames(entries, 0, store, bytes.fromhex(writer)),
            )
            now_s = now_ms // 1000
            info = SegmentInfo(number, records[0].cls, now_s, nbytes, len(records), now_s)
            with self._follower.lock:
                # A refresh that has read the former manifest must not find the segment in the
                # table: it would take it for deleted.
                self._publish(writer, info)
                self.index.add(writer, entries)
            self.counts["stored_segments"] += 1
            self.counts["stored_records"] += len(records)
            self.counts["stored_bytes"] += nbytes

    def _take_number(self) -> tuple[str, int]:
        # A manifest is rewritten with every change, so one writer lists a bounded number.
        if self._next_number >= MAX_SEGMENTS_PER_WRITER:
            self._writer, self._next_number = secrets.token_hex(16), 0
        self._next_number += 1
        return self._writer, self._next_number - 1

    def _create(self, path: str, content: Sequence[bytes | memoryview]) -> None:
        try:
            self.objects.create(path, content)
        except Exists:
            # Names are never used twice, so this is our own request, repeated by the client.
            return

    def _publish(self, writer: str, info: SegmentInfo) -> None:
        def add(manifest: Manifest) -> Manifest | None:
            if info.number in manifest.segments:
                return None
            return replace(manifest, segments={**manifest.segments, info.number: info})

        change(self.objects, writer, add)

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Hide records for everybody, by tombstones; returns how many were here.

        raises: Unavailable; then they are hidden in this process only.
        """
        if not digests:
            return 0
        rows = self.index.probe(kind, shard, digests)
        rows = rows[rows["length"] != NO_ROW]
        here = len(rows)
        # Later than what it hides, even if the clock of that writer runs ahead of ours.
        newest_s = int(rows["seen_s"].max()) + 1 if here else 0
        now_ms = max(int(self.clock.wall() * 1000), self._last_tomb_ms + 1, newest_s * 1000)
        self._last_tomb_ms = now_ms
        entries = np.zeros(len(digests), dtype=fmt.ENTRY)
        entries["key_lo"], entries["key_hi"] = fmt.key_columns(list(digests))
        entries["kind"], entries["shard"] = kind, shard
        entries["flags"] = fmt.FLAG_TOMB_KEY
        entries["created_s"], entries["created_ms"] = now_ms // 1000, now_ms % 1000
        self.index.add(self._writer, entries)
        with self._write_lock:
            store = self._follower.identity()
            writer, number = self._take_number()
            frames = fmt.pack_frames(entries, 0, store, bytes.fromhex(writer))
            self._create(index_path(writer, number), frames)
            change(
                self.objects,
                writer,
                lambda manifest: (
                    None
                    if number in manifest.tombs
                    else replace(manifest, tombs=(*manifest.tombs, number))
                ),
            )
        return here

    # -- maintenance

    def take_touches(self) -> dict[tuple[str, int], int]:
        """Segments read since the last call, by writer and number, and when (seconds)."""
        with self._touch_lock:
            touched, self._touches = self._touches, {}
        return {
            (segment.writer, segment.number): seen
            for local, seen in touched.items()
            if not (segment := self.index.segment(local)).gone
        }

    def usage(self) -> dict[str, int]:
        """Entries, index memory and counters."""
        return {
            "entries": len(self.index),
            "index_bytes": self.index.nbytes,
            **self.objects.counts,
            **self.counts,
        }

    def health(self) -> Literal["ok", "degraded", "down"]:
        """ "degraded" once something was lost or damaged, or the last look at the store failed."""
        damaged = self.counts["corrupt"] + self.counts["lost_segments"]
        return "degraded" if damaged or self._poll_failed else "ok"

    def scan(self, cursor: str | None) -> tuple[Sequence[ScanEntry], str | None]:
        """Everything this process knows to be stored, in pages of 1,000."""
        return scan_page(self.index.rows(), cursor)

    def drain_drops(self) -> set[tuple[int, int, bytes]]:
        """(kind, shard, 16-byte key) of what was dropped since the last call, here or elsewhere."""
        return self.index.drain_tombs()

    def sync(self) -> None:
        """Nothing to do: a put that returned is durable."""

    def maintain(self) -> None:
        """Poll, and collect when it is time. raises: Unavailable."""
        self._poll_failed = True
        self.refresh()
        self._poll_failed = False
        now = self.clock.monotonic()
        if not self.read_only and now >= self._next_gc:
            self._next_gc = now + self.config.gc_interval_s
            self.collector.collect()

    def close(self) -> None:
        """Stop the reading threads."""
        self._readers.shutdown(wait=True)
