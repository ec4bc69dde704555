"""The tiers of one process, and what everybody who moves records between them needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_kvtier.clock import Clock
from deepinfer_kvtier.coding.compression import Compressor
from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.costs import CostModel
from deepinfer_kvtier.errors import ClosedError, ConfigError, KVTierError
from deepinfer_kvtier.events import EventHub
from deepinfer_kvtier.identity import DIGEST_BYTES
from deepinfer_kvtier.layout import KIND_CODES
from deepinfer_kvtier.loads.loader import Loader
from deepinfer_kvtier.loads.turns import LoadQueue
from deepinfer_kvtier.match import LeaseBook
from deepinfer_kvtier.memory.eviction import EvictionPolicy
from deepinfer_kvtier.memory.host import HostRecord, HostTier
from deepinfer_kvtier.policy import with_stored_policy
from deepinfer_kvtier.puts.admission import PutHistory
from deepinfer_kvtier.puts.queue import WriteQueue
from deepinfer_kvtier.puts.queued import WriteItem
from deepinfer_kvtier.puts.readback import ReadBack, from_directory, from_tier
from deepinfer_kvtier.reaper import Reaper
from deepinfer_kvtier.records import FlushReport, KVEvent
from deepinfer_kvtier.store.directory import DirectoryTier
from deepinfer_kvtier.store.encoded import EncodedRecord
from deepinfer_kvtier.tier import GuardedTier, Tier
from deepinfer_kvtier.timings import Timings
from deepinfer_kvtier.upkeep.gc import collect

if TYPE_CHECKING:
    from deepinfer_kvtier.windows.exchange import WindowExchange

MAX_NAMESPACES = 1000
REAP_S = 5.0
RESERVED_NAMES = ("host", "disk", "peer")

_STATE = KIND_CODES["state"]

_KIND_NAMES = {code: name for name, code in KIND_CODES.items()}


class TierSet:
    """Host memory, the local directory if there is one, then further tiers in order.

    host_policy: decides which block leaves host memory.
    given:   settings as the caller named them; `config` adds the policy stored with the directory.
    queue:   write queue of the first tier below host memory; None when nothing can be written.
    reaper:  ends leases where there is no queue whose thread does; None else.
    readback: looks whether the first persistent tier gives back what it took; None without one.
    spills:  write queues of the other tiers, fed by the first one with what it has in hand.
    windows: exchange of state slots with other machines; None without settings for it.
    peers:   the other machines as a tier of state slots that is only read from; None without.
    readable: the further tiers, then the peers.
    compressor: what records below host memory are compressed with; None = they are not.
    costs:   what loads have been taking, for plans; `timings` for those who watch.
    """

    def __init__(
        self,
        given: KVTierConfig,
        config: KVTierConfig,
        clock: Clock,
        directory: DirectoryTier | None,
        further: Sequence[Tier],
        host_policy: EvictionPolicy,
        compressor: Compressor | None,
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
        self.directory = directory
        self.further = tuple(GuardedTier(tier, clock) for tier in further)
        self.windows = self._open_windows()
        self.peers = None if self.windows is None else GuardedTier(self.windows.tier, clock)
        self.readable = self.further if self.peers is None else (*self.further, self.peers)
        self.costs = CostModel()
        self.timings = Timings()
        self.leases = LeaseBook(self.host, directory.segments if directory else None, clock)
        self.loader = Loader(self.host, directory, self.readable, clock)
        self.threads = LoadQueue(config.io_threads)
        self.closed: FlushReport | None = None
        self._seen = PutHistory()
        self.queue: WriteQueue | None = None
        self.spills: tuple[WriteQueue, ...] = ()
        self.readback: ReadBack | None = None
        self.reaper: Reaper | None = None
        if not config.read_only:
            self._start_queues()
        elif directory is not None:
            self.reaper = Reaper(self.leases.expire, min(REAP_S, config.gc_interval_s))

    def _start_queues(self) -> None:
        targets: list[DirectoryTier | GuardedTier] = [*self.further]
        if self.directory is not None:
            targets.insert(0, self.directory)
        if not targets:
            return
        self.spills = tuple(
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
            hand_on=self._hand_on if self.spills else None,
        )

    def _open_readback(self, tier: DirectoryTier | GuardedTier) -> ReadBack | None:
        if isinstance(tier, DirectoryTier):
            read = from_directory(tier)
        elif tier.tier.caps.persistent:
            read = from_tier(tier)
        else:
            return None  # what it forgets it may forget
        every = self.config.readback_every
        return ReadBack(read, every=every, lookups=self.counts, clock=self.clock)

    def _open_windows(self) -> WindowExchange | None:
        if self.config.windows is None:
            return None
        # Loads asyncio, which importing the package must not.
        from deepinfer_kvtier.windows.exchange import WindowExchange

        return WindowExchange(
            self.config.windows,
            self.host,
            state_ttl_s=self.config.state_ttl_s,
            replaces=not self.config.persist_state,
            clock=self.clock,
            maintain=self._maintain_host,
        )

    def _hand_on(self, items: Sequence[WriteItem]) -> None:
        """What the first queue is done with, for the further tiers. Memory stays pinned."""
        for queue in self.spills:
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
        if self.directory is None:
            self._emit_changes()
            return
        tombs = self.directory.index.drain_tombs()
        if tombs:
            self.host.remove_keys(tombs)
        removed = self.directory.index.drain_removed()
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
            if self.directory is not None and not self.config.read_only:
                for kind, shard, key in drops:
                    self.directory.delete(kind, shard, [key.ljust(DIGEST_BYTES, b"\0")])

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
            if self.directory is not None and self.directory.collection_due:
                # A quota must not be passed by more than the segment that was being written.
                self._maintain()

        return after

    def _maintain(self) -> None:
        """Periodic work of the first queue's thread."""
        self.host.expire()
        self.leases.expire()
        if self.directory is None:
            self.further[0].maintain()
        elif self.config.auto_gc:
            try:
                self.reload_policy(self.directory)
                report = collect(self.directory)
            except (OSError, KVTierError):
                self.counts["gc_errors"] += 1
            else:
                self.counts["disk_full"] = int(not report.within_limits)
        self.sync_tiers()

    def _maintain_host(self) -> None:
        """Periodic work of the window exchange, which may be the only thread there is."""
        self.host.expire()
        self._emit_changes()

    def reload_policy(self, directory: DirectoryTier) -> None:
        """Read the stored policy again. raises: StoreFormatError."""
        self.config = directory.config = with_stored_policy(self._given)


def _kind_name(code: int) -> Any:
    return _KIND_NAMES[code]


def check_names(further: Sequence[Tier]) -> None:
    """raises: ConfigError unless every further tier has a name of its own."""
    names = [tier.name for tier in further]
    if len({*names, *RESERVED_NAMES}) < len(names) + len(RESERVED_NAMES):
        raise ConfigError(f"tiers need different names, not {RESERVED_NAMES}, got {names}")
