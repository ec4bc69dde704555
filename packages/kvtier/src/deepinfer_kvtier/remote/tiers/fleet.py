"""A mounted store whose index is kept by a location service (experimental).

Beyond some two hundred million blocks no process can follow every log. Here a process writes to the
shared file system as in mode "shared-fs", tells the location service where each record lies, and
asks the service instead of reading the others' logs. What the service says is a hint: the record is
read and verified as always, and a wrong hint is a miss.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.files import IoEngine
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import (
    APPROXIMATE_BIT,
    GENERATION_BITS,
    KIND_CODES,
    NO_ROW,
    Status,
)
from deepinfer_kvtier.flow.tier import FOUND, ScanEntry, TierCaps, scan_page
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.gc import collect
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.log.store_files import open_store
from deepinfer_kvtier.remote.location.client import LocationClient
from deepinfer_kvtier.remote.location.messages import key_of
from deepinfer_kvtier.remote.location.search import PROBES_A_ROUND
from deepinfer_kvtier.remote.tiers.fleet_config import FleetTierConfig

_BLOCK: Final = KIND_CODES["block"]
# writer, segment, page, length, approximate bit and generation, class, depth, bucket start
_LOCATION = struct.Struct("<16sIIIBBIQ")
FOREVER_S: Final = 365 * 86_400


class _UnfollowedDirectory(DiskTier):
    """A directory tier that does not read the others' logs: the service is asked instead."""

    def refresh(self, *, listing: bool = True) -> None:
        """Nothing to take in."""


