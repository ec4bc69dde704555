"""The cache of one process: its tiers, its write queue, and the namespaces on top."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepinfer_kvtier.api.metrics import render
from deepinfer_kvtier.api.namespace import Namespace
from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.config import (
    IoName,
    KVTierConfig,
    Mode,
    WindowSettings,
    parse_config,
    permissions_of,
)
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.events import Callback
from deepinfer_kvtier.base.files import IoEngine, call_in_children, stamp_of
from deepinfer_kvtier.base.identity import Shard, chain_root, fingerprint, salt_bytes
from deepinfer_kvtier.base.timing import Clock, SteadyClock, SystemClock
from deepinfer_kvtier.base.values import FlushReport, LayoutSpec
from deepinfer_kvtier.flow.compression import open_compressor
from deepinfer_kvtier.flow.encryption import Sealer, WriterIdentity
from deepinfer_kvtier.flow.tier import GuardedTier, Registration, Tier, register
from deepinfer_kvtier.flow.tiers import OpenExchange, StateExchange, TierSet, check_names
from deepinfer_kvtier.flow.write_queue import WriteQueue
from deepinfer_kvtier.host.memory import HostTier
from deepinfer_kvtier.host.policies import make_policy
from deepinfer_kvtier.log.direct_io import build_io
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.gc import GcReport, collect
from deepinfer_kvtier.log.store_files import (
    CHECK_FILE,
    FORMAT_FILE,
    JUMP_S,
    POLICY_FIELDS,
    POLICY_FILE,
    SECRET_FILE,
    complaints_about_access,
    open_store,
    remember_policy,
    with_stored_policy,
)
from deepinfer_kvtier.remote.tiers.build import TierConfig, open_tiers

logger = logging.getLogger(__name__)


class Cache(TierSet):
    """Tiers and namespaces of one process; make it with `open`. Safe to use from several threads.

    Open it after forking: threads and the writer's folder belong to one process. In a child an
    inherited cache is closed.

    Raises ConfigError for a setting that cannot be used.
    """

    def __init__(
        self, config: KVTierConfig, clock: Clock, io: IoEngine, tiers: Sequence[Tier] = ()
    ) -> None:
        check_names(tiers)
        compressor = open_compressor(config.compression)
        if config.path is not None:
            self.policy_seen = stamp_of(config.path / POLICY_FILE)
        given, config = config, with_stored_policy(config)
        host_policy = make_policy(config.host_policy)
        started = time.perf_counter()
        disk: DiskTier | None = None
        self._secret = config.secret or bytes(32)
        self._identity = WriterIdentity()
        fits, complaints = True, list[str]()
        if config.path is not None:
            permissions = permissions_of(config)
            identity = open_store(
                config.path,
                permissions=permissions,
                secret=config.secret,
                read_only=config.read_only,
                now_s=clock.wall(),
                mode=config.mode,
            )
            self._secret, fits = identity.secret, identity.fits
            complaints = complaints_about_access(config.path, permissions)
            for complaint in complaints:
                logger.warning("%s", complaint)
            try:
                disk = DiskTier(
                    config.path,
                    store=identity.uuid,
                    config=config.model_copy(update={"mode": identity.mode}),
                    clock=clock,
                    io=io,
                )
            except OSError as cause:
                raise ConfigError(f"cannot read the cache at {config.path}: {cause}") from cause
            disk.index.drain_tombs()
            disk.index.drain_removed()
        self.recovery_s = time.perf_counter() - started
        exchange = None if config.windows is None else _opener(config, config.windows, clock)
        super().__init__(given, config, clock, disk, tiers, host_policy, compressor, exchange)
        self.counts["open_to_others"] = len(complaints)
        if not fits:
            self.counts["wrong_secret"] = 1
            logger.error(
                "the secret or the id of the cache at %s is not the one its records were stored"
                " with: nothing will be found and nothing is stored there; restore %s or %s, pass"
                " the right `secret`, or remove %s to go on with this one",
                config.path,
                SECRET_FILE,
                FORMAT_FILE,
                CHECK_FILE,
            )
        call_in_children(self, Cache._leave_to_parent)

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
        encryption_key: bytes | None = None,
    ) -> Namespace:
        """A view for one model, layout and tenant; cheap to make, one for each request is fine.

        model:    id, or a mapping with id, config digest and weight-index digest. All keywords
                  are part of the identity: another value never sees these records.
        salt:     tenant scope; empty = shared by all, only with `allow_shared_scope`.
        encryption_key: 32 bytes that seal this tenant's records below host memory; None = that of
                  the configuration. Part of the identity: with another key nothing is found.
        raises:   ConfigError.
        """
        self.check_open()
        if not isinstance(layout, LayoutSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a layout is a LayoutSpec, got {type(layout).__name__}")
        if not isinstance(shard, Shard | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a shard is a Shard, got {type(shard).__name__}")
        scope = salt_bytes(salt)
        if not scope and not self.config.allow_shared_scope:
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
        root = chain_root(self._secret, print_, scope)
        sealer = self._sealer(encryption_key, scope, print_)
        if sealer is not None:
            root = sealer.bind(root)
        return Namespace(
            self,
            layout=layout,
            fingerprint=print_,
            root=root,
            secret=self._secret,
            shard=shard.index,
            sealer=sealer,
        )

    def _sealer(self, key: bytes | None, salt: bytes, print_: bytes) -> Sealer | None:
        key = self.config.encryption_key if key is None else key
        if key is None:
            return None
        return Sealer(key, salt=salt, fingerprint=print_, writer=self._identity)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(KVEvent)` whenever a record comes to or leaves a tier through this
        process.

        The callback runs in the thread that made the change and must be quick; `EventQueue`
        collects events for another thread. returns: the call that unsubscribes.
        """
        return self.events.subscribe(callback)

    def register(self, buffer: Any) -> Registration:
        """Tell the tiers about memory that loads and puts will use, so that they can pin it.

        buffer:  as for `load`: a buffer, an (address, length) pair, a CPU tensor.
        returns: what ends the registration; tiers without use for it ignore the call.
        raises:  BufferShapeError, and OSError when a tier cannot pin the memory.
        """
        self.check_open()
        return register(buffer, [tier.tier for tier in self.further])

    def flush(self, timeout: float = 10.0, *, fsync: bool = False) -> FlushReport:
        """Write what is queued: afterwards other processes see it and it survives kill -9.

        fsync: also wait until it survives power loss. raises: ClosedError, ConfigError.
        """
        self.check_open()
        if not isinstance(timeout, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"timeout is a number of seconds, got {timeout!r}")
        if self.queue is None:
            return FlushReport(True, 0, 0)
        deadline = time.monotonic() + timeout
        report = self.queue.flush(timeout, fsync=fsync)
        for lower_queue in self.lower_queues:
            report += lower_queue.flush(max(0.0, deadline - time.monotonic()), fsync=fsync)
        return report

    def gc(self, *, dry_run: bool = False) -> GcReport | None:
        """Collect now: adopt what dead processes left, expire, enforce the quota.

        The stored policy is read again first, so that a change reaches a running process.
        returns: what was done; None for a cache without directory.
        raises:  OSError, StoreFormatError for a damaged policy file.
        """
        self.check_open()
        if self.disk is None:
            return None
        self.reload_policy(self.disk)
        report = collect(self.disk, dry_run=dry_run)
        if not dry_run:
            self.counts["disk_full"] = int(not report.within_limits)
        self.sync_tiers()
        return report

    def stats(self) -> dict[str, Any]:
        """Counters and gauges as plain values; sizes in bytes, times in seconds."""
        names = [
            *("matches", "prompt_tokens", "hit_tokens", "hit_blocks", "missed_blocks"),
            *("state_hits", "state_misses"),
        ]
        names += [
            f"{what}_{tier}"
            for what in ("hit_tokens", "state_hits")
            for tier in ("host", "disk", *(t.name for t in self.readable))
        ]
        hits = {name: self.counts[name] for name in names}
        disk = _disk_stats(self.disk) if self.disk else {}
        readback = {} if self.readback is None else self.readback.stats()
        queue: dict[str, int] = {}
        if self.queue is not None:
            queue = {"queued_bytes": self.queue.queued_bytes, **self.queue.counts}
        tiers = {tier.name: tier.usage() for tier in self.further}
        reasons = self._complaints(disk, readback, tiers)
        return {
            "health": "degraded" if reasons else "ok",
            "health_reasons": reasons,
            "hits": hits,
            "puts": {k: v for k, v in self.counts.items() if k.startswith(("put_", "refused_"))},
            "loads": dict(self.loader.counts),
            "timings": self.timings.snapshot(),
            "host": {**self.host.usage(), "policy": self.host.policy_name},
            "disk": disk,
            "io": dict(self.disk.io.facts()) if self.disk else {},
            "native": native.STATE,
            "readback": readback,
            "queue": queue,
            "compression": {} if self.compressor is None else self.compressor.stats(),
            "tiers": tiers,
            "lower_queues": {
                lower_queue.name: {"queued_bytes": lower_queue.queued_bytes, **lower_queue.counts}
                for lower_queue in self.lower_queues
            },
            "windows": {} if self.windows is None else self.windows.stats(),
            "replay": self._replay_stats(),
            "leases": {"active": len(self.leases), "expired": self.leases.expired},
            "events": {"failed_callbacks": self.events.failed_callbacks},
            "namespaces": {name: dict(counts) for name, counts in self.namespace_counts.items()},
            "recovery_s": self.recovery_s,
        }

    def _complaints(
        self,
        disk: Mapping[str, float],
        readback: Mapping[str, float],
        tiers: Mapping[str, Mapping[str, Any]],
    ) -> list[str]:
        """Why the cache is not in order, in a word each."""
        failing = None if self.queue is None else self.queue.failing
        found = {
            "reads_failing": disk.get("breaker_open"),
            "writes_failing": disk.get("write_breaker_open") or failing == "write_failed",
            "disk_full": self.counts["disk_full"] or failing == "disk_full",
            "low_space": disk.get("low_space"),
            "evicted_before_floor": disk.get("evicted_before_floor"),
            "corrupt": disk.get("corrupt"),
            "memory_corrupt": self.host.usage()["corrupt"],
            "unreadable_writers": disk.get("unreadable_writers"),
            "folder_gone": disk.get("folder_gone"),
            "wrong_secret": self.counts["wrong_secret"],
            "open_to_others": self.counts["open_to_others"],
            "clock_jump": abs(disk.get("clock_jump_s", 0)) > JUMP_S
            or abs(disk.get("clock_off_s", 0)) > JUMP_S,
            "readback_bad": readback.get("l2_readback_bad"),
            "silent": readback.get("l2_silent"),
            **{f"tier_{name}": tier["health"] != "ok" for name, tier in tiers.items()},
        }
        return [reason for reason, is_so in found.items() if is_so]

    def _replay_stats(self) -> dict[str, float]:
        """Chosen plans by state source, and how much of what was put is approximate."""
        plans: dict[str, float] = {k: v for k, v in self.counts.items() if k.startswith("plans_")}
        blocks = self.counts["blocks_put"]
        approximate = self.counts["approximate_blocks"]
        return {
            **plans,
            "approximate_blocks": approximate,
            "approximate_share": approximate / blocks if blocks else 0.0,
        }

    def metrics(self) -> str:
        """`stats()` as Prometheus text, for the page an operator scrapes."""
        return render(self.stats())

    def close(self, timeout: float = 10.0) -> FlushReport:
        """Flush, stop the threads, end the own log. Later calls raise ClosedError; closing again is
        fine.

        returns: what could not be written in time, and is lost.
        """
        if self.closed is not None:
            return self.closed
        report = self.queue.close(timeout) if self.queue else FlushReport(True, 0, 0)
        for lower_queue in self.lower_queues:
            report += lower_queue.close(timeout)
        self.closed = report
        self.threads.shutdown()
        if self.reaper is not None:
            self.reaper.close()
        if self.windows is not None:
            self.windows.close()
        self.leases.release_all()
        for tier, queue in self._by_queue():
            if queue is not None and not queue.stopped:
                # Closing files under a thread that still writes could hand it another file.
                self.closed = report = FlushReport(False, report.pending, report.failed)
                continue
            try:
                tier.close()
            except OSError:
                # Readers do without the end mark: the folder is adopted like that of a killed
                # process.
                self.closed = report = FlushReport(False, report.pending, report.failed)
        return report

    def _leave_to_parent(self) -> None:
        """In a forked child: give up the descriptors and leave everything else to the parent.

        No lock is taken, since a thread that the child has not got may hold it.
        """
        if self.closed is None:
            self.closed = FlushReport(False, 0, 0)
            self.leases.abandon()
            if self.disk is not None:
                self.disk.leave_to_parent()

    def _by_queue(self) -> list[tuple[DiskTier | GuardedTier, WriteQueue | None]]:
        """Each tier below host memory with the queue that writes to it."""
        tiers: list[DiskTier | GuardedTier] = [*self.further]
        if self.disk is not None:
            tiers.insert(0, self.disk)
        queues = (self.queue, *self.lower_queues) if self.queue else (None,) * len(tiers)
        return list(zip(tiers, queues, strict=True))

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _opener(config: KVTierConfig, settings: WindowSettings, clock: Clock) -> OpenExchange:
    def opened(host: HostTier, maintain: Callable[[], None]) -> StateExchange:
        # Loads asyncio, which importing the package must not.
        from deepinfer_kvtier.remote.state_exchange.exchange import WindowExchange

        return WindowExchange(
            settings,
            host,
            state_ttl_s=config.state_ttl_s,
            replaces=not config.persist_state,
            clock=clock,
            maintain=maintain,
        )

    return opened


