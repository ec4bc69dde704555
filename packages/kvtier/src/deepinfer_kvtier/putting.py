"""What happens to records that are put: host memory first, then the queue to the directory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.buffers import Records
from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.host import HostRecord, HostTier
from deepinfer_kvtier.identity import check_digests
from deepinfer_kvtier.index import aged
from deepinfer_kvtier.layout import KIND_CODES
from deepinfer_kvtier.queue import WriteItem, WriteQueue, copy_views
from deepinfer_kvtier.sealing import Sealer
from deepinfer_kvtier.table import NO_ROW
from deepinfer_kvtier.tickets import Durability, PutTicket
from deepinfer_kvtier.tierset import TierSet
from deepinfer_kvtier.writer import Outgoing

_STATE = KIND_CODES["state"]
_MAX_DEPTH = (1 << 32) - 1  # the depth of a record is stored as u32


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One checked `put`. The first `confirmed` records may be stored, the others are refused."""

    kind: int
    shard: int
    fingerprint: bytes
    namespace: int
    digests: Sequence[bytes]
    source: Records
    part_sizes: tuple[int, ...]
    sealer: Sealer | None
    parents: list[bytes]
    first_depth: int
    cls: str
    durability: Durability
    copy: bool
    confirmed: int
    approximate: bool
    generation: int


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
    if cls not in config.classes:
        raise ConfigError(f"unknown class {cls!r}: use one of {sorted(config.classes)}")
    if durability not in ("behind", "flushed", "fsync"):
        raise ConfigError(f"durability is behind, flushed or fsync, got {durability!r}")


def put_records(cache: TierSet, request: PutRequest) -> PutTicket:
    """Take what may be taken; the ticket says what was refused and why."""
    cache.leases.expire()
    ticket = PutTicket(_refusals_by_rule(cache, request))
    to_disk = cache.queue is not None and (request.kind != _STATE or cache.config.persist_state)
    choice = _Choice()
    if to_disk and cache.queue is not None:
        _choose(cache, cache.queue, request, ticket, choice)
    else:
        accepted = [i for i, taken in enumerate(ticket.accepted) if taken]
        choice.host_only = dict.fromkeys(accepted, "not_persistent")
    queued = choice.queued
    to_copy = [*choice.host_only, *choice.refused, *(queued if request.copy else ())]
    held, fresh = _into_host(cache.host, request, sorted(to_copy))
    _settle_in_host(request, ticket, choice.host_only, held)
    if cache.queue is not None and queued:
        now = time.monotonic()
        items = [_item(cache, request, i, held.get(i), ticket, now) for i in queued]
        cache.queue.add(items)
        for i in queued:
            held.pop(i, None)  # the queue gives these pins back
    if held:
        cache.host.unpin(held.values())
    ticket.all_expected()
    for reason in ticket.reasons:
        cache.counts["put_records" if reason is None else f"refused_{reason}"] += 1
    if request.kind != _STATE:
        taken = sum(ticket.accepted)
        cache.counts["blocks_put"] += taken
        cache.counts["approximate_blocks"] += taken if request.approximate else 0
    cache.published_in_host(fresh)
    return ticket


