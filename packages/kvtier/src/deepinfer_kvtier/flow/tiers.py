"""Ends leases in a cache that only looks: it has no writing thread that could do so in passing."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.errors import ClosedError, ConfigError, KVTierError
from deepinfer_kvtier.base.events import EventHub
from deepinfer_kvtier.base.files import FileStamp, stamp_of
from deepinfer_kvtier.base.identity import DIGEST_BYTES
from deepinfer_kvtier.base.timing import Clock, Timings
from deepinfer_kvtier.base.values import KIND_CODES, FlushReport, KVEvent, Status
from deepinfer_kvtier.flow.compression import Compressor
from deepinfer_kvtier.flow.handles import LeaseBook
from deepinfer_kvtier.flow.load import Loader
from deepinfer_kvtier.flow.load_scheduler import LoadScheduler
from deepinfer_kvtier.flow.plan import CostModel
from deepinfer_kvtier.flow.tier import GuardedTier, Tier
from deepinfer_kvtier.flow.write_queue import QueueEntry, WriteQueue
from deepinfer_kvtier.host.eviction import EvictionPolicy
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.gc import collect
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.log.store_files import POLICY_FILE, with_stored_policy


class Reaper:
    """Calls `expire` again and again until it is closed."""

    def __init__(self, expire: Callable[[], None], every_s: float) -> None:
        self._expire = expire
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._expire()


MAX_NAMESPACES = 1000
REAP_S = 5.0
RESERVED_NAMES = ("host", "disk", "peer")

_STATE = KIND_CODES["state"]

_KIND_NAMES = {code: name for name, code in KIND_CODES.items()}


REMEMBERED: Final = 1 << 20
"""Records whose first put is remembered: about 100 MB of host memory when all are in use."""


class PutHistory:
    """Remembers the last `capacity` records that were put once."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._once: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    def second_time(self, kind: int, digest: bytes) -> bool:
        """Whether this record was put before; the first time it is remembered."""
        key = (kind, digest[:8])
        with self._lock:
            if key in self._once:
                self._once.move_to_end(key)
                return True
            self._once[key] = None
            if len(self._once) > self._capacity:
                self._once.popitem(last=False)
            return False


class StateExchange(Protocol):
    """Exchange of state slots with other machines, as the tiers use it."""

    @property
    def tier(self) -> Tier:
        """The other machines as a tier that is only read from."""
        ...

    def announce(self, records: Sequence[HostRecord]) -> None:
        """State slots that came to host memory."""
        ...

    def withdrawn(self, digests: Sequence[bytes]) -> None:
        """State slots that left it."""
        ...

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...


OpenExchange = Callable[[HostTier, Callable[[], None]], StateExchange]
"""Opens an exchange over a host memory; it calls the other argument about once a second."""


