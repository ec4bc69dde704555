"""What happens to records that are put: host memory first, then the queue to the directory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.buffers import Views
from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.host import HostRecord
from deepinfer_kvtier.identity import check_digests
from deepinfer_kvtier.layout import KIND_CODES
from deepinfer_kvtier.queue import WriteItem, WriteQueue, copy_views
from deepinfer_kvtier.table import NO_ROW
from deepinfer_kvtier.tickets import Durability, PutTicket
from deepinfer_kvtier.tierset import TierSet
from deepinfer_kvtier.writer import Outgoing

_STATE = KIND_CODES["state"]


@dataclass(frozen=True, slots=True)
class PutRequest:
    """One checked `put`. The first `confirmed` records may be stored, the others are refused."""

    kind: int
    shard: int
    fingerprint: bytes
    namespace: int
    digests: Sequence[bytes]
    views: list[Views]
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
) -> None:
    """raises: ConfigError for what no put can mean."""
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
    rows = None
    if cache.directory is not None and request.digests:
        rows = cache.directory.index.probe(request.kind, request.shard, request.digests)
    fresh: list[HostRecord] = []
    items: list[WriteItem] = []
    continues = False
    for i in range(len(request.digests)):
        if not ticket.accepted[i]:
            continue
        if to_disk and rows is not None and int(rows["length"][i]) != NO_ROW:
            continues = True
            ticket.stored_now(i)
        elif not to_disk or cache.queue is None:
            _put_in_host(cache, request, i, ticket, fresh, "not_persistent")
        elif not cache.admits(request.kind, request.digests[i]):
            _put_in_host(cache, request, i, ticket, fresh, "first_put")
        else:
            item = _put_in_queue(cache, cache.queue, request, i, ticket, fresh, continues, items)
            if item is not None:
                items.append(item)
    if cache.queue is not None and items:
        cache.queue.add(items)
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


def _put_in_host(
    cache: TierSet,
    request: PutRequest,
    i: int,
    ticket: PutTicket,
    fresh: list[HostRecord],
    why: str,
) -> None:
    """Without a directory to go to, or for records that must not go there (yet)."""
    record = _host_record(cache, request, i, fresh)
    if record is None:
        ticket.refuse(i, "no_room")
        return
    cache.host.unpin([record])
    if request.durability == "behind":
        ticket.stored_now(i)
    else:
        ticket.refuse(i, why)


def _put_in_queue(
    cache: TierSet,
    queue: WriteQueue,
    request: PutRequest,
    i: int,
    ticket: PutTicket,
    fresh: list[HostRecord],
    continues: bool,
    items: list[WriteItem],
) -> WriteItem | None:
    digest, views = request.digests[i], request.views[i]
    if queue.join((request.kind, digest), ticket, i, request.durability):
        return None
    nbytes = sum(view.nbytes for view in views)
    waiting = sum(item.outgoing.nbytes for item in items)
    refusal = "disk_full" if cache.counts["disk_full"] else None
    if cache.directory is not None and request.cls in cache.directory.full_classes:
        refusal = "class_full"
    refusal = refusal or queue.refusal(request.cls, nbytes + waiting, continues)
    if refusal is not None:
        ticket.refuse(i, refusal)
        record = _host_record(cache, request, i, fresh)
        if record is not None:
            cache.host.unpin([record])
        return None
    held = None
    if request.copy:
        held = _host_record(cache, request, i, fresh)
        if held is None:
            data: NDArray[Any] = np.empty(nbytes, dtype=np.uint8)
            copy_views(views, data)
            views = [data.data]
        else:
            views = [held.data.data]
    item = WriteItem(
        Outgoing(
            kind=request.kind,
            shard=request.shard,
            cls=request.cls,
            cls_code=cache.config.classes[request.cls].code,
            digest=digest,
            parent=request.parents[i],
            depth=request.first_depth + i,
            fingerprint=request.fingerprint,
            namespace=request.namespace,
            views=views,
            nbytes=nbytes,
            approximate=request.approximate,
            generation=request.generation,
        ),
        held=held,
        staged=request.copy,
        queued_at=time.monotonic(),
        owned=request.copy and held is None,
    )
    if request.copy and request.durability == "behind":
        ticket.stored_now(i)
    else:
        ticket.expect()
        item.waiters.append((ticket, i, request.durability))
    return item


def _host_record(
    cache: TierSet, request: PutRequest, i: int, fresh: list[HostRecord]
) -> HostRecord | None:
    """The record in host memory, copied there if it was not, with one pin; None without room."""
    digest = request.digests[i]
    existing = cache.host.pin(request.kind, digest)
    if existing is not None:
        return existing
    views = request.views[i]
    data = cache.host.take(request.kind, sum(view.nbytes for view in views))
    if data is None:
        return None
    copy_views(views, data)
    record = HostRecord(
        request.kind,
        digest,
        request.parents[i],
        request.first_depth + i,
        data,
        request.approximate,
        request.generation,
    )
    published = cache.host.publish(record)
    if published is record:
        fresh.append(record)
    return published
