"""Does storage give back what it took? One record in a thousand written is read again to find out.

The reads are done by the thread that writes, through everything a load goes through but host
memory. A store that is written to and asked but in which nothing is ever found is suspicious, too:
most likely identity differs between those who put and those who look.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from deepinfer_kvtier.clock import Clock
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.encoded import EncodedRecord
from deepinfer_kvtier.store.reading import Wanted
from deepinfer_kvtier.tier import GuardedTier

logger = logging.getLogger(__name__)

SILENCE_S: Final = 600.0
"""Without a hit for so long, a store that is written to and asked counts as silent."""
_CANDIDATES: Final = 1024


@dataclass(frozen=True, slots=True)
class Written:
    """A record that was written at some time, and may have been dropped or collected since.

    nbytes: those that were put; what is stored is shorter where it is compressed.
    """

    kind: int
    shard: int
    digest: bytes
    nbytes: int


ReadAgain = Callable[[Written], Status | None]
"""The status of a read, or None for a record that is rightly not there any more."""


def from_directory(directory: DirectoryTier) -> ReadAgain:
    """Reads of the local directory. They raise OSError when its logs cannot be read."""

    def read(record: Written) -> Status | None:
        rows = directory.index.probe(record.kind, record.shard, [record.digest])
        if int(rows["length"][0]) > record.nbytes or directory.breaker.is_open:
            return None
        (status,) = directory.get_into(record.kind, record.shard, [_wanted(record)], rows=rows)
        if status is Status.MISS:
            directory.refresh()
            if directory.segments.get(int(rows["segment"][0])).buried:
                return None  # another process has collected it
        return status

    return read


def from_tier(tier: GuardedTier) -> ReadAgain:
    """Reads of a further tier, in which other machines may drop and collect at any time."""

    def read(record: Written) -> Status | None:
        found = tier.probe(record.kind, record.shard, [record.digest])
        if int(found["length"][0]) > record.nbytes:
            return None
        (status,) = tier.get_into(
            record.kind, record.shard, [_wanted(record)], in_time=lambda: True
        )
        return None if status is Status.MISS else status

    return read


def _wanted(record: Written) -> Wanted:
    return Wanted(record.digest, [np.empty(record.nbytes, dtype=np.uint8).data], record.nbytes)


class ReadBack:
    """Follows what is written to one store. `written` belongs to one thread, `stats` to any.

    every:   records written between two reads; 0 = none is read.
    lookups: counters of the cache, "matches" and "hit_tokens" among them.
    """

    def __init__(
        self,
        read: ReadAgain,
        *,
        every: int,
        lookups: Counter[str],
        clock: Clock,
        chooser: random.Random | None = None,
    ) -> None:
        self._read = read
        self._every = every
        self._lookups = lookups
        self._clock = clock
        self._random = chooser or random.Random()
        self._candidates: list[Written] = []
        self._batches = 0
        self._until_read = every
        self._hits = 0
        self._asked = 0
        self._silent_since: float | None = None
        self._counts: Counter[str] = Counter()

    def written(self, batch: Sequence[EncodedRecord]) -> None:
        """A batch has been written; read an earlier record when it is time to."""
        if not batch:
            return
        self._begin_silence()
        if not self._every:
            return
        self._until_read -= len(batch)
        if self._until_read <= 0 and self._candidates:
            self._until_read = self._every
            self._read_one()
        self._remember(batch[self._random.randrange(len(batch))])

    def stats(self) -> dict[str, float]:
        """Reads by outcome, their ratio (1 while there is none), and whether the store is silent.

        l2_readback_gone: chosen records that had been dropped or collected; not in the ratio.
        """
        ok, bad = self._counts["ok"], self._counts["bad"]
        return {
            "l2_readback_ok": ok,
            "l2_readback_bad": bad,
            "l2_readback_gone": self._counts["gone"],
            "l2_readback_ok_ratio": ok / (ok + bad) if ok + bad else 1.0,
            "l2_silent": int(self._is_silent()),
        }

    def _read_one(self) -> None:
        at = self._random.randrange(len(self._candidates))
        record = self._candidates[at]
        try:
            status = self._read(record)
        except OSError:
            status = Status.ERROR
        if status is None:
            del self._candidates[at]
            self._counts["gone"] += 1
        elif status is Status.OK:
            self._counts["ok"] += 1
        else:
            self._counts["bad"] += 1
            logger.error(
                "record %s was written and reads back as %s: check the storage, `kvtier fsck`",
                record.digest[:16].hex(),
                status.value,
            )

    def _remember(self, out: EncodedRecord) -> None:
        """Keep a fair sample of all batches."""
        self._batches += 1
        record = Written(out.kind, out.shard, out.digest, out.content_bytes)
        if len(self._candidates) < _CANDIDATES:
            self._candidates.append(record)
        elif (at := self._random.randrange(self._batches)) < _CANDIDATES:
            self._candidates[at] = record

    def _begin_silence(self) -> None:
        """It lasts from the first write after a hit."""
        hits = self._lookups["hit_tokens"]
        if self._silent_since is None or hits != self._hits:
            self._hits = hits
            self._asked = self._lookups["matches"]
            self._silent_since = self._clock.monotonic()

    def _is_silent(self) -> bool:
        since = self._silent_since
        if since is None or self._lookups["hit_tokens"] != self._hits:
            return False
        asked = self._lookups["matches"] > self._asked
        return asked and self._clock.monotonic() - since >= SILENCE_S
