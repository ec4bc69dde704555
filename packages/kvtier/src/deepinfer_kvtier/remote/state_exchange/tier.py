"""The other machines' windows as a tier that is only read from."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.values import KIND_CODES, NO_ROW, Status
from deepinfer_kvtier.flow.tier import FOUND, ScanEntry, TierCaps
from deepinfer_kvtier.log.format import EncodedRecord
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.remote.state_exchange.wire import PullAnswer, WindowRecord

_STATE = KIND_CODES["state"]
MAX_HINTS = 10_000


class Exchange(Protocol):
    """What this tier needs of `WindowExchange`."""

    def find(self, digests: Sequence[bytes]) -> list[WindowRecord | None]: ...

    def pull(
        self, hint: WindowRecord, digest: bytes, views: Sequence[memoryview]
    ) -> tuple[Status, PullAnswer | None]: ...

    def stats(self) -> dict[str, int]: ...


class PeerWindows:
    """`Tier` for state slots. Dead machines are known to the exchange: nothing here is an error."""

    name = "peer"
    caps = TierCaps(persistent=False, shared=True, max_batch=1)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._lock = threading.Lock()
        self._hints: OrderedDict[bytes, WindowRecord] = OrderedDict()

    def probe(self, kind: int, shard: int, digests: Sequence[bytes]) -> NDArray[Any]:
        """Hints of the location service; blocks are never asked for."""
        found: NDArray[Any] = np.zeros(len(digests), dtype=FOUND)
        found["length"] = NO_ROW
        if kind != _STATE:
            return found
        for i, hint in enumerate(self._exchange.find(digests)):
            if hint is not None:
                found["length"][i], found["flags"][i] = hint.nbytes, hint.marks
                self._remember(digests[i], hint)
        return found

    def get_into(
        self,
        kind: int,
        shard: int,
        wanted: Sequence[Wanted],
        *,
        in_time: Callable[[], bool],
    ) -> Sequence[Status]:
        """Pull what an earlier probe has found."""
        return [
            self._pull(want) if kind == _STATE and in_time() else Status.MISS for want in wanted
        ]

    def put_from(self, batch: Sequence[EncodedRecord]) -> Sequence[Status]:
        """Nothing is put here: machines pull what they need."""
        return [Status.SKIPPED] * len(batch)

    def delete(self, kind: int, shard: int, digests: Sequence[bytes]) -> int:
        """Other machines forget by time alone."""
        return 0

    def scan(self, cursor: str | None) -> tuple[Sequence[ScanEntry], str | None]:
        """Hints are not listed."""
        return (), None

    def usage(self) -> dict[str, int]:
        return self._exchange.stats()

    def health(self) -> Literal["ok", "degraded", "down"]:
        return "degraded" if self._exchange.stats()["dead_peers"] else "ok"

    def sync(self) -> None:
        """Nothing is stored."""

    def maintain(self) -> None:
        """The exchange has its own thread."""

    def close(self) -> None:
        """The exchange is closed by its owner."""

    def _pull(self, want: Wanted) -> Status:
        with self._lock:
            hint = self._hints.pop(want.digest, None)
        if hint is None:
            return Status.MISS
        status, answer = self._exchange.pull(hint, want.digest, want.views)
        if status is Status.OK and answer is not None:
            want.depth, want.checksum = answer.n_blocks, answer.checksum
            want.approximate, want.generation = answer.approximate, answer.replay_generation
        return Status.MISS if status is Status.ERROR else status

    def _remember(self, digest: bytes, hint: WindowRecord) -> None:
        with self._lock:
            self._hints[digest] = hint
            self._hints.move_to_end(digest)
            while len(self._hints) > MAX_HINTS:
                self._hints.popitem(last=False)
