"""From the bytes that were put to those that are stored: checksum, part sums, compression, seal.

A thread does it ahead of the writes. Not an executor: handing work to one takes locks that its
thread may hold while it waits for the interpreter, and the first call waits for that thread to
start. A producer does not wait here.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

import xxhash

from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.flow.compression import Packing, expand
from deepinfer_kvtier.flow.encryption import Sealer
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord


@dataclass(frozen=True, slots=True)
class Encoding:
    """What is done with the bytes of all records of one put before they are stored.

    part_sizes: sizes of the parts whose sums are wanted; empty = none.
    packing:    compresses the bytes before anything else is done with them; None = as they are.
    sealer:     encrypts what is stored; None = in the clear.
    """

    part_sizes: tuple[int, ...] = ()
    packing: Packing | None = None
    sealer: Sealer | None = None

    @property
    def is_plain(self) -> bool:
        """Nothing but a checksum is needed."""
        return not self.part_sizes and self.packing is None and self.sealer is None


PLAIN = Encoding()


def encode(record: EncodedRecord, encoding: Encoding) -> None:
    """Make a record ready to be stored. What is summed is what is stored.

    A borrowed record that is more than its bytes is first copied: what is summed, compared with
    what was handed over, and stored must be the same bytes.
    """
    if record.dropped:
        return
    if encoding.is_plain:
        if record.checksum is None:
            record.checksum = record.content_checksum or checksum_of(record.views)
            record.content_checksum = record.checksum
        return
    views = record.views
    if record.borrowed or (encoding.packing is not None and len(views) != 1):
        views = [memoryview(b"".join(views))]
    content = checksum_of(views)
    if record.content_checksum not in (None, content):
        record.changed = True
        return
    record.views, record.borrowed, record.content_checksum = views, False, content
    packed = None if encoding.packing is None else encoding.packing.compress(views[0])
    if packed is not None:
        record.expanded_bytes, record.nbytes = record.nbytes, len(packed)
        record.views = views = [memoryview(packed)]
    if encoding.sealer is not None:
        sealed, record.extra = encoding.sealer.seal(views, record.digest, record.kind, record.depth)
        record.views, record.sealed = [sealed], True
    elif encoding.part_sizes and packed is None:
        record.extra = fmt.pack_part_sums(_part_sums(views, encoding.part_sizes))
    record.checksum = content if record.verbatim else checksum_of(record.views)


def expanded(record: EncodedRecord) -> EncodedRecord:
    """The record with the bytes that were put. raises: OSError where these cannot be had."""
    if not record.expanded_bytes:
        return record
    room = memoryview(bytearray(record.expanded_bytes))
    if record.sealed or expand(memoryview(b"".join(record.views)), [room]) is not Status.OK:
        raise OSError(errno.EIO, "a compressed record cannot be expanded")
    checksum = checksum_of([room])
    return replace(
        record,
        views=[room],
        nbytes=room.nbytes,
        expanded_bytes=0,
        checksum=checksum,
        content_checksum=checksum,
    )


def _part_sums(views: Sequence[memoryview], part_sizes: Sequence[int]) -> tuple[int, ...]:
    """xxh3_64 of each part; views may end anywhere, so several may make one part."""
    payload = views[0] if len(views) == 1 else memoryview(b"".join(views))
    sums: list[int] = []
    at = 0
    for size in part_sizes:
        # 0 means that there is no sum.
        sums.append(xxhash.xxh3_64_intdigest(payload[at : at + size]))
        at += size
    return tuple(sums)


_Work = Sequence[tuple[EncodedRecord, Encoding]]
_Job = tuple["Future[None]", _Work]


class Encoder:
    """Encodes records in the order of `submit`."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: _Work) -> Future[None]:
        """Done when the records are ready to be stored. Never blocks."""
        future: Future[None] = Future()
        self._jobs.put((future, work))
        return future

    def close(self) -> None:
        """Cancel what has not begun and let the thread end."""
        try:
            while job := self._jobs.get_nowait():
                job[0].cancel()
        except Empty:
            pass
        self._jobs.put(None)

    def _run(self) -> None:
        while job := self._jobs.get():
            future, work = job
            if future.set_running_or_notify_cancel():
                try:
                    for record, encoding in work:
                        encode(record, encoding)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del job, future, work  # nothing of a caller's is held until the next one comes
