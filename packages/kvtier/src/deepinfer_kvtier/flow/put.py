"""Which records are worth a place in the directory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import Records, Views, checksum_of, checksums_of, copy_views
from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.identity import check_digests
from deepinfer_kvtier.base.values import KIND_CODES, NO_ROW, quality_of
from deepinfer_kvtier.flow.encode import Encoding
from deepinfer_kvtier.flow.handles import Durability, PutTicket
from deepinfer_kvtier.flow.tiers import TierSet
from deepinfer_kvtier.flow.write_queue import QueueEntry, WriteQueue
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.log.format import EncodedRecord, Origin
from deepinfer_kvtier.log.index import aged

_BLOCK = KIND_CODES["block"]
_STATE = KIND_CODES["state"]
_MAX_DEPTH = (1 << 32) - 1  # the depth of a record is stored as u32
_HELD_BYTES = 16 << 20  # summed in about a millisecond: the writing thread may take five to yield


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One checked `put`. The first `confirmed` records may be stored, the others are refused.

    persist: whether they go below host memory.
    """

    origin: Origin
    encoding: Encoding
    digests: Sequence[bytes]
    source: Records
    parents: list[bytes]
    first_depth: int
    durability: Durability
    copy: bool
    confirmed: int
    persist: bool = True


def check_put(
    config: KVTierConfig,
    digests: Sequence[bytes],
    parents: Sequence[bytes],
    cls: str,
    durability: str,
    first_depth: int,
) -> None:
    """raises: ConfigError for what no put can mean."""
    if not 0 <= first_depth <= _MAX_DEPTH + 1 - len(digests):
        raise ConfigError(
            f"a chain has at most {_MAX_DEPTH:,} blocks: {len(digests)} records, the first of them"
            f" ending after {first_depth} blocks, lie outside"
        )
    check_digests(digests)
    check_digests(parents)
    if not isinstance(cls, str) or cls not in config.classes:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"unknown class {cls!r}: use one of {sorted(config.classes)}")
    if durability not in ("behind", "flushed", "fsync"):
        raise ConfigError(f"durability is behind, flushed or fsync, got {durability!r}")


def put_records(cache: TierSet, request: PutRequest) -> PutTicket:
    """Take what may be taken; the ticket says what was refused and why."""
    started = time.perf_counter()
    cache.leases.expire()
    ticket = PutTicket(_refusals_by_rule(cache, request))
    to_disk = cache.queue is not None and request.persist
    choice = _Choice()
    if to_disk and cache.queue is not None:
        _choose(cache, cache.queue, request, ticket, choice)
    else:
        accepted = [i for i, taken in enumerate(ticket.accepted) if taken]
        choice.host_only = dict.fromkeys(accepted, "not_persistent")
    queued = choice.queued
    to_copy = [*choice.host_only, *choice.refused, *(queued if request.copy else ())]
    held, fresh = _into_host(cache.host, request, sorted(to_copy))
    for record in fresh:
        if record.checksum is None and not (queued and request.copy):
            record.checksum = checksum_of([record.data.data])  # no write will take it
    _settle_in_host(request, ticket, choice.host_only, held)
    if cache.queue is not None and queued:
        cache.queue.add(_items(request, queued, held, ticket))
        for i in queued:
            held.pop(i, None)  # the queue gives these pins back
    if held:
        cache.host.unpin(held.values())
    ticket.all_expected()
    taken = sum(ticket.accepted)
    usual = {None: taken} if taken == len(ticket.reasons) else Counter(ticket.reasons)
    for reason, times in usual.items():
        cache.counts["put_records" if reason is None else f"refused_{reason}"] += times
    if request.origin.kind != _STATE:
        cache.counts["blocks_put"] += taken
        cache.counts["approximate_blocks"] += taken if request.origin.approximate else 0
    cache.published_in_host(fresh)
    nbytes = request.source.payload * taken
    cache.counts[f"put_bytes_{request.origin.cls}"] += nbytes
    cache.timings.observe("put", "host", nbytes, time.perf_counter() - started)
    return ticket