def _disk_stats(disk: DiskTier) -> dict[str, float]:
    """Usage of the directory, and file bytes written for each payload byte that was put."""
    used: dict[str, float] = dict(disk.usage())
    put = used["written_payload_bytes"] - used.get("gc_copied_payload_bytes", 0)
    used["expand_s"] = used.pop("expand_us", 0) / 1e6
    return {**used, "write_amplification": used["written_file_bytes"] / put if put > 0 else 0.0}


def open(
    config: KVTierConfig | Path | str | None = None,
    *,
    clock: Clock | None = None,
    io: IoEngine | IoName | None = None,
    tiers: Sequence[Tier | TierConfig | str] = (),
    **settings: Any,
) -> Cache:
    """Open a cache: `open("dir")`, `open(host_bytes=1 << 30)` for memory only, or a ready config.

    io:       how segments are read and written: the setting `io` of the configuration, or an object
              with the methods of `IoEngine`.
    tiers:    stores below the directory, asked in this order; they are closed with the cache. A URL
              ("s3://bucket/prefix"), a tier's config, or an object with the methods of `Tier`.
    settings: single fields of `KVTierConfig`. Those about keeping and deleting are stored with the
              directory and hold for whoever opens it later without naming them.
    raises:   ConfigError, StoreFormatError.
    """
    if isinstance(io, str):
        settings["io"], io = io, None
    given = parse_config(config, **settings)
    clock = SteadyClock(clock or SystemClock())
    if io is None:
        io = build_io(given.io, permissions_of(given))
    opened = open_tiers(tiers, given, clock, io)
    try:
        cache = Cache(given, clock, io, opened)
    except BaseException:
        for tier in opened:
            if tier not in tiers:  # what the caller made stays the caller's
                tier.close()
        raise
    try:
        cache.policy_seen = remember_policy(given) or cache.policy_seen
    except ConfigError as cause:
        # A full disk must not keep out who comes with a quota to make room on it.
        logger.warning("%s; the settings hold for this process only", cause)
    except BaseException:
        cache.close(timeout=0)
        raise
    return cache


def init(path: Path | str, *, mode: Mode | None = None, **policy: Any) -> None:
    """Create the cache directory at `path`, or change the stored policy of the one that is there.

    mode:   "embedded" or "shared-fs", for good. None = what is there, "embedded" for a new one.
    policy: settings named in `deepinfer_kvtier.log.store_files`, for example `quota_bytes=1 << 40`,
            `min_free_share=0.1`, `classes={"agent": RetentionClass(1, 30 * 86400)}`.
    raises: ConfigError, StoreFormatError.
    """
    unknown = set(policy) - set(POLICY_FIELDS)
    if unknown:
        raise ConfigError(f"a policy has {list(POLICY_FIELDS)}, got {sorted(unknown)}")
    open(path, auto_gc=False, host_bytes=0, mode=mode, **policy).close()
    remember_policy(parse_config(path, **policy))  # does nothing unless `open` failed to
