"""Pictures that wait for the tower of an encode worker, and the steps that encode them.

Several go through one pass, from as many requests, as long as their patches fit the budget of a
pass. Turns go round by key: one key's many pictures hold up another's first by one pass at most.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from deepinfer_engine.core.pictures import Picture, PictureRules
from deepinfer_engine.pd.quoting import quoted

log = logging.getLogger(__name__)

PATCHES = 16384
"""Of one pass: some pictures of the largest size, or hundreds of small ones."""


class Encoder(Protocol):
    """A vision tower."""

    @property
    def rules(self) -> PictureRules: ...

    def encode(self, pictures: Sequence[Picture]) -> list[memoryview]:
        """The bytes of each picture's rows, encoded in one pass. Not thread-safe."""
        ...


@dataclass(eq=False, slots=True)
class Waiting:
    """A picture with its pixels. `alone`: in no pass with others."""

    picture: Picture
    key: str
    alone: bool


class EncodeQueue:
    """`step` belongs to the step thread, the rest to any. Implements `pd.step_thread.Steps`."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        done: Callable[[Waiting, memoryview], None],
        failed: Callable[[Waiting, str], None],
        patches: int = PATCHES,
    ) -> None:
        """done, failed: called from the step thread, one of them for each picture that is taken."""
        self._encoder = encoder
        self._done = done
        self._failed = failed
        self._patches = patches
        self._changed = threading.Condition()
        self._work = False
        self._keys: OrderedDict[str, deque[Waiting]] = OrderedDict()
        """Those with pictures that wait; the first has the next turn."""
        self._running: list[Waiting] = []
        self.passes = 0
        self.encoded = 0
        self.failures = 0

    def put(self, waiting: Waiting) -> None:
        with self._changed:
            self._keys.setdefault(waiting.key, deque()).append(waiting)
            self._notify()

    def drop(self, waiting: Waiting) -> bool:
        """Nobody wants it any more: it is not begun. False: it is being encoded, or was."""
        with self._changed:
            queue = self._keys.get(waiting.key)
            if queue is None or waiting not in queue:
                return False
            queue.remove(waiting)
            if not queue:
                del self._keys[waiting.key]
            return True

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(len(queue) for queue in self._keys.values())

    @property
    def running(self) -> int:
        return len(self._running)

    # -- the step thread ------------------------------------------------------------------------

    def step(self, now: float) -> int | None:
        """One pass; returns how many pictures went through it, None when none waited."""
        with self._changed:
            self._running = batch = self._next()
        if not batch:
            return None
        try:
            self._encode(batch)
        finally:
            self._running = []
        return len(batch)

    def wait_for_work(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._work)
            self._work = False

    def wake(self) -> None:
        with self._changed:
            self._notify()

    def abort_all(self, reason: Literal["error"]) -> None:
        """No pass will run any more."""
        with self._changed:
            left = [one for queue in self._keys.values() for one in queue]
            self._keys.clear()
        for one in left:
            self._failed(one, f"the encode worker ended: {reason}")

    def close(self) -> None:
        """The last call of the step thread."""

    @property
    def waits_for(self) -> Sequence[threading.Thread]:
        return ()

    # -- inside ---------------------------------------------------------------------------------

    def _notify(self) -> None:
        self._work = True
        self._changed.notify_all()

    def _next(self) -> list[Waiting]:
        """One of each key in turn, until the patches of a pass are full."""
        batch: list[Waiting] = []
        left = self._patches
        while self._keys:
            key, queue = next(iter(self._keys.items()))
            one = queue[0]
            size = _patches_of(one.picture, self._encoder.rules)
            if batch and (size > left or one.alone or batch[0].alone):
                break
            queue.popleft()
            self._keys.move_to_end(key)
            if not queue:
                del self._keys[key]
            batch.append(one)
            left -= size
        return batch

    def _encode(self, batch: list[Waiting]) -> None:
        self.passes += 1
        try:
            rows = self._encoder.encode([one.picture for one in batch])
        except Exception as error:
            if len(batch) > 1:  # who is at fault fails alone
                for one in batch:
                    self._encode([one])
                return
            text = f"{type(error).__name__}: {error}"
            size = batch[0].picture.width, batch[0].picture.height
            log.warning("a picture of %d x %d pixels could not be encoded: %s", *size, quoted(text))
            log.debug("its traceback", exc_info=True)
            self.failures += 1
            self._failed(batch[0], text)
            return
        for one, its in zip(batch, rows, strict=True):
            self.encoded += 1
            self._done(one, its)


def _patches_of(picture: Picture, rules: PictureRules) -> int:
    return (picture.width // rules.patch) * (picture.height // rules.patch)
