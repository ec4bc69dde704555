"""The location service as callers see it: many shards, one answer, nothing waited for long.

Keys are spread by rendezvous hashing: with a shard more or less, only its own keys move. A shard
that does not answer within the deadline costs misses, nothing else; after three in a row it is left
alone for a while.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.remote.location import DEFAULT_PORT
from deepinfer_kvtier.remote.location.messages import KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES
from deepinfer_kvtier.remote.location.redis import RedisShard
from deepinfer_kvtier.remote.location.search import PROBES_A_ROUND, prefix_length
from deepinfer_kvtier.remote.location.server import is_loopback
from deepinfer_kvtier.remote.location.tcp import TcpShard

DEADLINES_TO_DEAD = 3
RETRY_S = 30.0
MAX_SHARDS = 1024

_R = TypeVar("_R")


class Shard(Protocol):
    """One part of the location service; every call may raise OSError."""

    async def lookup(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def publish(self, items: Sequence[tuple[bytes, bytes]], ttl_s: int) -> None: ...

    async def retract(self, keys: Sequence[bytes]) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Member:
    """A shard and what its recent requests came to."""

    shard: Shard
    failures: int = 0
    dead_until: float = float("-inf")


class LocationClient:
    """Lookups and publications over all shards. Safe from several threads; owns one of its own.

    urls:       "tcp://host:port" or "redis://host:port/db", the same list in every process.
    key:        shared key of the TCP shards; empty only for those on this machine.
    prefix:     id of the store, so that several can share a Redis server.
    deadline_s: of one round trip to one shard.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: bytes,
        prefix: bytes,
        clock: Clock,
        deadline_s: float = 0.05,
    ) -> None:
        if not 0 < len(urls) <= MAX_SHARDS or len(set(urls)) != len(urls):
            raise ConfigError(
                f"a location service has 1 to {MAX_SHARDS} different shards, got {len(urls)}"
            )
        makers = [_maker(url, key, prefix) for url in urls]
        self._clock = clock
        self._deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self._seeds: NDArray[np.uint64] = np.array(
            [xxhash.xxh3_64_intdigest(_name(url)) for url in urls], dtype=np.uint64
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvtier-locations", daemon=True
        )
        self._thread.start()
        try:
            self._members = self._run(self._make(makers)).result()
        except BaseException:
            self.close()
            raise

    # -- calls

    def search(self, keys: Sequence[bytes]) -> int:
        """Leading keys that are known, found in rounds of 24; exact only as far as hints are."""

        def present(depths: Sequence[int]) -> list[bool]:
            self.counts["search_rounds"] += 1
            self.counts["search_keys"] += len(depths)
            return [v is not None for v in self.lookup([keys[depth - 1] for depth in depths])]

        return prefix_length(len(keys), present, probes=PROBES_A_ROUND)

    def lookup(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in order; None for what is unknown, or kept by a shard that does not answer."""
        found: list[bytes | None] = [None] * len(keys)
        self.counts["lookup_keys"] += len(keys)

        async def ask(member: _Member, which: list[int]) -> None:
            values = await self._guarded(member, member.shard.lookup([keys[i] for i in which]))
            for i, value in zip(which, values or (), strict=False):
                found[i] = value

        self._each(keys, ask)
        return found

    def publish(self, items: Sequence[tuple[bytes, bytes]], ttl_s: float) -> None:
        """Tell everybody; what a shard does not take in time is not known there."""
        for _, value in items:
            if not 0 < len(value) <= MAX_VALUE_BYTES:
                raise ConfigError(f"a value has 1 to {MAX_VALUE_BYTES} bytes, got {len(value)}")

        async def tell(member: _Member, which: list[int]) -> None:
            await self._guarded(member, member.shard.publish([items[i] for i in which], int(ttl_s)))

        self._each([key for key, _ in items], tell)

    def retract(self, keys: Sequence[bytes]) -> None:
        """Take hints back."""

        async def tell(member: _Member, which: list[int]) -> None:
            await self._guarded(member, member.shard.retract([keys[i] for i in which]))

        self._each(keys, tell)

    def shard_of(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Number of the shard of each key: the one whose mix with the key is largest."""
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ConfigError(f"a location key has {KEY_BYTES} bytes, got {len(key)}")
        low = np.frombuffer(b"".join(key[:8] for key in keys), dtype="<u8").astype(np.uint64)
        return np.argmax(_mixed(low[:, None] ^ self._seeds[None, :]), axis=1)

    def usage(self) -> dict[str, int]:
        """Counters; dead_shards: those left alone at the moment."""
        now = self._clock.monotonic()
        dead = sum(member.dead_until > now for member in self._members)
        return {"shards": len(self._members), "dead_shards": dead, **self.counts}

    def close(self) -> None:
        """Drop the connections and stop the thread."""
        if self._loop.is_closed():
            return
        self._run(self._close_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- inside

    async def _make(self, makers: list[Callable[[], Shard]]) -> list[_Member]:
        return [_Member(make()) for make in makers]

    async def _close_all(self) -> None:
        for member in getattr(self, "_members", ()):
            await member.shard.close()

    def _run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _each(
        self, keys: Sequence[bytes], work: Callable[[_Member, list[int]], Awaitable[None]]
    ) -> None:
        """Run `work` for every shard that holds some of the keys, all at the same time."""
        if not keys:
            return
        owners = self.shard_of(keys)
        jobs: list[tuple[_Member, list[int]]] = []
        for number in np.unique(owners):
            which = [int(i) for i in np.flatnonzero(owners == number)]
            jobs.extend(
                (self._members[number], which[start : start + MAX_KEYS])
                for start in range(0, len(which), MAX_KEYS)
            )

        async def run_all() -> None:
            await asyncio.gather(*(work(member, which) for member, which in jobs))

        self._run(run_all()).result()

    async def _guarded(self, member: _Member, request: Awaitable[_R]) -> _R | None:
        """A request within the deadline; None when it failed or the shard is left alone."""
        if self._clock.monotonic() < member.dead_until:
            self.counts["skipped_requests"] += 1
            _discard(request)
            return None
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await request
        except (OSError, TimeoutError):
            self.counts["failed_requests"] += 1
            member.failures += 1
            if member.failures >= DEADLINES_TO_DEAD:
                member.dead_until = self._clock.monotonic() + RETRY_S
                # One more failure after the pause is enough to pause again.
                member.failures = DEADLINES_TO_DEAD - 1
                await member.shard.close()
            return None
        member.failures = 0
        return answer


def _discard(request: Any) -> None:
    request.close()


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _name(url: str) -> bytes:
    """What identifies a shard: its place, not the credentials to reach it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}{parts.path}".encode()


def _maker(url: str, key: bytes, prefix: bytes) -> Callable[[], Shard]:
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as cause:
        raise ConfigError(f"the port of a location shard is wrong: {cause}") from None
    if parts.scheme in ("redis", "rediss", "unix"):
        return lambda: RedisShard(url, prefix)
    if parts.scheme != "tcp" or host is None:
        raise ConfigError("a location shard is tcp://host:port or redis://host:port/db")
    if not key and not is_loopback(host):
        raise ConfigError("a location service on another machine needs a shared key: set `key`")
    return lambda: TcpShard(host, port, key)
