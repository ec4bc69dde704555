"""`PrefixStore` on `deepinfer_kvtier`. The only module that imports that package."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import deepinfer_kvtier as kvtier
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.prefix_store import Hit, Tokens
from deepinfer_engine.core.runner import CacheLayout
from deepinfer_engine.core.types import TrafficClass
from deepinfer_engine.errors import ConfigError, EngineUnavailable

MAX_NAMESPACES = 1024
COMMIT_DELAY_S = 0.002
"""A prompt's hand-over waits for its blocks to be findable: short groups, little waiting."""
PUT_TIMEOUT_S = 10.0


def open_store(directory: Path, layout: CacheLayout, *, host_bytes: int = 256 << 20) -> KVTierStore:
    """Open (or create) a cache directory for this layout; several processes may share it.

    Raises ConfigError when the directory cannot be used.
    """
    try:
        cache = kvtier.open(directory, host_bytes=host_bytes, commit_delay_s=COMMIT_DELAY_S)
    except (kvtier.KVTierError, OSError) as error:
        raise ConfigError(f"cache directory {directory}: {error}") from None
    return KVTierStore(cache, layout)


class KVTierStore:
    """One kvtier cache as the engine sees it: a namespace for each salt, whole-slot states."""

    def __init__(self, cache: kvtier.Cache, layout: CacheLayout) -> None:
        self._cache = cache
        self._layout = layout
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

    def match(
        self,
        tokens: Tokens,
        salt: str,
        *,
        limit_tokens: int | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Hit | None:
        max_blocks = None if limit_tokens is None else limit_tokens // self._layout.block_tokens
        match = self._namespace(salt).match(
            tokens, _media(pictures), want=self._want, max_blocks=max_blocks, leave_last=True
        )
        if match.n_blocks == 0:
            match.release()
            return None
        by_tier: dict[str, int] = {}
        for span in match.spans:
            count = min(span.count, max(0, match.n_blocks - span.start))
            by_tier[span.tier] = by_tier.get(span.tier, 0) + count
        return Hit(match.n_tokens, by_tier, (self._namespace(salt), match))

    def load(self, hit: Hit, blocks: Sequence[memoryview], state: memoryview) -> int:
        namespace, match = _handle(hit)
        job = namespace.load(
            match, dst=blocks, state_dst=state if self._layout.state_bytes else None, wait=True
        )
        result = job.wait()
        if result.ok:
            return hit.n_tokens
        good = result.ok_prefix * self._layout.block_tokens
        return min(good, hit.n_tokens - self._layout.block_tokens)

    def release(self, hit: Hit) -> None:
        _handle(hit)[1].release()

    def put(
        self,
        tokens: Tokens,
        salt: str,
        first_block: int,
        blocks: Sequence[memoryview],
        states: Sequence[tuple[int, memoryview]],
        traffic_class: TrafficClass,
        pictures: Sequence[Picture] = (),
    ) -> Callable[[], None]:
        namespace = self._namespace(salt)
        hasher = namespace.hasher()
        hasher.extend(tokens, _media(pictures))
        digests = hasher.digests
        tickets: list[kvtier.PutTicket] = []
        if blocks:
            tickets.append(
                namespace.put(
                    digests[first_block : first_block + len(blocks)],
                    list(blocks),
                    parents=digests[first_block - 1] if first_block else None,
                    first_block=first_block,
                    cls=traffic_class,
                    durability="flushed",
                    copy=False,
                    confirmed_tokens=len(tokens),
                )
            )
        for position, state in states:
            n_blocks = position // self._layout.block_tokens
            tickets.append(
                namespace.put_state(
                    digests[n_blocks - 1],
                    state,
                    n_blocks=n_blocks,
                    parent=digests[n_blocks - 2] if n_blocks > 1 else None,
                    cls=traffic_class,
                    durability="flushed",
                    copy=False,
                    confirmed_tokens=len(tokens),
                )
            )

        def findable() -> None:
            for ticket in tickets:
                ticket.wait(PUT_TIMEOUT_S)

        return findable

    def flush(self) -> None:
        report = self._cache.flush()
        if not report.done:
            raise EngineUnavailable(f"{report.pending} cache records are not written yet")

    def stats(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        stats = self._cache.stats()
        for group in ("hits", "puts", "loads", "host", "disk", "queue", "leases"):
            for name, value in stats[group].items():
                if isinstance(value, int | float):
                    found[f"{group}_{name}"] = float(value)
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


def _media(pictures: Sequence[Picture]) -> list[kvtier.MediaItem]:
    return [kvtier.MediaItem(p.start, p.length, p.digest) for p in pictures]


def _handle(hit: Hit) -> tuple[kvtier.Namespace, kvtier.Match]:
    handle = hit.handle
    if not isinstance(handle, tuple):
        raise TypeError(f"a hit of another store: {handle!r}")
    namespace, match = handle
    return namespace, match
