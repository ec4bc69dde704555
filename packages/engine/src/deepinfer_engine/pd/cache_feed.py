"""What a worker's cache holds, told to every router: all of it once, then what changes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from deepinfer_engine.core.block_hashes import CacheChange, CacheTier, pack_hashes
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import Body, FrameType

MOST = 1 << 18
"""Blocks of a tier that are told; of more, those that came first are left out."""
TOGETHER_S = 0.005
"""Changes within this time go in one message."""


class CacheFeed:
    """On the event loop alone."""

    def __init__(self) -> None:
        self._held: dict[CacheTier, OrderedDict[int, None]] = {
            "memory": OrderedDict(),
            "below": OrderedDict(),
        }
        self._new: dict[CacheTier, dict[int, bool]] = {"memory": {}, "below": {}}
        """What has changed since it was last told, and how it is now."""
        self._numbers: dict[Connection, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def changed(self, change: CacheChange) -> None:
        held, new = self._held[change.tier], self._new[change.tier]
        for block in change.blocks:
            if change.stored == (block in held):
                continue
            if change.stored:
                held[block] = None
            else:
                del held[block]
            new[block] = change.stored
        while len(held) > MOST:
            new[held.popitem(last=False)[0]] = False
        if self._timer is None and self._numbers and any(self._new.values()):
            self._timer = asyncio.get_running_loop().call_later(TOGETHER_S, self._tell)

    def joined(self, router: Connection) -> None:
        """A router is there, or asks again: it hears all."""
        if any(self._new.values()):
            self._tell()
        self._numbers[router] = self._numbers.get(router, 0) + 1
        held = self._held
        router.send(
            FrameType.CACHE,
            _body(self._numbers[router], True, list(held["memory"]), list(held["below"]), (), ()),
        )

    def left(self, router: Connection) -> None:
        self._numbers.pop(router, None)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lists = [
            [block for block, here in self._new[tier].items() if here is stored]
            for stored in (True, False)
            for tier in ("memory", "below")
        ]
        for changes in self._new.values():
            changes.clear()
        for router in self._numbers:
            self._numbers[router] += 1
            router.send(FrameType.CACHE, _body(self._numbers[router], False, *lists))


def _body(
    number: int,
    whole: bool,
    memory: Sequence[int],
    below: Sequence[int],
    no_memory: Sequence[int],
    no_below: Sequence[int],
) -> Body:
    return {
        "number": number,
        "whole": whole,
        "memory": pack_hashes(memory),
        "below": pack_hashes(below),
        "no_memory": pack_hashes(no_memory),
        "no_below": pack_hashes(no_below),
    }