class TierSet:
    """Host memory, the local directory if there is one, then further tiers in order.

    host_policy: decides which block leaves host memory.
    policy_seen: stamp of the stored policy that `config` has.
    given:   settings as the caller named them; `config` adds the policy stored with the directory.
    queue:   write queue of the first tier below host memory; None when nothing can be written.
    reaper:  ends leases where there is no queue whose thread does; None else.
    readback: looks whether the first persistent tier gives back what it took; None without one.
    lower_queues: those of the other tiers, fed by the first one with what it has in hand.
    windows: exchange of state slots with other machines; None without settings for it.
    peers:   the other machines as a tier of state slots that is only read from; None without.
    readable: the further tiers, then the peers.
    compressor: what records below host memory are compressed with; None = they are not.
    costs:   what loads have been taking, for plans; `timings` for those who watch.
    """

    policy_seen: FileStamp = None

    def __init__(
        self,
        given: KVTierConfig,
        config: KVTierConfig,
        clock: Clock,
        disk: DiskTier | None,
        further: Sequence[Tier],
        host_policy: EvictionPolicy,
        compressor: Compressor | None,
        open_exchange: OpenExchange | None = None,
    ) -> None:
        self._given = given
        self.config = config
        self.clock = clock
        self.events = EventHub()
        self.counts: Counter[str] = Counter()
        self.namespace_counts: dict[str, Counter[str]] = {}
        self.compressor = compressor
        self.host = HostTier(
            config.host_bytes,
            state_share=config.state_share,
            state_ttl_s=config.state_ttl_s,
            clock=clock,
            policy=host_policy,
        )
        self.disk = disk
        self.further = tuple(GuardedTier(tier, clock) for tier in further)
        self.windows = (
            None if open_exchange is None else open_exchange(self.host, self._maintain_host)
        )
        self.peers = None if self.windows is None else GuardedTier(self.windows.tier, clock)
        self.readable = self.further if self.peers is None else (*self.further, self.peers)
        self.costs = CostModel()
        self.timings = Timings()
        self.leases = LeaseBook(self.host, disk.segments if disk else None, clock)
        self.loader = Loader(self.host, disk, self.readable, clock)
        self.threads = LoadScheduler(config.io_threads)
        self.closed: FlushReport | None = None
        self._seen = PutHistory()
        self.queue: WriteQueue | None = None
        self.lower_queues: tuple[WriteQueue, ...] = ()
        self.readback: ReadBack | None = None
        self.reaper: Reaper | None = None
        if not config.read_only:
            self._start_queues()
        elif disk is not None:
            self.reaper = Reaper(self.leases.expire, min(REAP_S, config.gc_interval_s))

    def _start_queues(self) -> None:
        targets: list[DiskTier | GuardedTier] = [*self.further]
        if self.disk is not None:
            targets.insert(0, self.disk)
        if not targets:
            return
        self.lower_queues = tuple(
            WriteQueue(
                target,
                self.host,
                target.queue_config(self.config),
                name=target.name,
                on_stored=self._announcer(target.name),
                timed=self.timings.of("write", target.name),
                maintain=target.maintain,
            )
            for target in targets[1:]
            if isinstance(target, GuardedTier)
        )
        first = targets[0]
        self.readback = self._open_readback(first)
        self.queue = WriteQueue(
            first,
            self.host,
            first.queue_config(self.config) if isinstance(first, GuardedTier) else self.config,
            name=first.name,
            on_stored=self._after_write(first.name),
            timed=self.timings.of("write", first.name),
            maintain=self._maintain,
            hand_on=self._hand_on if self.lower_queues else None,
        )

    def _open_readback(self, tier: DiskTier | GuardedTier) -> ReadBack | None:
        if isinstance(tier, DiskTier):
            read = from_disk(tier)
        elif tier.tier.caps.persistent:
            read = from_tier(tier)
        else:
            return None  # what it forgets it may forget
        every = self.config.readback_every
        return ReadBack(read, every=every, lookups=self.counts, clock=self.clock)

    def _hand_on(self, items: Sequence[QueueEntry]) -> None:
        """What the first queue is done with, for the further tiers. Memory stays pinned."""
        for queue in self.lower_queues:
            queue.add_copies(items)

    @property
    def admits_all(self) -> bool:
        """Whether every record may leave host memory at once, by the policy's `admission`."""
        return self.config.admission == "all"

    def admits(self, kind: int, digest: bytes) -> bool:
        """Whether a record may leave host memory now, by the policy's `admission`."""
        return self.admits_all or self._seen.second_time(kind, digest)

    def check_open(self) -> None:
        """ClosedError after `close`."""
        if self.closed is not None:
            raise ClosedError("the cache is closed; open it again")

    def counts_of(self, namespace: str) -> Counter[str]:
        """Counters of one namespace; bounded, since there may be one for every user."""
        known = self.namespace_counts
        name = namespace if namespace in known or len(known) < MAX_NAMESPACES else "other"
        return known.setdefault(name, Counter())

    def sync_tiers(self) -> None:
        """Carry tombstones from the tiers into host memory, and removals into events."""
        self._take_drops()
        if self.disk is None:
            self._emit_changes()
            return
        tombs = self.disk.index.drain_tombs()
        if tombs:
            self.host.remove_keys(tombs)
        removed = self.disk.index.drain_removed()
        if removed and self.events.active:
            self.events.emit(
                KVEvent("removed", _kind_name(kind), "disk", key, None, depth)
                for key, kind, depth in removed
            )
        self._emit_changes()

    def _take_drops(self) -> None:
        """What other machines dropped through a further tier goes from here, too."""
        for tier in self.further:
            drops = tier.drain_drops()
            if not drops:
                continue
            self.host.remove_keys({(kind, key) for kind, _, key in drops})
            if self.disk is not None and not self.config.read_only:
                for kind, shard, key in drops:
                    self.disk.delete(kind, shard, [key.ljust(DIGEST_BYTES, b"\0")])

    def published_in_host(self, records: Sequence[HostRecord]) -> None:
        """Tell listeners and other machines about records that were put into host memory."""
        self._emit_changes()
        if self.windows is not None:
            self.windows.announce([r for r in records if r.kind == _STATE])

    def _emit_changes(self) -> None:
        """What came to host memory or left it, in whatever way, to listeners and other machines."""
        changes = self.host.drain_changes()
        if not changes:
            return
        if self.windows is not None:
            self.windows.withdrawn(
                [r.digest for came, r in changes if not came and r.kind == _STATE]
            )
        if self.events.active:
            self.events.emit(
                KVEvent(
                    "stored" if came else "removed",
                    _kind_name(r.kind),
                    "host",
                    r.digest[:16],
                    r.parent[:16],
                    r.depth,
                )
                for came, r in changes
            )

    def _announcer(self, tier: str) -> Any:
        def announce(batch: Sequence[EncodedRecord]) -> None:
            if self.events.active:
                self.events.emit(
                    KVEvent(
                        "stored", _kind_name(o.kind), tier, o.digest[:16], o.parent[:16], o.depth
                    )
                    for o in batch
                )

        return announce

    def _after_write(self, tier: str) -> Any:
        announce = self._announcer(tier)

        def after(batch: Sequence[EncodedRecord]) -> None:
            announce(batch)
            if self.readback is not None:
                self.readback.written(batch)
            if self.disk is not None and self.disk.collection_due:
                # A quota must not be passed by more than the segment that was being written.
                self._maintain()

        return after

    def _maintain(self) -> None:
        """Periodic work of the first queue's thread."""
        self.host.expire()
        self.leases.expire()
        if self.disk is None:
            self.further[0].maintain()
        elif self.config.auto_gc and not self.counts["wrong_secret"]:
            try:
                self.reload_policy(self.disk)
                report = collect(self.disk)
            except (OSError, KVTierError):
                self.counts["gc_errors"] += 1
            else:
                self.counts["disk_full"] = int(not report.within_limits)
        self.sync_tiers()

    def _maintain_host(self) -> None:
        """Periodic work of the window exchange, which may be the only thread there is."""
        self.host.expire()
        self._emit_changes()

    def reload_policy(self, disk: DiskTier) -> None:
        """Read the stored policy again where it has changed. raises: StoreFormatError."""
        stamp = stamp_of(disk.root / POLICY_FILE)
        if stamp != self.policy_seen:
            self.config = disk.config = with_stored_policy(self._given)
            self.policy_seen = stamp


