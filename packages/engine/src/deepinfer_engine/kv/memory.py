"""A `PrefixStore` in this process's memory: for tests, and for a cache that need not outlive it.

Least recently used chains go first when `limit_bytes` is passed. Identity is the exact token
prefix, its pictures and salt, hashed block by block.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from deepinfer_engine.core.block_hashes import CacheChange, block_hashes
from deepinfer_engine.core.pictures import Picture, overlapping
from deepinfer_engine.core.prefix_store import BorderState, Hit, Loaded, PrefixBlocks, Tokens
from deepinfer_engine.core.runner import CacheLayout
from deepinfer_engine.core.types import TrafficClass

Key = tuple[str, bytes]


class MemoryStore:
    """Blocks and states by chained digest; thread-safe."""

    def __init__(self, layout: CacheLayout, *, limit_bytes: int = 256 << 20) -> None:
        self._layout = layout
        self._limit = limit_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[Key, bytes] = OrderedDict()
        self._bytes = 0
        self._counters: Counter[str] = Counter()
        self._told: Callable[[CacheChange], None] | None = None
        self._names: dict[bytes, int] = {}
        """Of the blocks here, as routers know them; empty while nobody follows."""

    def match(
        self,
        tokens: Tokens,
        salt: str,
        *,
        limit_tokens: int | None = None,
        pictures: Sequence[Picture] = (),
    ) -> Hit | None:
        limit = len(tokens) - 1 if limit_tokens is None else min(limit_tokens, len(tokens) - 1)
        digests = self._digests(tokens, salt, limit, pictures)
        best = 0
        with self._lock:
            for i, digest in enumerate(digests):
                if ("block", digest) not in self._records:
                    break
                if not self._layout.state_bytes or ("state", digest) in self._records:
                    best = i + 1
        if best == 0:
            return None
        window = "local" if self._layout.state_bytes else None
        return Hit(
            best * self._layout.block_tokens, {"memory": best}, tuple(digests[:best]), window
        )

    def match_blocks(self, wanted: PrefixBlocks) -> Hit | None:
        tokens = wanted.tokens
        digests = self._digests(tokens, wanted.salt, len(tokens), wanted.pictures)
        with self._lock:
            there = [("block", digest) in self._records for digest in digests]
        best = (*there, False).index(False)
        size = self._layout.block_tokens
        return Hit(best * size, {"memory": best}, tuple(digests[:best])) if best else None

    def load(self, hit: Hit, blocks: Sequence[memoryview], state: memoryview) -> Loaded:
        digests = hit.handle
        assert isinstance(digests, tuple)
        with self._lock:
            for i, (digest, view) in enumerate(zip(digests, blocks, strict=True)):
                record = self._get(("block", digest))
                if record is None:
                    return Loaded(i * self._layout.block_tokens, False)
                view[:] = record
            if hit.loads_state:
                record = self._get(("state", digests[-1]))
                if record is None:
                    return Loaded(hit.n_tokens, False)
                state[:] = record
        return Loaded(hit.n_tokens, True)

    def without_state(self, hit: Hit) -> Hit | None:
        """Nothing is rebuilt here: a hit ends where its state is."""
        return None

    def release(self, hit: Hit) -> None:
        """Nothing is leased: a record evicted between match and load is a shorter hit."""

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
        digests = self._digests(tokens, salt, len(tokens), pictures)
        size, layout_hash = self._layout.block_tokens, self._layout.layout_hash
        with self._lock:
            if self._told is not None and blocks:
                names = block_hashes(tokens, salt, size, layout_hash, pictures)
                self._names |= zip(digests, names, strict=True)
            for i, block in enumerate(blocks):
                self._set(("block", digests[first_block + i]), bytes(block))
            for state in states:
                digest = digests[state.position // self._layout.block_tokens - 1]
                self._set(("state", digest), bytes(state.data))
        return _findable

    @property
    def window_address(self) -> str:
        return ""

    def set_members(self, addresses: Sequence[str]) -> None:
        """Nobody else reads this memory."""

    @property
    def shared_as(self) -> str:
        return ""

    def follow(self, told: Callable[[CacheChange], None]) -> None:
        self._told = told

    def flush(self) -> None:
        """Memory survives nothing; there is nothing to wait for."""

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            return {"bytes": self._bytes, "records": len(self._records), **self._counters}

    def close(self) -> None:
        with self._lock:
            self._records.clear()
            self._bytes = 0

    def _digests(
        self, tokens: Tokens, salt: str, limit: int, pictures: Sequence[Picture]
    ) -> list[bytes]:
        size = self._layout.block_tokens
        digest = hashlib.blake2b(
            f"{self._layout.layout_hash}/{salt}".encode(), digest_size=16
        ).digest()
        data = np.asarray(tokens, dtype="<u4").tobytes()
        digests: list[bytes] = []
        for i in range(limit // size):
            piece = data[4 * i * size : 4 * (i + 1) * size]
            inside = overlapping(pictures, i * size, (i + 1) * size)
            seen = b"".join(p.digest + p.start.to_bytes(8) for p in inside)
            digest = hashlib.blake2b(digest + piece + seen, digest_size=16).digest()
            digests.append(digest)
        return digests

    def _get(self, key: Key) -> bytes | None:
        record = self._records.get(key)
        if record is not None:
            self._records.move_to_end(key)
        return record

    def _set(self, key: Key, record: bytes) -> None:
        old = self._records.pop(key, None)
        self._bytes += len(record) - (len(old) if old else 0)
        self._records[key] = record
        self._tell(key, stored=True)
        while self._bytes > self._limit:
            evicted, gone = self._records.popitem(last=False)
            self._bytes -= len(gone)
            self._counters["evicted"] += 1
            self._tell(evicted, stored=False)

    def _tell(self, key: Key, *, stored: bool) -> None:
        kind, digest = key
        name = self._names.get(digest) if kind == "block" else None
        if name is not None and self._told is not None:
            self._told(CacheChange(stored, "memory", (name,)))
            if not stored:
                del self._names[digest]


def _findable() -> None:
    """A put into memory is findable when it returns."""
