"""Windows by Mooncake's transfer engine: one-sided reads over RDMA, or its own TCP.

The holder copies a window into a registered staging slot and answers where that is; the puller
reads it into a registered slot of its own and checks it there. Slots are leased by time: one that
is reused too early shows as a wrong checksum, never as wrong bytes. Needs the extra `[mooncake]`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.remote.state_exchange import wire
from deepinfer_kvtier.remote.state_exchange.client import Deadline, PeerClient
from deepinfer_kvtier.remote.state_exchange.wire import PullAnswer, PullRequest, StagedAnswer

SLOTS = 16
LEASE_MARGIN_S = 0.2


@dataclass(slots=True, eq=False)
class _Slot:
    data: NDArray[np.uint8]
    free_at: float = 0.0


class MooncakeTransport:
    """Both sides of one machine: `stage` for windows held here, `pull` for those held elsewhere.

    host:     address of this machine that others reach.
    protocol: "rdma" or "tcp", as Mooncake names them; device: network device, "" = any.
    raises:   ConfigError without the extra, or when the engine does not start.
    """

    def __init__(self, client: PeerClient, *, host: str, protocol: str, device: str) -> None:
        try:
            from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]
        except ImportError as cause:
            raise ConfigError(
                f"windows by Mooncake need: pip install './packages/kvtier[mooncake]' ({cause})"
            ) from cause
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise ConfigError(
                f"Mooncake's transfer engine does not start on {host} with {protocol!r} {device!r}"
            )
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._client = client
        self._lock = threading.Lock()
        self._staging: list[_Slot] = []
        self._landing: list[NDArray[np.uint8]] = []
        # A read from a hung machine ends when it likes: it must not hold the request that waits.
        self._threads = ThreadPoolExecutor(SLOTS, thread_name_prefix="kvtier-mooncake")
        self._running = threading.BoundedSemaphore(SLOTS)
        self.counts: Counter[str] = Counter()

    def stage(self, window: memoryview, seconds: float) -> tuple[int, str] | None:
        """Copy a window to where others can read it; returns (address, session), None when full."""
        slot = self._free_slot(window.nbytes, seconds)
        if slot is None:
            self.counts["staging_full"] += 1
            return None
        slot.data[:] = window
        return int(slot.data.ctypes.data), self._session

    def pull(
        self, address: str, request: PullRequest, views: Sequence[memoryview], timeout_s: float
    ) -> tuple[Status, PullAnswer | None]:
        """As `PeerClient.pull`; by that, too, when the holder does not stage."""
        health = self._client.health
        if not health.alive(address):
            self._client.counts["skipped_dead"] += 1
            return Status.TIMEOUT, None
        deadline = Deadline(timeout_s)
        try:
            body = self._client.call(address, wire.STAGE, request.pack(), timeout_s)
            staged = StagedAnswer.unpack(body)
            if staged.answer.status == wire.NOT_STAGED:
                return self._client.pull(address, request, views, deadline.left())
            if staged.answer.status != wire.HELD:
                self._client.counts["gone"] += 1
                return Status.MISS, staged.answer
            if staged.answer.nbytes != request.nbytes:
                self._client.counts["errors"] += 1
                return Status.ERROR, None
            data = self._read(staged, deadline)
        except TimeoutError:
            self._client.counts["timeouts"] += 1
            return Status.TIMEOUT, None
        except OSError:
            self._client.counts["errors"] += 1
            return Status.ERROR, None
        if data is None:
            health.failed(address)
            self._client.counts["timeouts"] += 1
            return Status.TIMEOUT, None
        try:
            if xxhash.xxh3_128_digest(data.data) != staged.answer.checksum:
                self._client.counts["corrupt"] += 1
                return Status.CORRUPT, staged.answer
            at = 0
            for view in views:
                view[:] = data[at : at + view.nbytes].data
                at += view.nbytes
        finally:
            self._give_landing(data)
        self.counts["pulled"] += 1
        return Status.OK, staged.answer

    def close(self) -> None:
        """Unregister what nobody reads or writes any more."""
        self._threads.shutdown(wait=False)
        with self._lock:
            arrays = [slot.data for slot in self._staging] + self._landing
            self._staging, self._landing = [], []
        for array in arrays:
            self._engine.unregister_memory(int(array.ctypes.data))

    def _read(self, staged: StagedAnswer, deadline: Deadline) -> NDArray[np.uint8] | None:
        """The window in a landing slot; None when the holder has not sent it in time.

        raises: OSError when the engine says that the read failed.
        """
        if not self._running.acquire(timeout=deadline.left()):
            return None
        data = self._take_landing(staged.answer.nbytes)
        future: Future[int] = self._threads.submit(
            self._engine.transfer_sync_read,
            staged.session,
            int(data.ctypes.data),
            staged.address,
            data.nbytes,
        )
        future.add_done_callback(lambda _: self._running.release())
        try:
            if future.result(deadline.left()) == 0:
                return data
        except TimeoutError:
            # The engine may still write there: the slot comes back when its read has ended.
            future.add_done_callback(lambda _: self._give_landing(data))
            return None
        self._give_landing(data)
        raise OSError("the transfer engine could not read the window")

    def _free_slot(self, nbytes: int, seconds: float) -> _Slot | None:
        now = time.monotonic()
        with self._lock:
            for slot in self._staging:
                if slot.data.nbytes == nbytes and slot.free_at <= now:
                    slot.free_at = now + seconds + LEASE_MARGIN_S
                    return slot
            if len(self._staging) >= SLOTS:
                return None
            slot = _Slot(self._registered(nbytes), now + seconds + LEASE_MARGIN_S)
            self._staging.append(slot)
            return slot

    def _take_landing(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            for i, array in enumerate(self._landing):
                if array.nbytes == nbytes:
                    return self._landing.pop(i)
            return self._registered(nbytes)

    def _give_landing(self, data: NDArray[np.uint8]) -> None:
        with self._lock:
            self._landing.append(data)

    def _registered(self, nbytes: int) -> NDArray[np.uint8]:
        array: NDArray[np.uint8] = np.zeros(nbytes, dtype=np.uint8)
        if self._engine.register_memory(int(array.ctypes.data), nbytes) != 0:
            raise OSError(f"Mooncake cannot register {nbytes} bytes")
        return array
