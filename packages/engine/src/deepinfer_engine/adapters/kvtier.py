"""`PrefixStore` on `deepinfer_kvtier`. The only module that imports that package."""

from __future__ import annotations

import hashlib
import platform
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, create_model

import deepinfer_kvtier as kvtier
from deepinfer_engine.core.block_hashes import CacheChange, CacheTier, block_hashes
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.prefix_store import BorderState, Hit, Loaded, PrefixBlocks, Tokens
from deepinfer_engine.core.runner import CacheLayout
from deepinfer_engine.core.types import TrafficClass
from deepinfer_engine.core.windows import Recovery, WindowSource
from deepinfer_engine.errors import ConfigError, EngineUnavailable

MAX_NAMESPACES = 1024
COMMIT_DELAY_S = 0.002
"""A prompt's hand-over waits for its blocks to be findable: short groups, little waiting."""
PUT_TIMEOUT_S = 10.0
MAX_NAMES = 1 << 18
_KEY_BYTES = 16
_PULL = kvtier.Cost().tiers["peer"]
ANNOUNCE_TIMEOUT_S = 0.25
"""How long a publication waits for the window directory to hear of it."""


@dataclass(frozen=True, slots=True)
class WindowExchange:
    """How workers find and pull each other's windows.

    key: 32 bytes that all of them know. listen: "ip:port" others pull from, port 0 = any.
    directory: "peers", kept by the workers themselves, or the URL of a Redis or Valkey server.
    deadline_s: of one lookup and of one pull; then the window is rebuilt.
    """

    key: bytes
    listen: str = "127.0.0.1:0"
    directory: str = "peers"
    deadline_s: float = 0.2


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where records are kept, how long, and what is done about a lost window.

    directory: local, or with `shared` a mount that other machines write too; None = none.
    location: URLs of the location service that knows where in a shared directory records lie.
    tiers: URLs of the stores below, in the order they are asked.
    secret: 32 bytes that key all identities, and the shards of a location service by TCP; None =
        made and kept in the directory.
    memory_bytes: of blocks; window_bytes, window_ttl_s: of window states in memory.
    prefill_rate: tokens a second that are computed; what loads more slowly is not loaded.
    """

    directory: Path | None
    shared: bool = False
    location: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    secret: bytes | None = field(default=None, repr=False)
    memory_bytes: int = 256 << 20
    window_bytes: int = 128 << 20
    window_ttl_s: float = 180.0
    recovery: Recovery = field(default_factory=Recovery)
    prefill_rate: float = 2000.0
    exchange: WindowExchange | None = None


def shared_key(secret: bytes, purpose: str) -> bytes:
    """32 bytes for one purpose out of a longer-lived secret."""
    return hashlib.blake2b(purpose.encode(), key=secret[:64], digest_size=32).digest()


def open_store(
    settings: Path | StoreSettings, layout: CacheLayout, *, host_bytes: int = 256 << 20
) -> KVTierStore:
    """Open (or create) the cache these settings describe; several processes may share it.

    A path alone stands for a local directory with `host_bytes` of memory above it. Raises
    ConfigError when it cannot be used.
    """
    if isinstance(settings, Path):
        settings = StoreSettings(settings, memory_bytes=host_bytes)
    window_bytes = settings.window_bytes if layout.state_bytes else 0
    whole = settings.memory_bytes + window_bytes
    tiers: list[Any] = list(settings.tiers)
    path, mode = settings.directory, None
    try:
        if settings.location:
            tiers.insert(0, _located(settings))
            path = None
        elif settings.shared:
            mode = "shared-fs"
        cache = kvtier.open(
            path,
            mode=mode,
            secret=settings.secret,
            tiers=tiers,
            host_bytes=whole,
            state_share=window_bytes / whole if whole else 0.0,
            state_ttl_s=settings.window_ttl_s,
            commit_delay_s=COMMIT_DELAY_S,
            windows=_windows(settings.exchange) if layout.state_bytes else None,
        )
    except (kvtier.KVTierError, OSError) as error:
        raise ConfigError(f"cache {settings.directory or ''}: {error}") from None
    return KVTierStore(cache, layout, settings, waits=path is not None)


def _located(settings: StoreSettings) -> kvtier.FleetTierConfig:
    if settings.directory is None or settings.secret is None:
        raise ConfigError(
            "a location service tells where in a shared folder records lie: name the folder with "
            "cache_dir, and the secret of all machines with cache_secret_file"
        )
    return kvtier.FleetTierConfig.model_validate(
        {
            "path": settings.directory,
            "locations": settings.location,
            "key": settings.secret,
            "name": "located",
        }
    )


def _windows(exchange: WindowExchange | None) -> dict[str, Any] | None:
    if exchange is None:
        return None
    found: dict[str, Any] = {
        "key": exchange.key,
        "listen": exchange.listen,
        "deadline_ms": 1000 * exchange.deadline_s,
    }
    if exchange.directory != "peers":
        found |= {"locations": "redis", "redis_url": exchange.directory}
    return found


class KVTierStore:
    """One kvtier cache as the engine sees it: a namespace for each salt, whole-slot states.

    waits: whether a put is findable by other processes only when it is written; without a
    directory it is findable here at once, and written behind.
    """

    def __init__(
        self,
        cache: kvtier.Cache,
        layout: CacheLayout,
        settings: StoreSettings,
        *,
        waits: bool = True,
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._recovery = settings.recovery
        self._prefill_rate = settings.prefill_rate
        exchange = settings.exchange
        self._keeps_directory = exchange is not None and exchange.directory == "peers"
        self._waits = waits
        self._spec = kvtier.LayoutSpec(
            block_tokens=layout.block_tokens,
            kinds={"block": kvtier.parts(("block", layout.block_bytes))}
            | ({"state": kvtier.parts(("slot", layout.state_bytes))} if layout.state_bytes else {}),
        )
        self._want: tuple[Literal["block", "state"], ...] = (
            ("block", "state") if layout.state_bytes else ("block",)
        )
        self._namespaces: OrderedDict[str, kvtier.Namespace] = OrderedDict()
        self._lock = threading.Lock()
        self._shared_as = _shared_as(settings)
        self._told: Callable[[CacheChange], None] | None = None
        self._names: OrderedDict[bytes, int] = OrderedDict()
        """Of blocks as the cache tells of them, as routers know them: those of late prompts."""

    @property
    def window_address(self) -> str:
        """Where other workers pull windows from; empty without an exchange."""
        windows: Any = self._cache.windows
        return "" if windows is None else str(windows.address)

    def set_members(self, addresses: Sequence[str]) -> None:
        """The window addresses of all workers, this one included."""
        windows: Any = self._cache.windows
        if windows is not None and self._keeps_directory:
            try:
                windows.set_members(addresses)
            except kvtier.ConfigError as error:
                raise ConfigError(str(error)) from None

    @property
    def shared_as(self) -> str:
        return self._shared_as

    def follow(self, told: Callable[[CacheChange], None]) -> None:
        self._told = told
        self._cache.subscribe(self._came_or_went)

    def _came_or_went(self, event: kvtier.KVEvent) -> None:
        if event.kind != "block" or self._told is None:
            return
        name = self._names.get(event.key)
        if name is not None:
            self._told(CacheChange(event.what == "stored", _tier(event.tier), (name,)))

    def _learn(
        self,
        digests: Sequence[bytes],
        tokens: Tokens,
        salt: str,
        pictures: Sequence[Picture],
    ) -> list[int]:
        """What routers call these blocks; remembered for what the cache will tell of them."""
        size = self._layout.block_tokens
        names = block_hashes(tokens, salt, size, self._layout.layout_hash, pictures)
        with self._lock:
            for digest, name in zip(digests, names, strict=False):
                key = digest[:_KEY_BYTES]
                self._names.pop(key, None)
                self._names[key] = name
            while len(self._names) > MAX_NAMES:
                self._names.popitem(last=False)
        return names

    def _tell_found(self, match: kvtier.Match, names: Sequence[int]) -> None:
        """What a lookup has found, whoever put it there."""
        if self._told is None:
            return
        found: dict[CacheTier, list[int]] = {}
        for name, tier in zip(names, match.tiers(), strict=False):
            found.setdefault(_tier(tier), []).append(name)
        for tier, blocks in found.items():
            self._told(CacheChange(True, tier, tuple(blocks)))

    def match(
        self,
        tokens: Tokens,
        salt: str,
        *,
        limit_tokens: int | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Hit | None:
        max_blocks = None if limit_tokens is None else limit_tokens // self._layout.block_tokens
        namespace = self._namespace(salt)
        match = namespace.match(
            tokens,
            _media(pictures),
            want=self._want,
            max_blocks=max_blocks,
            leave_last=True,
            accept_approximate=self._recovery.mode == "bounded",
        )
        if self._told is not None:
            names = self._learn(match.digests, tokens, salt, pictures)
            self._tell_found(match, names[: match.block_prefix])
        if match.block_prefix == 0:
            match.release()
            return None
        if not self._layout.state_bytes:
            return self._hit(namespace, match, match.n_blocks, None)
        plan = namespace.plan(match, cost=self._cost(), mode=self._recovery.mode)
        if plan.n_blocks == 0:
            lost = match.state is None and not self._can_rebuild(match.block_prefix)
            match.release()
            return Hit(0, {}, None, "miss") if lost else None  # else loading would take longer
        source = _SOURCES.get(plan.state)
        if source is None:
            assert match.state is not None, "a plan that loads a state that is not there"
            source = _WHERE.get(match.state.tier, "stored")
        generation = plan.replay_generation if plan.approximate else 0
        return self._hit(namespace, match, plan.n_blocks, source, generation)

    def match_blocks(self, wanted: PrefixBlocks) -> Hit | None:
        namespace = self._namespace(wanted.salt)
        match = namespace.match(
            wanted.tokens,
            _media(wanted.pictures),
            want=("block",),
            leave_last=False,
            accept_approximate=wanted.generation > 0,
        )
        if match.block_prefix == 0:
            match.release()
            return None
        return self._hit(namespace, match, match.block_prefix, None)

    def _hit(
        self,
        namespace: kvtier.Namespace,
        match: kvtier.Match,
        n_blocks: int,
        window: WindowSource | None,
        generation: int = 0,
    ) -> Hit:
        by_tier: dict[str, int] = {}
        for tier in match.tiers()[:n_blocks]:
            by_tier[tier] = by_tier.get(tier, 0) + 1
        n_tokens = n_blocks * self._layout.block_tokens
        return Hit(n_tokens, by_tier, (namespace, match), window, generation)

    def _cost(self) -> kvtier.Cost:
        """What loading has been taking. Of pulls that is not counted: each has one try within a
        deadline, and a peer that was slow once would never be asked again."""
        recovery, seen = self._recovery, self._cache.costs.current()
        return replace(
            seen,
            tiers={**seen.tiers, "peer": _PULL},
            prefill_tok_s=self._prefill_rate,
            replay_tokens=recovery.bounded_tokens,
            exact_replay_tokens=recovery.exact_tokens,
        )

    def load(self, hit: Hit, blocks: Sequence[memoryview], state: memoryview) -> Loaded:
        namespace, match = _handle(hit)
        job = namespace.load(
            match,
            blocks=slice(0, len(blocks)),
            dst=blocks,
            state_dst=state if hit.loads_state else None,
            wait=True,
        )
        result = job.wait()
        assert result is not None, "a load that was waited for has no result"
        good = result.ok_prefix * self._layout.block_tokens
        return Loaded(min(good, hit.n_tokens), result.state is kvtier.Status.OK)

    def without_state(self, hit: Hit) -> Hit | None:
        if not self._can_rebuild(hit.n_tokens // self._layout.block_tokens):
            return None
        if self._recovery.mode == "bounded":
            return replace(hit, window="bounded_replay", generation=hit.generation + 1)
        return replace(hit, window="exact_replay")

    def _can_rebuild(self, n_blocks: int) -> bool:
        """Whether the state behind so many blocks takes fewer tokens than they hold."""
        recovery = self._recovery
        bounded = recovery.mode == "bounded"
        needed = recovery.bounded_tokens if bounded else recovery.exact_tokens
        return recovery.mode != "none" and n_blocks * self._layout.block_tokens > needed

    def release(self, hit: Hit) -> None:
        if hit.handle is not None:
            _handle(hit)[1].release()

    def put(
        self,
        tokens: Tokens,
        salt: str,
        first_block: int,
        blocks: Sequence[memoryview],
        states: Sequence[BorderState],
        traffic_class: TrafficClass,
        pictures: Sequence[Picture] = (),
        generation: int = 0,
    ) -> Callable[[], None]:
        namespace = self._namespace(salt)
        hasher = namespace.hasher()
        hasher.extend(tokens, _media(pictures))
        digests = hasher.digests
        if self._told is not None and blocks:
            self._learn(digests, tokens, salt, pictures)
        quality: dict[str, Any] = {
            "cls": traffic_class,
            "confirmed_tokens": len(tokens),
            "approximate": generation > 0,
            "replay_generation": generation,
        }
        tickets: list[kvtier.PutTicket] = []
        if blocks:
            tickets.append(
                namespace.put(
                    digests[first_block : first_block + len(blocks)],
                    list(blocks),
                    parents=digests[first_block - 1] if first_block else None,
                    first_block=first_block,
                    durability="flushed" if self._waits else "behind",
                    copy=not self._waits,
                    **quality,
                )
            )
        for state in states:
            n_blocks = state.position // self._layout.block_tokens
            ticket = namespace.put_state(
                digests[n_blocks - 1],
                state.data,
                n_blocks=n_blocks,
                parent=digests[n_blocks - 2] if n_blocks > 1 else None,
                durability="flushed" if state.persist and self._waits else "behind",
                copy=True,  # it is kept in memory, wherever else it goes
                persist=state.persist,
                **quality,
            )
            if state.persist:
                tickets.append(ticket)

        def findable() -> None:
            for ticket in tickets:
                ticket.wait(PUT_TIMEOUT_S)
            if states and self._cache.windows is not None:
                windows: Any = self._cache.windows
                windows.settle(ANNOUNCE_TIMEOUT_S)

        return findable

    def flush(self) -> None:
        report = self._cache.flush()
        if not report.done:
            raise EngineUnavailable(f"{report.pending} cache records are not written yet")

    def stats(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        stats = self._cache.stats()
        for group in ("hits", "puts", "loads", "host", "disk", "queue", "leases", "windows"):
            found |= _numbers(group, stats[group])
        for name, values in stats["tiers"].items():
            found |= _numbers(f"tier_{name}", values)
        return found

    def close(self) -> None:
        self._cache.close()

    def _namespace(self, salt: str) -> kvtier.Namespace:
        with self._lock:
            namespace = self._namespaces.pop(salt, None)
            if namespace is None:
                namespace = self._cache.namespace(
                    self._spec, model=self._layout.layout_hash, salt=salt
                )
            self._namespaces[salt] = namespace
            if len(self._namespaces) > MAX_NAMESPACES:
                self._namespaces.popitem(last=False)
            return namespace


_SOURCES: Mapping[str, WindowSource] = {
    "replay": "bounded_replay",
    "exact_replay": "exact_replay",
}


def _tier(tier: str) -> CacheTier:
    return "memory" if tier == "host" else "below"


def _shared_as(settings: StoreSettings) -> str:
    """A digest of what the blocks lie in, on this machine or beyond it."""
    if settings.directory is None and not settings.tiers:
        return ""
    place = None if settings.directory is None else str(settings.directory.resolve())
    alone = not (settings.shared or settings.location or settings.tiers)
    names = (place, *settings.location, *settings.tiers, platform.node() if alone else "")
    return hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()


_WHERE: Mapping[str, WindowSource] = {"host": "local", "peer": "peer"}


def _numbers(group: str, values: Mapping[str, Any]) -> dict[str, float]:
    return {
        f"{group}_{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
    }


def _media(pictures: Sequence[Picture]) -> list[kvtier.MediaItem]:
    return [kvtier.MediaItem(p.start, p.length, p.digest) for p in pictures]


def _handle(hit: Hit) -> tuple[kvtier.Namespace, kvtier.Match]:
    handle = hit.handle
    if not isinstance(handle, tuple):
        raise TypeError(f"a hit of another store: {handle!r}")
    namespace, match = handle
    return namespace, match


CACHE_EVENTS_VERSION = 1
"""Of `cache_event_schema`; a test holds it and what kvtier tells together."""


def cache_event_schema() -> dict[str, Any]:
    """JSON Schema of what a cache tells subscribers (`kvtier.Cache.subscribe`), bytes in hex."""
    digest: Any = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    told: dict[Any, Any] = {bytes: digest, bytes | None: digest | None}
    fields = get_type_hints(kvtier.KVEvent)
    event: dict[str, Any] = {name: (told.get(kind, kind), ...) for name, kind in fields.items()}
    model = create_model("CacheEvent", __config__={"extra": "forbid"}, **event)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "version": CACHE_EVENTS_VERSION,
        **model.model_json_schema(),
        "title": "A record of the prompt cache that came to a tier, or left it",
    }
