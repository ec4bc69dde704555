"""A record on its way to a tier, and what the directory writes about it besides its bytes."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.coding.compression import Packing, expand
from deepinfer_kvtier.coding.sealing import Sealer
from deepinfer_kvtier.puts.handover import Witness
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store import format as fmt


@dataclass(frozen=True, slots=True)
class Origin:
    """What all records of one put have in common.

    namespace:   `identity.namespace_tag` of the chain they belong to.
    approximate: computed from windows that bounded replay had rebuilt, `generation` times.
    part_sizes:  sizes of the parts whose sums are wanted; empty = none.
    packing:     compresses the bytes before anything else is done with them; None = as they are.
    sealer:      encrypts what is stored; None = in the clear.
    """

    kind: int
    shard: int
    cls: str
    cls_code: int
    fingerprint: bytes
    namespace: int
    approximate: bool = False
    generation: int = 0
    part_sizes: tuple[int, ...] = ()
    sealer: Sealer | None = None
    packing: Packing | None = None


@dataclass(slots=True, eq=False)
class Outgoing:
    """A record on its way to disk. `views` must not change until it is written.

    nbytes:   bytes in `views`: what is stored.
    checksum: xxh3_128 of the bytes, known before the record is handed to the writer.
    dropped:  somebody asked to forget the record while it was waiting; it must not be written.
    created_ms: time of a copy's last use, for records that are written again; None = now.
    extra: part sums or seal, 64 bytes or none, known with the checksum.
    sealed: the bytes in `views` are encrypted.
    witness: of a source that was handed over without a copy; `changed`: it did not fit any more.
    expanded_bytes: of a compressed record before it was compressed; 0 for others.
    plain_checksum: of the bytes before they were compressed or encrypted.
    """

    origin: Origin
    digest: bytes
    parent: bytes
    depth: int
    views: Sequence[memoryview]
    nbytes: int
    checksum: bytes | None = None
    dropped: bool = False
    created_ms: int | None = None
    extra: bytes = b""
    sealed: bool = False
    witness: Witness | None = None
    changed: bool = False
    plain_checksum: bytes | None = None
    expanded_bytes: int = 0

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

    @property
    def content_checksum(self) -> bytes | None:
        """Checksum of the bytes that were put."""
        return self.checksum if self.verbatim else self.plain_checksum

    def checked(self) -> bytes:
        """The checksum, once it is known."""
        assert self.checksum is not None
        return self.checksum


def take_checksums(batch: Sequence[Outgoing]) -> None:
    """Checksums of records as they were handed over: bytes changed later will not fit them.

    Records that are to be compressed or encrypted are so first: what is summed is what is stored.
    """
    for out in batch:
        if out.checksum is None and not out.dropped:
            if out.origin.packing is not None or out.origin.sealer is not None:
                _transform(out)
            if out.origin.part_sizes and out.verbatim:
                out.extra = fmt.pack_part_sums(_part_sums(out))
            out.checksum = checksum_of(out.views)


def _transform(out: Outgoing) -> None:
    packing, sealer = out.origin.packing, out.origin.sealer
    views = out.views
    if out.witness is not None or (packing is not None and len(views) != 1):
        # Of one moment: what is summed, compared and stored must be the same bytes.
        views = [memoryview(b"".join(views))]
    out.plain_checksum = checksum_of(views)
    if out.witness is not None:
        out.changed = not out.witness.fits(views)
    packed = None if packing is None else packing.compress(views[0])
    if packed is not None:
        out.expanded_bytes, out.nbytes = out.nbytes, len(packed)
        out.views = views = [memoryview(packed)]
    if sealer is not None:
        sealed, out.extra = sealer.seal(views, out.digest, out.kind, out.depth)
        out.views, out.sealed = [sealed], True


def expanded(out: Outgoing) -> Outgoing:
    """The record with the bytes that were put. raises: OSError where these cannot be had."""
    if not out.expanded_bytes:
        return out
    room = memoryview(bytearray(out.expanded_bytes))
    if out.sealed or expand(memoryview(b"".join(out.views)), [room]) is not Status.OK:
        raise OSError(errno.EIO, "a compressed record cannot be expanded")
    return replace(
        out, views=[room], nbytes=room.nbytes, expanded_bytes=0, checksum=checksum_of([room])
    )


def _part_sums(out: Outgoing) -> tuple[int, ...]:
    """xxh3_64 of each part; views may end anywhere, so several may make one part."""
    payload = out.views[0] if len(out.views) == 1 else memoryview(b"".join(out.views))
    sums: list[int] = []
    at = 0
    for size in out.origin.part_sizes:
        # 0 means that there is no sum.
        sums.append(xxhash.xxh3_64_intdigest(payload[at : at + size]))
        at += size
    return tuple(sums)


def entries_of(batch: Sequence[Outgoing], now_ms: int) -> NDArray[Any]:
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


def _by_origin(batch: Sequence[Outgoing]) -> Iterator[tuple[Origin, slice]]:
    """Runs of records of one put."""
    start = 0
    for origin, run in groupby(batch, key=attrgetter("origin")):
        end = start + len(list(run))
        yield origin, slice(start, end)
        start = end


def _created_ms(batch: Sequence[Outgoing], now_ms: int) -> NDArray[np.uint64]:
    times = [now_ms if record.created_ms is None else record.created_ms for record in batch]
    return np.array(times, dtype=np.uint64)


def trailers_of(batch: Sequence[Outgoing], now_ms: int, sequence: int) -> bytearray:
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
