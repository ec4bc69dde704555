"""Names and bytes of the objects of an object-storage tier."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.remote.tiers.objects import Unavailable
from deepinfer_kvtier.remote.tiers.slots import pack_slot

MAX_READ_BYTES = 32 << 20


def segment_path(writer: str, number: int) -> str:
    """Object name of a segment."""
    return f"seg/{writer}/{number}.kvs"


def index_path(writer: str, number: int) -> str:
    """Object name of an index."""
    return f"idx/{writer}/{number}.kvx"


def pack_segment(
    records: Sequence[EncodedRecord],
    store: bytes,
    writer: str,
    number: int,
    *,
    now_ms: int,
    sequence: int,
) -> tuple[list[bytes | memoryview], NDArray[Any], int]:
    """Pieces of a segment of records of one class, their index entries, and its size in bytes."""
    header = fmt.SegmentHeader(
        records[0].origin.cls_code, now_ms // 1000, number, store, bytes.fromhex(writer)
    )
    body: list[bytes | memoryview] = [header.pack()]
    entries = np.zeros(len(records), dtype=fmt.ENTRY)
    offset = fmt.PAGE
    for i, (entry, record) in enumerate(zip(entries, records, strict=True), start=1):
        slot = pack_slot(record, now_ms=now_ms, sequence=sequence + i)
        body.extend(slot)
        _fill(entry, record, number, offset, now_ms)
        offset += sum(part.nbytes for part in slot)
    return body, entries, offset


def new_format() -> bytes:
    """FORMAT.json of a new prefix."""
    store = secrets.token_hex(16)
    content = {"format": fmt.FORMAT_VERSION, "store": store, "check": _check(store)}
    return json.dumps(content).encode()


def read_groups(rows: NDArray[Any], wanted: Sequence[Wanted]) -> list[tuple[int, list[int]]]:
    """Records that one request can bring: same object, in order, at most 32 MiB."""
    lengths, segments, pages = (rows[name].tolist() for name in ("length", "segment", "page"))
    # A record is shorter where it is compressed.
    there = [i for i, want in enumerate(wanted) if lengths[i] <= want.nbytes]
    there.sort(key=lambda i: (segments[i], pages[i]))
    groups: list[tuple[int, list[int]]] = []
    size = 0
    for i in there:
        slot = fmt.slot_bytes(lengths[i])
        if groups and groups[-1][0] == segments[i] and size + slot <= MAX_READ_BYTES:
            groups[-1][1].append(i)
            size += slot
        else:
            groups.append((segments[i], [i]))
            size = slot
    return groups


def _fill(entry: Any, record: EncodedRecord, number: int, offset: int, now_ms: int) -> None:
    (lo,), (hi,) = fmt.key_columns([record.digest])
    entry["key_lo"], entry["key_hi"] = lo, hi
    entry["parent"] = int.from_bytes(record.parent[:8], "little")
    entry["segment"], entry["page"] = number, offset // fmt.PAGE
    entry["length"] = record.nbytes
    origin = record.origin
    entry["kind"], entry["cls"], entry["shard"] = origin.kind, origin.cls_code, origin.shard
    entry["flags"] = fmt.FLAG_APPROXIMATE if origin.approximate else 0
    entry["created_s"], entry["created_ms"] = now_ms // 1000, now_ms % 1000
    entry["depth"] = record.depth
    entry["generation"] = origin.generation
    entry["namespace"] = origin.namespace


def _check(store: str) -> str:
    return xxhash.xxh3_64_hexdigest(store.encode())


def parse_format(raw: bytes) -> bytes:
    """The store id (16 bytes) in FORMAT.json. raises: Unavailable."""
    try:
        content: Any = json.loads(raw)
        store = bytes.fromhex(content["store"])
        good = content["format"] == fmt.FORMAT_VERSION and len(store) == 16
        good &= content["check"] == _check(str(content["store"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        good, store = False, b""
    if not good:
        raise Unavailable("the prefix holds something else, or another format version")
    return store