def _kind_name(code: int) -> Any:
    return _KIND_NAMES[code]


def check_names(further: Sequence[Tier]) -> None:
    """raises: ConfigError unless every further tier has a name of its own."""
    names = [tier.name for tier in further]
    if len({*names, *RESERVED_NAMES}) < len(names) + len(RESERVED_NAMES):
        raise ConfigError(f"tiers need different names, not {RESERVED_NAMES}, got {names}")


def drop_records(tiers: TierSet, kinds: Sequence[int], shard: int, digests: Sequence[bytes]) -> int:
    """Everything behind `Namespace.drop`; returns how many records were found."""
    found = 0
    for kind in kinds:
        for queue in (tiers.queue, *tiers.lower_queues):
            if queue is not None:
                queue.discard(kind, digests)
        known = [sum(tiers.host.remove(kind, digest) is not None for digest in digests)]
        if tiers.disk is not None:
            known.append(tiers.disk.delete(kind, shard, digests))
        if not tiers.config.read_only:
            known.extend(tier.delete(kind, shard, digests) for tier in tiers.further)
        found += max(known)
    if tiers.disk is not None and not tiers.config.read_only:
        try:
            tiers.disk.write_control()
        except OSError:
            # Hidden here at once; the tombstones stay queued for the next write.
            tiers.counts["control_errors"] += 1
    tiers.sync_tiers()
    return found


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


def from_disk(disk: DiskTier) -> ReadAgain:
    """Reads of the local directory. They raise OSError when its logs cannot be read."""

    def read(record: Written) -> Status | None:
        rows = disk.index.probe(record.kind, record.shard, [record.digest])
        if int(rows["length"][0]) > record.nbytes or disk.breaker.is_open:
            return None
        (status,) = disk.get_into(record.kind, record.shard, [_wanted(record)], rows=rows)
        if status is Status.MISS:
            disk.refresh()
            if disk.segments.get(int(rows["segment"][0])).tombstoned:
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