def _refusals_by_rule(cache: TierSet, request: PutRequest) -> list[str | None]:
    reasons: list[str | None] = []
    seen: set[bytes] = set()
    for i, digest in enumerate(request.digests):
        reason = None
        if cache.config.read_only:
            reason = "read_only"
        elif i >= request.confirmed:
            reason = "unconfirmed"
        elif digest in seen:
            reason = "duplicate_in_call"
        seen.add(digest)
        reasons.append(reason)
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
    stored = np.zeros(len(request.digests), dtype=np.bool_)
    if cache.directory is not None and request.digests:
        rows = cache.directory.index.probe(request.kind, request.shard, request.digests)
        if request.durability != "behind" and (rows["length"] != NO_ROW).any():
            # Before "stored" is promised of what is there: has another process dropped it?
            with suppress(OSError):
                cache.directory.refresh()
            rows = cache.directory.index.probe(request.kind, request.shard, request.digests)
        stored = rows["length"] != NO_ROW
        known = [digest for digest, there in zip(request.digests, stored, strict=True) if there]
        if request.durability != "behind":
            # Elsewhere what is old may be collected before our mark of use is in the log.
            now_s, classes = int(cache.clock.wall()), cache.config.classes.values()
            stored &= ~aged(rows, now_s, classes)
        cache.directory.touch(request.kind, request.shard, known)
    there = stored.tolist()
    nbytes, waiting, continues = request.source.payload, 0, False
    for i, (digest, accepted) in enumerate(zip(request.digests, ticket.accepted, strict=True)):
        if not accepted:
            continue
        if there[i]:
            continues = True
            ticket.stored_now(i)
        elif not cache.admits(request.kind, digest):
            choice.host_only[i] = "first_put"
        elif not queue.join((request.kind, digest), ticket, i, request.durability):
            refusal = "disk_full" if cache.counts["disk_full"] else None
            if cache.directory is not None and request.cls in cache.directory.full_classes:
                refusal = "class_full"
            refusal = refusal or queue.refusal(request.cls, nbytes + waiting, continues)
            if refusal is None:
                choice.queued.append(i)
                waiting += nbytes
            else:
                ticket.refuse(i, refusal)
                choice.refused.append(i)


def _into_host(
    host: HostTier, request: PutRequest, which: Sequence[int]
) -> tuple[dict[int, HostRecord], list[HostRecord]]:
    """Host records of these positions, each with one pin, copied there if they were not.

    returns: position -> record, without those that found no room; and the new ones.
    """
    if not which:  # the writing thread may hold the lock of host memory
        return {}, []
    found = host.pin_all(request.kind, [request.digests[i] for i in which])
    held = {i: record for i, record in zip(which, found, strict=True) if record is not None}
    missing = [i for i in which if i not in held]
    arrays = host.take_many(request.kind, request.source.payload, len(missing))
    missing = missing[: len(arrays)]
    rows = request.source.rows
    if rows is not None and missing and missing[-1] - missing[0] == len(missing) - 1:
        host.fill(arrays, rows[missing[0] : missing[-1] + 1])
    else:
        for i, array in zip(missing, arrays, strict=True):
            copy_views(request.source.views(i), array)
    made = [
        HostRecord(
            request.kind,
            request.digests[i],
            request.parents[i],
            request.first_depth + i,
            array,
            request.approximate,
            request.generation,
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
            ticket.stored_now(i)
        else:
            ticket.refuse(i, why)


def _item(
    cache: TierSet,
    request: PutRequest,
    i: int,
    held: HostRecord | None,
    ticket: PutTicket,
    now: float,
) -> WriteItem:
    nbytes = request.source.payload
    if held is not None:
        views = [held.data.data]
    else:
        views = request.source.views(i)
        if request.copy:
            data: NDArray[Any] = np.empty(nbytes, dtype=np.uint8)
            copy_views(views, data)
            views = [data.data]
    item = WriteItem(
        Outgoing(
            kind=request.kind,
            shard=request.shard,
            cls=request.cls,
            cls_code=cache.config.classes[request.cls].code,
            digest=request.digests[i],
            parent=request.parents[i],
            depth=request.first_depth + i,
            fingerprint=request.fingerprint,
            namespace=request.namespace,
            views=views,
            nbytes=nbytes,
            approximate=request.approximate,
            generation=request.generation,
            part_sizes=request.part_sizes,
            sealer=request.sealer,
        ),
        held=held,
        staged=request.copy,
        queued_at=now,
        source=() if request.copy else views,
        owned=request.copy and held is None,
    )
    if request.copy and request.durability == "behind":
        ticket.stored_now(i)
    else:
        ticket.expect()
        item.waiters.append((ticket, i, request.durability))
    return item
