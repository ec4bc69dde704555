"""What waits in a write queue, who waits for it, and when there is no room for more."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.layout import KIND_CODES
from deepinfer_kvtier.memory.host import HostRecord
from deepinfer_kvtier.puts.encode import PLAIN, Encoding
from deepinfer_kvtier.quality import marks_of
from deepinfer_kvtier.store.encoded import EncodedRecord
from deepinfer_kvtier.tickets import Durability, PutTicket

_BLOCK: Final = KIND_CODES["block"]
SCRATCH_SHARE: Final = 0.75  # of the budget; beyond it records of short life are refused
CONTINUING_SHARE: Final = 0.9  # beyond it only what continues chains on disk is taken


@dataclass(slots=True, eq=False)
class WriteItem:
    """One record in the queue with everybody who waits for it.

    held:   the host record whose memory is written; pinned until the item leaves the queue.
    staged: False while the bytes still lie in the caller's buffer.
    source: where the caller's bytes lie, as long as they are not staged.
    encoded: done when the record is ready to be stored.
    owned:  the bytes lie in memory of the queue's own, for want of room in host memory.
    orphaned: a record before it in its chain could not be written: this one is not written either.
    """

    outgoing: EncodedRecord
    held: HostRecord | None
    staged: bool
    queued_at: float
    source: Sequence[memoryview] = ()
    owned: bool = False
    orphaned: bool = False
    encoding: Encoding = PLAIN
    encoded: Future[None] | None = None
    waiters: list[tuple[PutTicket, int, Durability]] = field(
        default_factory=list[tuple[PutTicket, int, Durability]]
    )

    @property
    def key(self) -> tuple[int, bytes]:
        return self.outgoing.kind, self.outgoing.digest

    def follows(self) -> tuple[int, bytes]:
        """Key of the block without which nobody would ask for this record."""
        out = self.outgoing
        return _BLOCK, out.digest if out.kind != _BLOCK else out.parent


Fates = dict[PutTicket, list[tuple[int, bool]]]


def queue_refusal(
    *, queued_bytes: int, limit: int, nbytes: int, cls: str, continues: bool
) -> str | None:
    """Why a record may not join the queue, or None.

    Above 75% scratch is refused, above 90% everything but continuations of chains that are on disk
    already, at 100% all.
    """
    filled = (queued_bytes + nbytes) / limit
    if filled > 1:
        return "queue_full"
    if filled > CONTINUING_SHARE and not continues:
        return "queue_full"
    if filled > SCRATCH_SHARE and cls == "scratch":
        return "class_pressure"
    return None


def differs(out: EncodedRecord, copy: NDArray[np.uint8]) -> bool:
    """Whether a copy taken from a source is not what was handed over and summed."""
    if not out.changed and out.content_checksum is not None:
        out.changed = checksum_of([copy.data]) != out.content_checksum
    return out.changed


def report_all(fates: Fates) -> None:
    """Tell every ticket the fates of its records."""
    for ticket, of_records in fates.items():
        ticket.report(of_records)


def host_record(out: EncodedRecord, data: NDArray[np.uint8]) -> HostRecord:
    """The record in host memory whose bytes are in `data`."""
    marks = marks_of(out.origin.approximate, out.origin.generation)
    return HostRecord(out.kind, out.digest, out.parent, out.depth, data, marks)


def add_waiter(item: WriteItem, ticket: PutTicket, index: int, want: Durability) -> None:
    """One more who wants to know what becomes of an item."""
    ticket.expect()
    item.waiters.append((ticket, index, want))
