"""A transport over threads: real concurrency, rendezvous sends, and a timeout instead of a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Full, Queue

import numpy as np

TIMEOUT = 60.0


class Hub:
    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[np.ndarray | None] = [None] * size
        self.channels = {(a, b): Queue(maxsize=1) for a in range(size) for b in range(size)}


class ThreadTransport:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size

    def all_reduce_sum(self, values):
        self.hub.slots[self.rank] = values.copy()
        self.hub.barrier.wait(TIMEOUT)
        total = np.sum(list(self.hub.slots), axis=0)
        self.hub.barrier.wait(TIMEOUT)
        return total

    def batch_p2p(self, sends, receives) -> None:
        def send_all() -> None:
            try:
                for peer, buffer in sends:
                    self.hub.channels[self.rank, peer].put(buffer.copy(), timeout=TIMEOUT)
            except Full:
                self.hub.barrier.abort()

        sender = threading.Thread(target=send_all, daemon=True)
        sender.start()
        for peer, buffer in receives:
            buffer[:] = self.hub.channels[peer, self.rank].get(timeout=TIMEOUT)
        sender.join(TIMEOUT)

    def barrier(self) -> None:
        self.hub.barrier.wait(TIMEOUT)


def run_ranks(size: int, body: Callable[[ThreadTransport], object]) -> list[object]:
    """Run `body` on every rank at once; the first exception of any rank is raised here."""
    hub = Hub(size)
    results: list[object] = [None] * size
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = body(ThreadTransport(hub, rank))
        except BaseException as e:
            errors.append(e)
            hub.barrier.abort()

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(TIMEOUT * 2)
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return results
