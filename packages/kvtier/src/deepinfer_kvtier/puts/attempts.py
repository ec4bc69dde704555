"""Writing a batch to a tier: again after a pause where it failed, each chain for itself.

The first attempt is the whole batch. After a failure each chain goes by itself: chains that share
nothing do not fail together, and within a chain nothing is written before what it builds on.
"""

from __future__ import annotations

import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from deepinfer_kvtier.breaker import Breaker
from deepinfer_kvtier.puts.queued import WriteItem
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store.encoded import EncodedRecord

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 5
BACKOFF_FIRST_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_FINAL = (Status.OK, Status.SKIPPED)


class WriteTarget(Protocol):
    """What a queue writes to: the local directory, or a further tier behind its guard.

    validates: it compares borrowed records with their checksums before they become visible.
    """

    validates: bool

    @property
    def breaker(self) -> Breaker: ...

    def put_from(self, batch: Sequence[EncodedRecord]) -> Sequence[Status]: ...

    def write_control(self) -> None: ...

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int: ...

    def sync(self) -> None: ...

    def sync_in_s(self) -> float: ...


@dataclass(slots=True)
class Written:
    """What became of a batch: the `id` of items now stored, and the items that were given up."""

    stored: set[int] = field(default_factory=set[int])
    failed: list[WriteItem] = field(default_factory=list[WriteItem])


class Attempts:
    """How one queue's thread writes to its tier.

    on_stored: called with what was written.
    timed:     called with the bytes and the seconds of every write.
    maintain:  called when the tier is full.
    pause:     waits so many seconds; True when the cache gives up meanwhile.
    """

    def __init__(
        self,
        target: WriteTarget,
        *,
        counts: Counter[str],
        on_stored: Callable[[Sequence[EncodedRecord]], None],
        timed: Callable[[int, float], None],
        maintain: Callable[[], None],
        pause: Callable[[float], bool],
    ) -> None:
        self._target = target
        self._counts = counts
        self._on_stored = on_stored
        self._timed = timed
        self._maintain = maintain
        self._pause = pause

    def write(self, items: Sequence[WriteItem]) -> Written:
        """Write `items`, parents first."""
        result = Written()
        left, groups = list(items), [list(items)]
        backoff = BACKOFF_FIRST_S
        for attempt in range(MAX_ATTEMPTS):
            if not left:
                return result
            if self._target.breaker.is_open:
                self._counts["breaker_drops"] += len(left)
                break
            full = False
            remaining: list[WriteItem] = []
            for group in groups:
                failed, group_full = self._write_group(group, result)
                remaining += failed
                full |= group_full
            if not remaining:
                self._target.breaker.success()
                return result
            left, groups = remaining, chains_of(remaining)
            self._counts["write_errors"] += 1
            if full:
                self._counts["disk_full_errors"] += 1
                self._maintain()
            elif not result.stored:
                self._target.breaker.error()  # else it is not the tier that fails
            if attempt + 1 == MAX_ATTEMPTS or self._pause(backoff):
                break
            backoff = min(2 * backoff, BACKOFF_MAX_S)
        self._counts["failed_records"] += len(left)
        result.failed += left
        return result

    def _write_group(self, group: list[WriteItem], result: Written) -> tuple[list[WriteItem], bool]:
        """What has to be tried again, and whether the tier said it is full."""
        started = time.perf_counter()
        try:
            statuses = self._target.put_from([item.outgoing for item in group])
            if any(want == "fsync" for item in group for _, _, want in item.waiters):
                self._target.sync()
        except OSError as error:
            return group, error.errno in _FULL_ERRORS
        except Exception:
            if len(chains_of(group)) > 1:
                return group, False  # the next attempt finds out which chain it is
            logger.exception("a tier failed in a way no tier may, %d records are lost", len(group))
            self._counts["failed_records"] += len(group)
            result.failed += group
            return [], False
        done = [i for i, s in zip(group, statuses, strict=True) if s is Status.OK]
        result.stored.update(map(id, done))
        nbytes = sum([item.outgoing.nbytes for item in done])
        self._timed(nbytes, time.perf_counter() - started)
        if done:
            self._on_stored([item.outgoing for item in done if not item.outgoing.dropped])
        left = [i for i, s in zip(group, statuses, strict=True) if s not in _FINAL]
        return left, Status.FULL in statuses


def chains_of(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Items by what they build on, each group in its former order; parents come before children."""
    group_of: dict[tuple[int, bytes], list[WriteItem]] = {}
    groups: list[list[WriteItem]] = []
    for item in items:
        group = group_of.get(item.follows())
        if group is None:
            group = []
            groups.append(group)
        group.append(item)
        group_of[item.key] = group
    return groups
