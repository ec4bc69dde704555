"""A record as the log stores it: its bytes, and what is written about it besides them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.store import format as fmt


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of one put have in common.

    namespace:   `identity.namespace_tag` of the chain they belong to.
    approximate: computed from windows that bounded replay had rebuilt, `generation` times.
    """

    kind: int
    shard: int
    cls: str
    cls_code: int
    fingerprint: bytes
    namespace: int
    approximate: bool = False
    generation: int = 0


@dataclass(slots=True, eq=False)
class EncodedRecord:
    """A record on its way to a tier. `views` must not change until it is written.

    nbytes:   bytes in `views`: what is stored.
    checksum: xxh3_128 of the bytes, known before the record is handed to the writer.
    content_checksum: of the bytes that were put, before they were compressed or encrypted.
    dropped:  a caller asked to forget the record while it was waiting; it must not be written.
    created_ms: time of a copy's last use, for records that are written again; None = now.
    extra: part sums or seal, 64 bytes or none, known with the checksum.
    sealed: the bytes in `views` are encrypted.
    expanded_bytes: of a compressed record before it was compressed; 0 for others.
    borrowed: `views` are memory of the caller, who might write to it in spite of what was agreed.
    changed:  the caller did: the record must not become visible.
    """

    origin: Origin
    digest: bytes
    parent: bytes
    depth: int
    views: Sequence[memoryview]
    nbytes: int
    checksum: bytes | None = None
    content_checksum: bytes | None = None
    dropped: bool = False
    created_ms: int | None = None
    extra: bytes = b""
    sealed: bool = False
    expanded_bytes: int = 0
    borrowed: bool = False
    changed: bool = False

    @property
    def kind(self) -> int:
        """Code of the kind: 0 block, 1 state."""
        return self.origin.kind

    @property
    def shard(self) -> int:
        """Index of the shard."""
        return self.origin.shard

    @property
    def cls(self) -> str:
        """Retention class."""
        return self.origin.cls

    @property
    def approximate(self) -> bool:
        """Computed from windows that bounded replay had rebuilt."""
        return self.origin.approximate

    @property
    def generation(self) -> int:
        """How many bounded replays lie behind it."""
        return self.origin.generation

    @property
    def verbatim(self) -> bool:
        """The stored bytes are those that were put."""
        return not (self.sealed or self.expanded_bytes)

    @property
    def content_bytes(self) -> int:
        """Bytes that were put."""
        return self.expanded_bytes or self.nbytes

    def checked(self) -> bytes:
        """The checksum, once it is known."""
        assert self.checksum is not None
        return self.checksum

    def is_as_handed_over(self) -> bool:
        """Whether the bytes are still those that were summed; `changed` remembers that they are
        not."""
        if self.borrowed and not self.changed:
            self.changed = checksum_of(self.views) != self.checksum
        return not self.changed


def entries_of(batch: Sequence[EncodedRecord], now_ms: int) -> NDArray[Any]:
    """Index entries of records, all but segment and page."""
    entries = np.zeros(len(batch), dtype=fmt.ENTRY)
    if not len(batch):
        return entries
    entries["key_lo"], entries["key_hi"] = fmt.key_columns([record.digest for record in batch])
    entries["parent"] = np.frombuffer(b"".join([r.parent[:8] for r in batch]), dtype="<u8")
    entries["length"] = [record.nbytes for record in batch]
    entries["created_s"], entries["created_ms"] = divmod(_created_ms(batch, now_ms), 1000)
    entries["depth"] = [record.depth for record in batch]
    sums = b"".join([record.checked()[-8:] for record in batch])
    entries["sum"] = np.frombuffer(sums, dtype="<u8")
    for origin, some in _by_origin(batch):
        part = entries[some]
        part["kind"], part["shard"] = origin.kind, origin.shard
        part["cls"], part["namespace"] = origin.cls_code, origin.namespace
        part["flags"] = fmt.FLAG_APPROXIMATE if origin.approximate else 0
        part["generation"] = origin.generation
    return entries


def _by_origin(batch: Sequence[EncodedRecord]) -> Iterator[tuple[Origin, slice]]:
    """Runs of records of one put."""
    start = 0
    for origin, run in groupby(batch, key=attrgetter("origin")):
        end = start + len(list(run))
        yield origin, slice(start, end)
        start = end


def _created_ms(batch: Sequence[EncodedRecord], now_ms: int) -> NDArray[np.uint64]:
    times = [now_ms if record.created_ms is None else record.created_ms for record in batch]
    return np.array(times, dtype=np.uint64)


def trailers_of(batch: Sequence[EncodedRecord], now_ms: int, sequence: int) -> bytearray:
    """Trailers of records one behind the other; `sequence` is the number before the first."""
    trailers = np.zeros(len(batch), dtype=fmt.TRAILER)
    if not len(batch):
        return bytearray()
    trailers["magic"] = fmt.TRAILER_WORD
    trailers["format"] = fmt.FORMAT_VERSION
    trailers["length"] = [record.nbytes for record in batch]
    trailers["depth"] = [record.depth for record in batch]
    for name, column in (
        ("digest", [record.digest for record in batch]),
        ("parent", [record.parent[:16] for record in batch]),
        ("checksum", [record.checked() for record in batch]),
    ):
        flat: NDArray[Any] = np.frombuffer(b"".join(column), dtype=np.uint8)
        trailers[name] = flat.reshape(len(batch), -1)
    trailers["created_ms"] = _created_ms(batch, now_ms)
    trailers["sequence"] = np.arange(sequence + 1, sequence + 1 + len(batch))
    for origin, some in _by_origin(batch):
        part = trailers[some]
        part["kind"], part["shard"] = origin.kind, origin.shard
        part["cls"], part["namespace"] = origin.cls_code, origin.namespace
        part["flags"] = fmt.FLAG_APPROXIMATE if origin.approximate else 0
        part["generation"] = origin.generation
        part["fingerprint"] = np.frombuffer(origin.fingerprint[:8], dtype=np.uint8)
    for i, record in enumerate(batch):
        if record.sealed:
            trailers["flags"][i] |= fmt.FLAG_SEALED
        if record.expanded_bytes:
            trailers["format"][i] = fmt.COMPRESSED_FORMAT
            trailers["flags"][i] |= fmt.FLAG_COMPRESSED
            trailers["expanded"][i] = record.expanded_bytes
        if record.extra:
            trailers["extra"][i] = np.frombuffer(record.extra, dtype=np.uint8)
    raw = bytearray(trailers.tobytes())
    fmt.seal_trailers(raw)
    return raw
