"""The cache of one process: its tiers, its write queue, and the namespaces on top."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepinfer_kvtier.clock import Clock, SystemClock
from deepinfer_kvtier.config import KVTierConfig, parse_config
from deepinfer_kvtier.directory import DirectoryTier
from deepinfer_kvtier.errors import ClosedError, ConfigError, KVTierError
from deepinfer_kvtier.events import Callback, EventHub
from deepinfer_kvtier.gc import GcReport, collect
from deepinfer_kvtier.host import HostRecord, HostTier
from deepinfer_kvtier.identity import Shard, chain_root, fingerprint
from deepinfer_kvtier.io import IoEngine, PosixIo
from deepinfer_kvtier.layout import KIND_CODES, LayoutSpec
from deepinfer_kvtier.loader import Loader
from deepinfer_kvtier.match import LeaseBook
from deepinfer_kvtier.metrics import render
from deepinfer_kvtier.namespace import Namespace
from deepinfer_kvtier.policy import POLICY_FIELDS, remember_policy, with_stored_policy
from deepinfer_kvtier.queue import WriteQueue
from deepinfer_kvtier.records import FlushReport, KVEvent
from deepinfer_kvtier.store_files import open_store
from deepinfer_kvtier.writer import Outgoing

MAX_NAMESPACES = 1000

_KIND_NAMES = {code: name for name, code in KIND_CODES.items()}


class Cache:
    """Tiers and namespaces of one process; make it with `open`. Safe to use from several threads.

    Open it after forking: threads and the writer's folder belong to one process.
    """

    def __init__(self, config: KVTierConfig, clock: Clock, io: IoEngine) -> None:
        self._given = config
        self.config = config = with_stored_policy(config)
        self.clock = clock
        self.events = EventHub()
        self.counts: Counter[str] = Counter()
        self.namespace_counts: dict[str, Counter[str]] = {}
        started = time.perf_counter()
        self.host = HostTier(
            config.host_bytes,
            state_share=config.state_share,
            state_ttl_s=config.state_ttl_s,
            clock=clock,
        )
        self.directory: DirectoryTier | None = None
        self.queue: WriteQueue | None = None
        self._secret = config.secret or bytes(32)
        if config.path is not None:
            identity = open_store(
                config.path,
                secret=config.secret,
                read_only=config.read_only,
                now_s=clock.wall(),
            )
            self._secret = identity.secret
            try:
                self.directory = DirectoryTier(
                    config.path, store=identity.uuid, config=config, clock=clock, io=io
                )
            except OSError as cause:
                raise ConfigError(f"cannot read the cache at {config.path}: {cause}") from cause
            self.directory.drain_tombs()
            self.directory.drain_removed()
        self.recovery_s = time.perf_counter() - started
        self.leases = LeaseBook(
            self.host, self.directory.segments if self.directory else None, clock
        )
        self.loader = Loader(self.host, self.directory, clock)
        self.threads = ThreadPoolExecutor(config.io_threads, thread_name_prefix="kvtier-load")
        self._closed: FlushReport | None = None
        if self.directory is not None and not config.read_only:
            self.queue = WriteQueue(
                self.directory,
                self.host,
                config,
                on_stored=self._stored_on_disk,
                maintain=self._maintain,
            )

    def namespace(
        self,
        layout: LayoutSpec,
        *,
        model: str | Mapping[str, Any],
        salt: str | bytes = b"",
        adapters: Sequence[Mapping[str, Any]] = (),
        quantisation: Mapping[str, Any] | None = None,
        rope: Mapping[str, Any] | None = None,
        numerics: str = "",
        shard: Shard | None = None,
        tables: Mapping[str, Any] | None = None,
    ) -> Namespace:
        """A view for one model, layout and tenant; cheap to make, one for each request is fine.

        model:    id, or a mapping with id, config digest and weight-index digest. All of the
                  keyword
                  values are part of the identity: another value never sees these records.
        salt:     tenant scope; empty = shared by all, only with `allow_shared_scope`.
        raises:   ConfigError.
        """
        self.check_open()
        salt_bytes = salt.encode() if isinstance(salt, str) else bytes(salt)
        if not salt_bytes and not self.config.allow_shared_scope:
            raise ConfigError("an empty salt shares cached state between tenants; pass a salt")
        shard = shard or Shard()
        print_ = fingerprint(
            model=model,
            layout=layout,
            adapters=adapters,
            quantisation=quantisation,
            rope=rope,
            numerics=numerics,
            shard=shard,
            tables=tables,
        )
        root = chain_root(self._secret, print_, salt_bytes)
        return Namespace(
            self,
            layout=layout,
            fingerprint=print_,
            root=root,
            secret=self._secret,
            shard=shard.index,
        )

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(KVEvent)` whenever a record comes to or leaves a tier through this
        process.

        The callback runs in the thread that made the change and must be quick; `EventQueue`
        collects events for another thread. returns: the call that unsubscribes.
        """
        return self.events.subscribe(callback)

    def flush(self, timeout: float = 10.0, *, fsync: bool = False) -> FlushReport:
        """Write what is queued: afterwards other processes see it and it survives kill -9.

        fsync: also wait until it survives power loss.
        """
        self.check_open()
        if self.queue is None:
            return FlushReport(True, 0, 0)
        return self.queue.flush(timeout, fsync=fsync)

    def gc(self, *, dry_run: bool = False) -> GcReport | None:
        """Collect now: adopt what dead processes left, expire, enforce the quota.

        The stored policy is read again first, so that a change reaches a running process.
        returns: what was done; None for a cache without directory.
        raises:  OSError, StoreFormatError for a damaged policy file.
        """
        self.check_open()
        if self.directory is None:
            return None
        self._reload_policy(self.directory)
        report = collect(self.directory, dry_run=dry_run)
        self.sync_tiers()
        return report

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain values; sizes in bytes, times in seconds."""
        hits = {
            name: self.counts[name]
            for name in (
                "matches",
                "prompt_tokens",
                "hit_tokens",
                "hit_tokens_host",
                "hit_tokens_disk",
                "state_hits",
                "state_misses",
            )
        }
        disk = self.directory.usage() if self.directory else {}
        queue: dict[str, int] = {}
        if self.queue is not None:
            queue = {"queued_bytes": self.queue.queued_bytes, **self.queue.counts}
        degraded = bool(
            disk.get("evicted_before_floor")
            or disk.get("breaker_open")
            or disk.get("corrupt")
            or disk.get("low_space")
        )
        return {
            "health": "degraded" if degraded else "ok",
            "hits": hits,
            "puts": {k: v for k, v in self.counts.items() if k.startswith(("put_", "refused_"))},
            "loads": dict(self.loader.counts),
            "load_seconds": self.loader.seconds.snapshot(),
            "host": self.host.usage(),
            "disk": disk,
            "queue": queue,
            "leases": {"active": len(self.leases), "expired": self.leases.expired},
            "events": {"failed_callbacks": self.events.failed_callbacks},
            "namespaces": {name: dict(counts) for name, counts in self.namespace_counts.items()},
            "recovery_s": self.recovery_s,
        }

    def metrics(self) -> str:
        """`stats()` as Prometheus text, for the page an operator scrapes."""
        return render(self.stats())

    def close(self, timeout: float = 10.0) -> FlushReport:
        """Flush, stop the threads, end the own log. Later calls raise ClosedError; closing again is
        fine.

        returns: what could not be written in time, and is lost.
        """
        if self._closed is not None:
            return self._closed
        report = self.queue.close(timeout) if self.queue else FlushReport(True, 0, 0)
        self._closed = report
        self.threads.shutdown(wait=True)
        self.leases.release_all()
        if self.queue is not None and not self.queue.stopped:
            # Closing files under a thread that still writes could hand it somebody else's file.
            self._closed = report = FlushReport(False, report.pending, report.failed)
        elif self.directory is not None:
            try:
                self.directory.close()
            except OSError:
                # Readers do without the end mark: the folder is adopted like that of a killed
                # process.
                self._closed = report = FlushReport(False, report.pending, report.failed)
        return report

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for the namespaces

    def check_open(self) -> None:
        """ClosedError after `close`."""
        if self._closed is not None:
            raise ClosedError("the cache is closed; open it again")

    def counts_of(self, namespace: str) -> Counter[str]:
        """Counters of one namespace; bounded, since there may be one for every user."""
        known = self.namespace_counts
        name = namespace if namespace in known or len(known) < MAX_NAMESPACES else "other"
        return known.setdefault(name, Counter())

    def sync_tiers(self) -> None:
        """Carry tombstones from the directory into host memory, and removals into events."""
        if self.directory is None:
            self._emit_evicted()
            return
        tombs = self.directory.drain_tombs()
        if tombs:
            self.host.remove_keys(tombs)
        removed = self.directory.drain_removed()
        if removed and self.events.active:
            self.events.emit(
                KVEvent("removed", _kind_name(kind), "disk", key, None, depth)
                for key, kind, depth in removed
            )
        self._emit_evicted()

    def published_in_host(self, records: Iterable[HostRecord]) -> None:
        """Tell listeners about new records in host memory."""
        if self.events.active:
            self.events.emit(
                KVEvent("stored", _kind_name(r.kind), "host", r.digest[:16], r.parent[:16], r.depth)
                for r in records
            )
        self._emit_evicted()

    def _emit_evicted(self) -> None:
        evicted = self.host.drain_evicted()
        if evicted and self.events.active:
            self.events.emit(
                KVEvent(
                    "removed", _kind_name(r.kind), "host", r.digest[:16], r.parent[:16], r.depth
                )
                for r in evicted
            )

    def _stored_on_disk(self, batch: Sequence[Outgoing]) -> None:
        if self.events.active:
            self.events.emit(
                KVEvent("stored", _kind_name(o.kind), "disk", o.digest[:16], o.parent[:16], o.depth)
                for o in batch
            )

    def _maintain(self) -> None:
        """Periodic work of the writing thread."""
        self.host.expire()
        self.leases.expire()
        if self.directory is not None and self.config.auto_gc:
            try:
                self._reload_policy(self.directory)
                report = collect(self.directory)
            except (OSError, KVTierError):
                self.counts["gc_errors"] += 1
            else:
                self.counts["disk_full"] = int(not report.within_limits)
        self.sync_tiers()

    def _reload_policy(self, directory: DirectoryTier) -> None:
        self.config = directory.config = with_stored_policy(self._given)


def _kind_name(code: int) -> Any:
    return _KIND_NAMES[code]


def open(
    config: KVTierConfig | Path | str | None = None,
    *,
    clock: Clock | None = None,
    io: IoEngine | None = None,
    **settings: Any,
) -> Cache:
    """Open a cache: `open("dir")`, `open(host_bytes=1 << 30)` for memory only, or a ready config.

    settings: single fields of `KVTierConfig`. Those about keeping and deleting are stored with the
              directory and hold for whoever opens it later without naming them.
    raises:   ConfigError, StoreFormatError.
    """
    given = parse_config(config, **settings)
    cache = Cache(given, clock or SystemClock(), io or PosixIo())
    try:
        remember_policy(given)
    except BaseException:
        cache.close(timeout=0)
        raise
    return cache


def init(path: Path | str, **policy: Any) -> None:
    """Create the cache directory at `path`, or change the stored policy of the one that is there.

    policy: settings named in `deepinfer_kvtier.policy`, for example `quota_bytes=1 << 40`,
            `min_free_share=0.1`, `classes={"agent": RetentionClass(1, 30 * 86400)}`.
    raises: ConfigError, StoreFormatError.
    """
    unknown = set(policy) - set(POLICY_FIELDS)
    if unknown:
        raise ConfigError(f"a policy has {list(POLICY_FIELDS)}, got {sorted(unknown)}")
    open(path, auto_gc=False, host_bytes=0, **policy).close()