def _refusals_by_rule(cache: TierSet, request: PutRequest) -> list[str | None]:
    digests, confirmed = request.digests, request.confirmed
    if cache.config.read_only:
        return ["read_only"] * len(digests)
    reasons: list[str | None] = [None] * len(digests)
    if len(set(digests)) < len(digests):
        seen: set[bytes] = set()
        for i, digest in enumerate(digests):
            if digest in seen:
                reasons[i] = "duplicate_in_call"
            seen.add(digest)
    if confirmed < len(digests):
        reasons[confirmed:] = ["unconfirmed"] * (len(digests) - confirmed)
    return reasons


@dataclass(slots=True)
class _Choice:
    """Positions of the records of one put by what happens to them; the others are settled.

    queued:    they go to the next tier down.
    refused:   the queue did not want them; host memory may still keep them.
    host_only: they belong in host memory, with the reason why not further down.
    """

    queued: list[int] = field(default_factory=list[int])
    refused: list[int] = field(default_factory=list[int])
    host_only: dict[int, str] = field(default_factory=dict[int, str])


def _choose(
    cache: TierSet, queue: WriteQueue, request: PutRequest, ticket: PutTicket, choice: _Choice
) -> None:
    stored = _stored(cache, request)
    nbytes, origin = request.source.payload, request.origin
    wanted = [i for i, accepted in enumerate(ticket.accepted) if accepted]
    continues = False
    if stored.any():
        ticket.stored_now([i for i in wanted if stored[i]])
        continues = any(stored[i] for i in wanted)
        wanted = [i for i in wanted if not stored[i]]
    refusal = "disk_full" if cache.counts["disk_full"] else None
    if cache.counts["wrong_secret"]:
        refusal = "wrong_secret"
    if cache.disk is not None and origin.cls in cache.disk.full_classes:
        refusal = "class_full"
    names = [(origin.kind, request.digests[i]) for i in wanted]
    if refusal is None and cache.admits_all and queue.takes(names, nbytes * len(names)):
        choice.queued = wanted
        return
    waiting = 0
    continues |= _continues(cache, request)
    for i, name in zip(wanted, names, strict=True):
        if stored[:i].any():
            continues = True
        if not cache.admits(*name):
            choice.host_only[i] = "first_put"
        elif not queue.join(name, ticket, i, request.durability):
            why = refusal or queue.refusal(origin.cls, nbytes + waiting, continues)
            if why is None:
                choice.queued.append(i)
                waiting += nbytes
            else:
                ticket.refuse(i, why)
                choice.refused.append(i)


def _stored(cache: TierSet, request: PutRequest) -> NDArray[np.bool_]:
    """Which records lie in the directory already, well enough for what is promised of them."""
    origin, digests = request.origin, request.digests
    if cache.disk is None or not digests:
        return np.zeros(len(digests), dtype=np.bool_)
    rows = cache.disk.index.probe(origin.kind, origin.shard, digests)
    stored: NDArray[np.bool_] = rows["length"] != NO_ROW
    if not stored.any():
        return stored
    if request.durability != "behind":
        # Before "stored" is promised of what is there: has another process dropped it?
        with suppress(OSError):
            cache.disk.refresh()
        rows = cache.disk.index.probe(origin.kind, origin.shard, digests)
        stored = rows["length"] != NO_ROW
    stored &= ~cache.disk.index.in_grace(rows)
    known = [digest for digest, there in zip(digests, stored, strict=True) if there]
    if request.durability != "behind":
        # Elsewhere what is old may be collected before our mark of use is in the log.
        now_s, classes = int(cache.clock.wall()), cache.config.classes.values()
        stored &= ~aged(rows, now_s, classes)
    cache.disk.touch(origin.kind, origin.shard, known)
    return stored


