"""A group of threads in which a rank dies at a chosen call, and peers hear of it at once.

No clocks: a call that can no longer complete, because a rank it needs is gone, raises PeerLostError
where a real network would after its deadline. Collectives may complete on some ranks only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from deepinfer_eplb import PeerLostError

TIMEOUT = 60.0


class Died(BaseException):
    """What a rank that is killed sees; nothing of ours may survive it there."""


@dataclass(frozen=True)
class Death:
    """Rank `victim` dies in its `call`-th call.

    told: None if it dies before it takes part. Of a collective: the ranks whose call completes all
    the same. Of batch_p2p: any collection, `messages` says how many of its messages still leave.
    """

    victim: int
    call: int
    told: Collection[int] | None = None
    messages: int = 0


@dataclass
class Hub:
    size: int
    death: Death | None = None
    lock: threading.Condition = field(default_factory=threading.Condition)
    gone: set[int] = field(default_factory=set)
    collectives: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    mail: dict[tuple[int, int], list[np.ndarray]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)  # of rank 0's calls, in order


class LossyTransport:
    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.calls = 0
        self.collectives = 0

    def all_reduce_sum(self, values):
        return self._collective("all_reduce", values)

    def barrier(self) -> None:
        self._collective("barrier", np.zeros(1, dtype=np.int64))

    def batch_p2p(self, sends, receives) -> None:
        dying = self._enter("p2p")
        hub = self.hub
        with hub.lock:
            for i, (peer, buffer) in enumerate(sends):
                if dying and i >= hub.death.messages:
                    break
                hub.mail.setdefault((self.rank, peer), []).append(buffer.copy())
            hub.lock.notify_all()
            if dying:
                self._die()
            for peer, buffer in receives:
                box = hub.mail.setdefault((peer, self.rank), [])
                self._wait(lambda box=box, peer=peer: set() if box else {peer})
                buffer[:] = box.pop(0)

    def _collective(self, kind, values):
        dying = self._enter(kind)
        hub, index = self.hub, self.collectives
        self.collectives += 1
        with hub.lock:
            here = hub.collectives.setdefault(index, {})
            here[self.rank] = values.copy()
            hub.lock.notify_all()
            if dying:
                self._die()
            self._wait(lambda: set(range(self.size)) - set(here))
            death = hub.death
            here_died = death is not None and death.call == self.calls - 1
            if here_died and death.told is not None and self.rank not in death.told:
                self._leave()
            return np.sum([here[r] for r in range(self.size)], axis=0)

    def _enter(self, kind: str) -> bool:
        """Whether this rank dies in this call, after its part in it."""
        hub, call = self.hub, self.calls
        self.calls += 1
        if self.rank == 0:
            hub.kinds.append(kind)
        dying = hub.death is not None and (hub.death.victim, hub.death.call) == (self.rank, call)
        if dying and hub.death.told is None:
            with hub.lock:
                self._die()
        return dying

    def _die(self) -> None:
        self.hub.gone.add(self.rank)
        self.hub.lock.notify_all()
        raise Died

    def _leave(self) -> None:
        self.hub.gone.add(self.rank)
        self.hub.lock.notify_all()
        raise PeerLostError("a peer is gone")

    def _wait(self, missing: Callable[[], set[int]]) -> None:
        """Until nobody is missing; one who is gone without having done its part ends it."""
        while absent := missing():
            if absent & self.hub.gone:
                self._leave()
            if not self.hub.lock.wait(TIMEOUT):
                raise AssertionError("a rank hangs")


def run(size: int, body: Callable[[LossyTransport], object], death: Death | None = None):
    """(what every rank returned or raised, the hub)."""
    hub = Hub(size, death)
    results: list[object] = [None] * size

    def main(rank: int) -> None:
        try:
            results[rank] = body(LossyTransport(hub, rank))
        except BaseException as e:
            results[rank] = e
        with hub.lock:
            hub.gone.add(rank)
            hub.lock.notify_all()

    ranks = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(TIMEOUT)
    assert not any(t.is_alive() for t in ranks), "a rank hangs"
    return results, hub
