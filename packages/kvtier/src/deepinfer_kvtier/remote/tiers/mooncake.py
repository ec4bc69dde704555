"""Mooncake Store as a tier between host memory and storage: fast pooled memory, and volatile.

A value is the 192-byte trailer and then the payload, so its size tells the payload's. Everything
read is verified: after a restart of its master the pool has forgotten what it was told to keep,
and other programs may write to it. Records that bounded replay has made approximate are not kept
here, since a lookup in the pool cannot say so.
"""

from __future__ import annotations

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Literal, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.base.values import NO_ROW, Status
from deepinfer_kvtier.flow.tier import FOUND, ScanEntry, TierCaps
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.remote.tiers.slots import open_slot, trailer_of

_R = TypeVar("_R")
# Documented answers of the store's client.
_ABSENT: Final = -704
_NO_ROOM: Final = (-200, -201)


class MooncakeTierConfig(BaseModel):
    """A pool of memory behind a `mooncake_master`.

    master:        "host:port" of the master.
    hostname:      "host:port" under which the other members of the pool reach this process.
    metadata:      "P2PHANDSHAKE", or the URL of a metadata server.
    protocol:      "tcp" or "rdma"; device: of RDMA.
    segment_bytes: memory this process lends to the pool; 0 = it only uses the others'.
    staging_bytes: memory through which records travel.
    prefix:        before every key, so that several programs can share a pool.
    timeout_s:     of one batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    master: str = Field(pattern=r"^.+:[0-9]+$")
    hostname: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    segment_bytes: int = Field(default=512 << 20, ge=0)
    staging_bytes: int = Field(default=16 << 20, ge=4096)
    prefix: str = Field(default="kvtier", pattern="^[A-Za-z0-9_-]{1,32}$")
    name: str = "mooncake"
    timeout_s: float = Field(default=1.0, gt=0)

    @classmethod
    def parse(cls, url: str) -> MooncakeTierConfig:
        """From "mooncake://master-host:port?hostname=...". raises: ConfigError."""
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        try:
            return cls.model_validate({"master": parts.netloc, **query})
        except ValidationError as cause:
            wrong = "; ".join(
                f"{'.'.join(str(at) for at in error['loc'])}: {error['msg']}"
                for error in cause.errors(include_input=False)
            )
            raise ConfigError(f"invalid Mooncake tier: {wrong}") from None


class Pool(Protocol):
    """The documented methods of `MooncakeDistributedStore` that are used here."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def get_size(self, key: str) -> int: ...

    def batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[int]: ...

    def batch_get_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[int]: ...

    def remove(self, key: str) -> int: ...

    def close(self) -> int: ...


def connect(config: MooncakeTierConfig) -> Pool:
    """A client of the pool. raises: ConfigError."""
    try:
        module: Any = importlib.import_module("mooncake.store")
    except ImportError as cause:
        raise ConfigError(
            'a Mooncake tier needs the extra "mooncake" and the system library libibverbs:'
            f' pip install "./packages/kvtier[mooncake]", apt install libibverbs1 ({cause})'
        ) from cause
    pool: Any = module.MooncakeDistributedStore()
    answer = pool.setup(
        config.hostname,
        config.metadata,
        config.segment_bytes,
        config.staging_bytes,
        config.protocol,
        config.device,
        config.master,
    )
    if answer != 0:
        raise ConfigError(
            f"cannot join the Mooncake pool at {config.master}: its client answered {answer};"
            " is mooncake_master running there?"
        )
    return pool