def _continues(cache: TierSet, request: PutRequest) -> bool:
    """Whether the chain of these records has a prefix in the directory."""
    if cache.disk is None or not request.digests:
        return False
    origin = request.origin
    before = request.digests[0] if origin.kind == _STATE else request.parents[0]
    rows = cache.disk.index.probe(_BLOCK, origin.shard, [before])
    return bool(rows["length"][0] != NO_ROW)


def _into_host(
    host: HostTier, request: PutRequest, which: Sequence[int]
) -> tuple[dict[int, HostRecord], list[HostRecord]]:
    """Host records of these positions, each with one pin, copied there if they were not.

    returns: position -> record, without those that found no room; and the new ones.
    """
    if not which:  # the writing thread may hold the lock of host memory
        return {}, []
    origin = request.origin
    found = host.pin_all(origin.kind, [request.digests[i] for i in which])
    held = {i: record for i, record in zip(which, found, strict=True) if record is not None}
    missing = [i for i in which if i not in held]
    arrays = host.take_many(origin.kind, request.source.payload, len(missing))
    missing = missing[: len(arrays)]
    rows = request.source.rows
    if rows is not None and missing and missing[-1] - missing[0] == len(missing) - 1:
        host.fill(arrays, rows[missing[0] : missing[-1] + 1])
    else:
        for i, array in zip(missing, arrays, strict=True):
            copy_views(request.source.views(i), array)
    kind, marks = origin.kind, quality_of(origin.approximate, origin.generation)
    made = [
        HostRecord(
            kind,
            request.digests[i],
            request.parents[i],
            request.first_depth + i,
            array,
            marks,
        )
        for i, array in zip(missing, arrays, strict=True)
    ]
    published = host.publish_all(made)
    held.update(zip(missing, published, strict=True))
    return held, [new for new, known in zip(made, published, strict=True) if new is known]


def _settle_in_host(
    request: PutRequest,
    ticket: PutTicket,
    host_only: Mapping[int, str],
    held: Mapping[int, HostRecord],
) -> None:
    """Without a tier to go to, or for records that must not go there (yet)."""
    for i, why in host_only.items():
        if i not in held:
            ticket.refuse(i, "no_room")
        elif request.durability == "behind":
            ticket.stored_now([i])
        else:
            ticket.refuse(i, why)


def _items(
    request: PutRequest,
    which: Sequence[int],
    held: Mapping[int, HostRecord],
    ticket: PutTicket,
) -> list[QueueEntry]:
    """Records for the queue, with the ticket as their waiter where it has to wait."""
    now, waits = time.monotonic(), not (request.copy and request.durability == "behind")
    if waits:
        ticket.expect(len(which))
    else:
        ticket.stored_now(which)
    nbytes, copy, durability = request.source.payload, request.copy, request.durability
    origin, digests, parents = request.origin, request.digests, request.parents
    first, encoding = request.first_depth, request.encoding
    if copy:
        places = [_place(request, i, held.get(i)) for i in which]
        sums: Sequence[bytes | None] = [None] * len(which)
    else:
        # What the bytes are now is what is meant; whatever the caller makes of them later is not
        # stored.
        places = request.source.views_of(which)
        sums = checksums_of(places, held=_HELD_BYTES)
    items: list[QueueEntry] = []
    for i, views, content in zip(which, places, sums, strict=True):
        record = held.get(i)
        out = EncodedRecord(origin, digests[i], parents[i], first + i, views, nbytes)
        out.content_checksum, out.borrowed = content, not copy
        source: Views = [] if copy else views
        item = QueueEntry(out, record, copy, now, source, copy and record is None, False, encoding)
        if waits:
            item.waiters = [(ticket, i, durability)]
        items.append(item)
    return items


def _place(request: PutRequest, i: int, record: HostRecord | None) -> Views:
    """Where the copy of a record lies until it is written."""
    if record is not None:
        return [record.data.data]
    data: NDArray[Any] = np.empty(request.source.payload, dtype=np.uint8)
    copy_views(request.source.views(i), data)
    return [data.data]
