"""The window exchange of one cache: holds, announces, finds and pulls windows."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import WindowSettings, split_address
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import KIND_CODES, Status, quality_of
from deepinfer_kvtier.host.memory import HostRecord, HostTier
from deepinfer_kvtier.remote.state_exchange import wire
from deepinfer_kvtier.remote.state_exchange.client import PeerClient, PeerHealth
from deepinfer_kvtier.remote.state_exchange.locations import LocalLocations, WindowLocations
from deepinfer_kvtier.remote.state_exchange.mooncake import MooncakeTransport
from deepinfer_kvtier.remote.state_exchange.peers import PeerLocations
from deepinfer_kvtier.remote.state_exchange.redis import RedisLocations
from deepinfer_kvtier.remote.state_exchange.tier import PeerWindows
from deepinfer_kvtier.remote.state_exchange.wire import PullAnswer, PullRequest, WindowRecord

if TYPE_CHECKING:
    from deepinfer_kvtier.remote.state_exchange.service import Held, WindowService


_STATE = KIND_CODES["state"]
LOOKUP_KEYS = 64
"""Deepest boundaries that one match asks the location service for."""
MAX_WAITING = 10_000
MAX_CHAIN_STEPS = 1024
"""Blocks that announcing a window walks back: a put may not take long."""
MAINTAIN_S = 1.0


@dataclass(slots=True)
class _HeldRecord:
    answer: PullAnswer
    view: memoryview
    host: HostTier
    record: HostRecord

    def release(self) -> None:
        self.host.unpin([self.record])


@dataclass(frozen=True, slots=True)
class _News:
    """For the location service: a window that came (`record`), or one that went."""

    key: bytes
    record: WindowRecord | None


class WindowExchange:
    """Made by `Cache` from `KVTierConfig.windows`.

    replaces: whether a newer window of a chain replaces its predecessor; not where windows are kept
              in a location service too.
    maintain: called about once a second in the announcing thread.
    address:  "ip:port" under which this machine is reached.
    tier:     the other machines as a tier that is only read from.
    """

    def __init__(
        self,
        settings: WindowSettings,
        host: HostTier,
        *,
        state_ttl_s: float,
        replaces: bool,
        clock: Clock,
        maintain: Callable[[], None],
    ) -> None:
        from deepinfer_kvtier.remote.state_exchange.service import WindowService

        self._settings = settings
        self._host = host
        self._ttl_s = state_ttl_s
        self._replaces = replaces
        self._clock = clock
        self._maintain = maintain
        self.machine = secrets.token_bytes(wire.MACHINE_BYTES)
        self.generation = secrets.randbits(63)
        self._deadline_s = settings.deadline_ms / 1000
        health = PeerHealth(dead_after=settings.dead_after, retry_s=settings.retry_s, clock=clock)
        self._client = PeerClient(settings.key, health)
        self._own = LocalLocations(clock=clock)
        self._mooncake = self._open_mooncake()
        self._service: WindowService = WindowService(
            settings.listen,
            settings.key,
            self._own,
            self._hold,
            max_connections=settings.max_connections,
            stage=None if self._mooncake is None else self._mooncake.stage,
        )
        self.address = settings.advertise or self._service.address
        try:
            self._locations = self._open_locations()
        except BaseException:
            self._service.stop()
            if self._mooncake is not None:
                self._mooncake.close()
            raise
        self._lock = threading.Lock()
        self._waiting: deque[_News] = deque()
        self._wake = threading.Condition(self._lock)
        self._superseded: deque[tuple[float, bytes]] = deque()
        self._closed = False
        self._busy = False
        self.counts: Counter[str] = Counter()
        self.tier = PeerWindows(self)
        self._thread = threading.Thread(target=self._tell, name="kvtier-announce", daemon=True)
        self._thread.start()

    def set_members(self, members: Sequence[str]) -> None:
        """Replace the machines that keep locations among themselves; this one included.

        raises: ConfigError for a malformed address or where others keep the locations.
        """
        if not isinstance(self._locations, PeerLocations):
            raise ConfigError('only locations "peers" have members')
        try:
            self._locations.set_members(members)
        except ValueError as cause:
            raise ConfigError(f"windows.members: {cause}") from cause

    # -- holding

    def announce(self, records: Sequence[HostRecord]) -> None:
        """Tell others of new windows here, and let each replace its chain's former one."""
        for record in records:
            former = self._former(record) if self._replaces else None
            if former is not None:
                due = self._clock.monotonic() + self._settings.replace_after_s
                with self._lock:
                    self._superseded.append((due, former))
            self._queue(_News(record.digest[: wire.KEY_BYTES], self._hint(record)))
        self.retire()

    def withdrawn(self, digests: Sequence[bytes]) -> None:
        """Windows that have left host memory."""
        for digest in digests:
            self._queue(_News(digest[: wire.KEY_BYTES], None))

    def retire(self) -> None:
        """Drop windows whose successor is old enough; nothing that is in use."""
        now = self._clock.monotonic()
        while True:
            with self._lock:
                if not self._superseded or self._superseded[0][0] > now:
                    return
                _, digest = self._superseded.popleft()
            if self._host.remove(_STATE, digest) is not None:
                self.counts["replaced"] += 1

    def settle(self, timeout_s: float = 5.0) -> bool:
        """Wait until the location service has been told everything so far."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    # -- finding

    def find(self, digests: Sequence[bytes]) -> list[WindowRecord | None]:
        """For each boundary, who else announces its window; only the deepest ones are looked up."""
        first = max(0, len(digests) - LOOKUP_KEYS)
        keys = [digest[: wire.KEY_BYTES] for digest in digests[first:]]
        nothing: list[WindowRecord | None] = [None] * len(digests)
        if not keys:
            return nothing
        self.counts["lookups"] += 1
        try:
            hints = self._locations.lookup(keys, self._deadline_s)
        except OSError:
            self.counts["lookup_errors"] += 1
            return nothing
        usable = [
            hint if hint is not None and hint.key == key and self._usable(hint) else None
            for key, hint in zip(keys, hints, strict=True)
        ]
        self.counts["hints"] += sum(hint is not None for hint in usable)
        return nothing[:first] + usable

    def pull(
        self, hint: WindowRecord, digest: bytes, views: Sequence[memoryview]
    ) -> tuple[Status, PullAnswer | None]:
        """One try at the window a hint speaks of, into `views`; what arrives is kept here too."""
        limit = self._deadline_s
        nbytes = sum(view.nbytes for view in views)
        request = PullRequest(hint.key, digest, hint.generation, max(1, int(1000 * limit)), nbytes)
        pull = self._client.pull if self._mooncake is None else self._mooncake.pull
        status, answer = pull(hint.address, request, views, limit)
        self.counts[f"pulls_{status.value}"] += 1
        if status is Status.OK and answer is not None:
            self.counts["pulled_bytes"] += nbytes
            self._keep(digest, views, answer)
        return status, answer

    def stats(self) -> dict[str, int]:
        """Counters of both sides, and what waits."""
        sides = Counter(self.counts)
        sides.update({f"client_{k}": v for k, v in self._client.counts.items()})
        sides.update({f"served_{k}": v for k, v in self._service.counts.items()})
        if self._mooncake is not None:
            sides.update({f"mooncake_{k}": v for k, v in self._mooncake.counts.items()})
        return {
            **sides,
            "dead_peers": self._client.health.dead(),
            "location_records": len(self._own),
            "waiting_announcements": len(self._waiting),
        }

    def close(self) -> None:
        """Stop serving; what the location service still says expires by itself."""
        with self._wake:
            if self._closed:
                return
            self._closed = True
            self._wake.notify_all()
        self._thread.join()
        self._service.stop()
        self._locations.close()
        self._client.close()
        if self._mooncake is not None:
            self._mooncake.close()

    # -- inside

    def _open_mooncake(self) -> MooncakeTransport | None:
        if self._settings.transport != "mooncake":
            return None
        host, _ = split_address(self._settings.advertise or self._settings.listen)
        return MooncakeTransport(
            self._client,
            host=host,
            protocol=self._settings.mooncake_protocol,
            device=self._settings.mooncake_device,
        )

    def _open_locations(self) -> WindowLocations:
        kind = self._settings.locations
        if kind == "peers":
            peers = PeerLocations(self._client, self._own, address=lambda: self.address)
            peers.set_members(self._settings.members)
            return peers
        if kind == "redis":
            return RedisLocations(self._settings.redis_url or "", lookup_timeout_s=self._deadline_s)
        return kind

    def _usable(self, hint: WindowRecord) -> bool:
        return hint.machine != self.machine and self._client.health.alive(hint.address)

    def _hint(self, record: HostRecord) -> WindowRecord:
        ttl_ms = int(1000 * self._ttl_s)
        key = record.digest[: wire.KEY_BYTES]
        return WindowRecord(
            key,
            self.machine,
            self.generation,
            ttl_ms,
            record.data.nbytes,
            record.marks,
            self.address,
        )

    def _former(self, record: HostRecord) -> bytes | None:
        """The window of the nearest earlier boundary of the same chain that is held here."""
        block = self._host.peek(KIND_CODES["block"], record.digest)
        for _ in range(MAX_CHAIN_STEPS):
            if block is None:
                return None
            parent = block.parent
            if self._host.contains(_STATE, parent):
                return parent
            block = self._host.peek(KIND_CODES["block"], parent)
        return None

    def _hold(self, request: PullRequest) -> Held | int:
        """In the service's thread: pin the window that is asked for."""
        if request.generation != self.generation:
            return wire.STALE
        record = self._host.pin(_STATE, request.digest)
        if record is None:
            return wire.UNKNOWN
        ttl_s = record.touched + self._ttl_s - self._clock.monotonic()
        if record.data.nbytes != request.nbytes or ttl_s <= 0:
            self._host.unpin([record])
            return wire.UNKNOWN
        if record.checksum is None:
            record.checksum = checksum_of([record.data.data])
        answer = PullAnswer(
            wire.HELD,
            record.approximate,
            record.generation,
            record.depth,
            int(1000 * ttl_s),
            record.data.nbytes,
            record.checksum,
        )
        return _HeldRecord(answer, record.data.data, self._host, record)

    def _keep(self, digest: bytes, views: Sequence[memoryview], answer: PullAnswer) -> None:
        room = self._host.take_many(_STATE, answer.nbytes, 1)
        if not room:
            return
        data, at = room[0], 0
        for view in views:
            data[at : at + view.nbytes] = view
            at += view.nbytes
        record = HostRecord(
            _STATE,
            digest,
            bytes(len(digest)),
            answer.n_blocks,
            data,
            quality_of(answer.approximate, answer.replay_generation),
            answer.checksum,
        )
        (published,) = self._host.publish_all([record])
        if published is record:
            # A copy lives no longer than the original would have, unless it is used here.
            record.touched = self._clock.monotonic() - self._ttl_s + answer.ttl_ms / 1000
        self._host.unpin([published])

    def _queue(self, news: _News) -> None:
        with self._wake:
            if self._closed:
                return
            if len(self._waiting) >= MAX_WAITING:
                self._waiting.popleft()
                self.counts["lost_announcements"] += 1
            self._waiting.append(news)
            self._wake.notify_all()

    def _tell(self) -> None:
        """The announcing thread: the location service may be slow, and no put waits for it."""
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._waiting or self._closed, MAINTAIN_S)
                if self._closed:
                    return
                batch = list(self._waiting)
                self._waiting.clear()
                self._busy = True
            self.retire()
            self._maintain()
            came = {news.key: news.record for news in batch}
            records = [record for record in came.values() if record is not None]
            gone = [key for key, record in came.items() if record is None]
            self._tell_locations(records, gone)

    def _tell_locations(self, records: list[WindowRecord], gone: list[bytes]) -> None:
        tasks: list[Callable[[], None]] = []
        if records:
            tasks.append(lambda: self._locations.publish(records))
        if gone:
            tasks.append(lambda: self._locations.withdraw(gone, self.machine))
        for task in tasks:
            try:
                task()
            except OSError:
                self.counts["announce_errors"] += 1
