"""A record on its way to a tier, and what the directory writes about it besides its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.host import checksum_of
from deepinfer_kvtier.sealing import Sealer


@dataclass(slots=True, eq=False)
class Outgoing:
    """A record on its way to disk. `views` must not change until it is written.

    namespace: `identity.namespace_tag` of the chain it belongs to.
    created_ms: time of a copy's last use, for records that are written again; None = now.
    part_sizes: sizes of the parts whose sums are wanted; empty = none.
    sealer: encrypts the bytes before anything else is done with them; None = stored in the clear.
    extra: part sums or seal, 64 bytes or none, known with the checksum.
    sealed: the bytes in `views` are encrypted.
    checksum: xxh3_128 of the bytes, known before the record is handed to the writer.
    dropped:  somebody asked to forget the record while it was waiting; it must not be written.
    """

    kind: int
    shard: int
    cls: str
    cls_code: int
    digest: bytes
    parent: bytes
    depth: int
    fingerprint: bytes
    namespace: int
    views: Sequence[memoryview]
    nbytes: int
    approximate: bool
    generation: int
    checksum: bytes | None = None
    dropped: bool = False
    created_ms: int | None = None
    part_sizes: tuple[int, ...] = ()
    sealer: Sealer | None = None
    extra: bytes = b""
    sealed: bool = False

    def checked(self) -> bytes:
        """The checksum, once it is known."""
        assert self.checksum is not None
        return self.checksum


def take_checksums(batch: Sequence[Outgoing]) -> None:
    """Checksums of records as they were handed over: bytes changed later will not fit them."""
    for out in batch:
        if out.checksum is None and not out.dropped:
            if out.sealer is not None:
                sealed, out.extra = out.sealer.seal(out.views, out.digest, out.kind, out.depth)
                out.views, out.sealed = [sealed], True
            elif out.part_sizes:
                out.extra = fmt.pack_part_sums(_part_sums(out))
            out.checksum = checksum_of(out.views)


def _part_sums(out: Outgoing) -> tuple[int, ...]:
    """xxh3_64 of each part; views may end anywhere, so several may make one part."""
    payload = out.views[0] if len(out.views) == 1 else memoryview(b"".join(out.views))
    sums: list[int] = []
    at = 0
    for size in out.part_sizes:
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
    entries["kind"] = [record.kind for record in batch]
    entries["cls"] = [record.cls_code for record in batch]
    entries["flags"] = [fmt.FLAG_APPROXIMATE if record.approximate else 0 for record in batch]
    entries["created_s"], entries["created_ms"] = divmod(_created_ms(batch, now_ms), 1000)
    entries["depth"] = [record.depth for record in batch]
    sums = b"".join([record.checked()[-8:] for record in batch])
    entries["sum"] = np.frombuffer(sums, dtype="<u8")
    entries["shard"] = [record.shard for record in batch]
    entries["generation"] = [record.generation for record in batch]
    entries["namespace"] = [record.namespace for record in batch]
    return entries


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
    trailers["kind"] = [record.kind for record in batch]
    trailers["cls"] = [record.cls_code for record in batch]
    trailers["flags"] = [
        record.approximate * fmt.FLAG_APPROXIMATE | record.sealed * fmt.FLAG_SEALED
        for record in batch
    ]
    trailers["length"] = [record.nbytes for record in batch]
    trailers["depth"] = [record.depth for record in batch]
    for name, column in (
        ("digest", [record.digest for record in batch]),
        ("parent", [record.parent[:16] for record in batch]),
        ("fingerprint", [record.fingerprint[:8] for record in batch]),
        ("checksum", [record.checked() for record in batch]),
    ):
        flat: NDArray[Any] = np.frombuffer(b"".join(column), dtype=np.uint8)
        trailers[name] = flat.reshape(len(batch), -1)
    trailers["created_ms"] = _created_ms(batch, now_ms)
    trailers["sequence"] = np.arange(sequence + 1, sequence + 1 + len(batch))
    trailers["generation"] = [record.generation for record in batch]
    trailers["shard"] = [record.shard for record in batch]
    trailers["namespace"] = [record.namespace for record in batch]
    for trailer, record in zip(trailers, batch, strict=True):
        if record.extra:
            trailer["extra"] = np.frombuffer(record.extra, dtype=np.uint8)
    raw = bytearray(trailers.tobytes())
    fmt.seal_trailers(raw)
    return raw