class MooncakeTier:
    """One process's use of a pool. One batch travels at a time, through a registered buffer."""

    def __init__(self, config: MooncakeTierConfig, pool: Pool, clock: Clock) -> None:
        self.name = config.name
        self.caps = TierCaps(
            persistent=False, shared=True, seals=True, compressed=True, max_batch=64
        )
        self.counts: Counter[str] = Counter()
        self._config = config
        self._pool = pool
        self._clock = clock
        self._staging: NDArray[np.uint8] = np.zeros(config.staging_bytes, dtype=np.uint8)
        self._base = int(self._staging.ctypes.data)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvtier-mooncake")
        self._turn = threading.Lock()
        self._hung: Future[Any] | None = None
        if pool.register_buffer(self._base, self._staging.nbytes) != 0:
            raise ConfigError("the Mooncake client refuses the staging buffer; make it smaller")

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """FOUND rows up to the first miss. raises: OSError.

        Records of one chain and kind have one size, or are compressed: one of them is asked for.
        """
        found = np.zeros(len(digests), dtype=FOUND)
        found["length"] = NO_ROW
        keys = [self._key(kind, shard, digest) for digest in digests]
        there = self._call(lambda: self._pool.batch_is_exist(keys))
        if any(answer < 0 for answer in there):
            raise OSError(f"the Mooncake pool answered {min(there)}")
        hits = [i for i, answer in enumerate(there) if answer == 1]
        if hits:
            size = self._call(lambda: self._pool.get_size(keys[hits[0]]))
            if size >= fmt.TRAILER_BYTES:
                found["length"][hits] = size - fmt.TRAILER_BYTES
        return found

    def get_into(
        self, kind: int, shard: int, wanted: Sequence[Wanted], *, in_time: Callable[[], bool]
    ) -> list[Status]:
        """Verified reads through the staging buffer. raises: OSError."""
        statuses = [Status.MISS] * len(wanted)
        for batch in self._batches([want.nbytes for want in wanted]):
            if not in_time():
                for i, _, _ in batch:
                    statuses[i] = Status.TIMEOUT
                continue
            keys = [self._key(kind, shard, wanted[i].digest) for i, _, _ in batch]
            with self._turn:
                answers = self._transfer(self._pool.batch_get_into, keys, batch)
                for (i, at, size), answer in zip(batch, answers, strict=True):
                    statuses[i] = self._open(kind, shard, wanted[i], at, size, answer)
            bad = [k for k, (i, _, _) in zip(keys, batch, strict=True) if _is_bad(statuses[i])]
            for key in bad:
                # Else the good record could never take its place: a key is written once.
                self._call(lambda key=key: self._pool.remove(key))
        return statuses

    def put_from(self, batch: Sequence[EncodedRecord]) -> list[Status]:
        """Copy records into the pool; FULL when it has no room. raises: OSError."""
        statuses = [Status.OK] * len(batch)
        exact = [i for i, r in enumerate(batch) if not (r.approximate or r.generation)]
        self.counts["skipped_approximate"] += len(batch) - len(exact)
        for group in self._batches([batch[i].nbytes for i in exact]):
            records = [batch[exact[j]] for j, _, _ in group]
            keys = [self._key(r.kind, r.shard, r.digest) for r in records]
            with self._turn:
                for record, (_, at, size) in zip(records, group, strict=True):
                    self._stage(record, at, size)
                answers = self._transfer(self._pool.batch_put_from, keys, group)
            for (j, _, _), answer in zip(group, answers, strict=True):
                if answer in _NO_ROOM:
                    statuses[exact[j]] = Status.FULL
                elif answer != 0:
                    statuses[exact[j]] = Status.ERROR
        return statuses

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Remove records now. raises: OSError."""
        keys = [self._key(kind, shard, digest) for digest in digests]
        return sum(self._call(lambda key=key: self._pool.remove(key)) == 0 for key in keys)

    def scan(self, cursor: str | None) -> tuple[Sequence[ScanEntry], str | None]:
        """A pool cannot be listed."""
        return (), None

    def usage(self) -> dict[str, int]:
        """Counters."""
        return dict(self.counts)

    def health(self) -> Literal["ok", "degraded", "down"]:
        """ "down" while a call has not come back, "degraded" once something came back damaged."""
        if self._hung is not None and not self._hung.done():
            return "down"
        return "degraded" if self.counts["corrupt"] else "ok"

    def sync(self) -> None:
        """Nothing here is durable."""

    def maintain(self) -> None:
        """The pool evicts by itself."""

    def close(self) -> None:
        """Leave the pool, unless a call still hangs in it."""
        if self._hung is None or self._hung.done():
            self._thread.submit(self._pool.close).result()
            self._thread.shutdown(wait=True)
        else:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # -- inside

    def _key(self, kind: int, shard: int, digest: bytes) -> str:
        return f"{self._config.prefix}/{kind:02x}{shard:02x}{digest[:16].hex()}"

    def _batches(self, payloads: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """(index, offset in the staging buffer, bytes) in groups that fit the buffer.

        A record larger than the whole buffer is left out: it can be neither put nor found.
        """
        batches: list[list[tuple[int, int, int]]] = []
        end = 0
        for i, payload in enumerate(payloads):
            size = payload + fmt.TRAILER_BYTES
            if size > self._staging.nbytes:
                continue
            if not batches or end + size > self._staging.nbytes:
                batches.append([])
                end = 0
            batches[-1].append((i, end, size))
            end += (size + 7) & ~7
        return batches

    def _stage(self, record: EncodedRecord, at: int, size: int) -> None:
        trailer = trailer_of(record, now_ms=int(self._clock.wall() * 1000), sequence=0).pack()
        self._staging[at : at + len(trailer)] = np.frombuffer(trailer, dtype=np.uint8)
        at += len(trailer)
        for view in record.views:
            self._staging[at : at + view.nbytes] = np.frombuffer(view, dtype=np.uint8)
            at += view.nbytes

    def _open(self, kind: int, shard: int, want: Wanted, at: int, size: int, answer: int) -> Status:
        if answer == _ABSENT or 0 <= answer < fmt.TRAILER_BYTES or answer > size:
            return Status.MISS
        if answer < 0:
            return Status.ERROR
        raw = self._staging[at : at + answer].data  # shorter where it is compressed
        trailer, payload = raw[: fmt.TRAILER_BYTES], raw[fmt.TRAILER_BYTES :]
        return open_slot(payload, trailer, want, kind, shard, self.counts)

    def _transfer(
        self,
        method: Callable[[list[str], list[int], list[int]], list[int]],
        keys: list[str],
        batch: list[tuple[int, int, int]],
    ) -> list[int]:
        places = [self._base + at for _, at, _ in batch]
        sizes = [size for _, _, size in batch]
        return self._call(lambda: method(keys, places, sizes))

    def _call(self, work: Callable[[], _R]) -> _R:
        """A call into the client, left behind when it takes too long. raises: OSError.

        While one hangs no other is made: it may still write to the staging buffer.
        """
        if self._hung is not None and not self._hung.done():
            self.counts["skipped_calls"] += 1
            raise OSError("a call into the Mooncake client has not come back")
        future = self._thread.submit(work)
        try:
            return future.result(self._config.timeout_s)
        except FutureTimeout:
            self._hung = future
            self.counts["hung_calls"] += 1
            raise OSError("the Mooncake client does not answer") from None


def _is_bad(status: Status) -> bool:
    return status is Status.CORRUPT