class FleetTier:
    """The tier of one process: its own writer and segments, everybody's through the service."""

    def __init__(
        self, wanted: FleetTierConfig, config: KVTierConfig, clock: Clock, io: IoEngine
    ) -> None:
        self.name = wanted.name
        self.caps = TierCaps(
            persistent=True,
            shared=True,
            seals=True,
            compressed=True,
            maintain_s=config.gc_interval_s,
        )
        self._clock = clock
        self.counts: Counter[str] = Counter()
        identity = open_store(
            wanted.path,
            secret=config.secret,
            read_only=config.read_only,
            now_s=clock.wall(),
            mode="shared-fs",
        )
        inner = config.model_copy(update={"path": wanted.path, "mode": "shared-fs"})
        self._files = _UnfollowedDirectory(
            wanted.path, store=identity.uuid, config=inner, clock=clock, io=io
        )
        try:
            self._client = LocationClient(
                wanted.locations,
                key=wanted.key.get_secret_value(),
                prefix=identity.uuid[:8],
                clock=clock,
                deadline_s=wanted.deadline_s,
            )
        except BaseException:
            self._files.close()
            raise

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """FOUND rows: from memory, and for what is unknown here from the service.

        Blocks are found by a search along the chain and one more round trip for their places; of
        state slots the deepest 24 boundaries are asked for.
        """
        rows = self._files.index.probe(kind, shard, digests)
        unknown: list[int] = np.flatnonzero(rows["length"] == NO_ROW).tolist()
        if kind != _BLOCK:
            # The deepest state wins, and a conversation has one at its end or none worth much.
            unknown = unknown[-PROBES_A_ROUND:]
        if unknown:
            keys = [key_of(digests[i], kind, shard) for i in unknown]
            length = self._client.search(keys) if kind == _BLOCK else len(keys)
            hints = self._client.lookup(keys[:length])
            self._learn(kind, shard, [digests[i] for i in unknown[:length]], hints)
            rows = self._files.index.probe(kind, shard, digests)
        found = np.zeros(len(rows), dtype=FOUND)
        found["length"], found["flags"] = rows["length"], rows["flags"]
        return found

    def get_into(
        self, kind: int, shard: int, wanted: Sequence[Wanted], *, in_time: Callable[[], bool]
    ) -> list[Status]:
        """Verified reads; a hint that was wrong is a MISS and is not followed again.

        Places that were let go since the lookup are asked for again.
        """
        rows = self._files.index.probe(kind, shard, [want.digest for want in wanted])
        unknown = [wanted[i].digest for i in np.flatnonzero(rows["length"] == NO_ROW).tolist()]
        if unknown:
            keys = [key_of(digest, kind, shard) for digest in unknown]
            self._learn(kind, shard, unknown, self._client.lookup(keys))
        return self._files.get_into(kind, shard, wanted, in_time=in_time)

    def put_from(self, batch: Sequence[EncodedRecord]) -> list[Status]:
        """Write what is not there, then tell the service of all of it. raises: OSError."""
        fresh = [
            record
            for record in batch
            if self._row(record.kind, record.shard, record.digest)["length"] == NO_ROW
        ]
        if fresh:
            self._files.put_from(fresh)
        for cls in {record.cls for record in batch}:
            members = [record for record in batch if record.cls == cls and not record.dropped]
            items: list[tuple[bytes, bytes]] = []
            for record in members:
                row = self._row(record.kind, record.shard, record.digest)
                if int(row["length"]) != NO_ROW:
                    key = key_of(record.digest, record.kind, record.shard)
                    items.append((key, self._pack(row)))
            ttl_s = self._files.config.classes[cls].ttl_s
            self._client.publish(items, FOREVER_S if ttl_s is None else ttl_s)
        return [Status.OK] * len(batch)

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Bury what is known here, and take back all hints. raises: OSError."""
        found = int((self.probe(kind, shard, digests)["length"] != NO_ROW).sum())
        self._files.delete(kind, shard, digests)
        self._client.retract([key_of(digest, kind, shard) for digest in digests])
        self._files.write_control()
        return found

    def scan(self, cursor: str | None) -> tuple[Sequence[ScanEntry], str | None]:
        """What this process knows, in pages of 1,000; the service cannot be listed."""
        return scan_page(self._files.index.rows(), cursor)

    def usage(self) -> dict[str, int]:
        """Counters of the files and, with prefix `location_`, of the service."""
        service = {f"location_{name}": value for name, value in self._client.usage().items()}
        return {**self._files.usage(), **service, **self.counts}

    def health(self) -> Literal["ok", "degraded", "down"]:
        """ "degraded" while a shard is left alone, "down" when all are."""
        usage = self._client.usage()
        if not usage["dead_shards"]:
            return "ok"
        return "down" if usage["dead_shards"] == usage["shards"] else "degraded"

    def sync(self) -> None:
        """raises: OSError."""
        self._files.sync()

    def maintain(self) -> None:
        """Collect what this process wrote, and let go of the others' places.

        So a drop elsewhere is seen here one `gc_interval_s` later at the latest. raises: OSError.
        """
        if self._files.config.auto_gc and not self._files.config.read_only:
            collect(self._files)
        for segment in self._files.segments.all():
            if segment.writer.hex() != self._files.writer_name:
                self._files.index.unlearn(segment)

    def close(self) -> None:
        """raises: OSError."""
        try:
            self._files.close()
        finally:
            self._client.close()

    def _row(self, kind: int, shard: int, digest: bytes) -> Any:
        return self._files.index.probe(kind, shard, [digest])[0]

    def _pack(self, row: Any) -> bytes:
        segment = self._files.segments.get(int(row["segment"]))
        return _LOCATION.pack(
            segment.writer,
            segment.number,
            int(row["page"]),
            int(row["length"]),
            int(row["flags"]),
            int(row["cls"]),
            int(row["depth"]),
            segment.bucket,
        )

    def _learn(
        self, kind: int, shard: int, digests: Sequence[bytes], hints: Sequence[bytes | None]
    ) -> None:
        """Hints as if they had been read in a log; what is no location is left out."""
        by_writer: dict[bytes, list[NDArray[Any]]] = {}
        for digest, hint in zip(digests, hints, strict=True):
            if hint is None or len(hint) != _LOCATION.size:
                continue
            writer, segment, page, length, marks, cls, depth, bucket = _LOCATION.unpack(hint)
            pair = np.zeros(2, dtype=fmt.ENTRY)
            pair["segment"], pair["cls"] = segment, cls
            # The second entry lets the reader derive the name of the file.
            pair["created_s"] = int(self._clock.wall()), bucket & 0xFFFFFFFF
            pair["flags"][1] = fmt.FLAG_SEGMENT
            entry = pair[:1]
            entry["key_lo"], entry["key_hi"] = fmt.key_columns([digest])
            entry["kind"], entry["shard"], entry["depth"] = kind, shard, depth
            entry["page"], entry["length"] = page, length
            entry["flags"] = fmt.FLAG_APPROXIMATE if marks & APPROXIMATE_BIT else 0
            entry["generation"] = marks & GENERATION_BITS
            by_writer.setdefault(writer, []).append(pair)
        batches = [(writer, np.concatenate(pairs)) for writer, pairs in by_writer.items()]
        if batches:
            self.counts["hints"] += sum(len(entries) // 2 for _, entries in batches)
            self._files.index.apply(batches)
