"""For tests of the cache and of what is built on it: checkable bytes, a clock, a breaking disk."""

from __future__ import annotations

import errno
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deepinfer_kvtier.io import PosixIo, Readable

Effect = Literal["eio", "enospc", "estale", "short", "torn", "flip", "lost"]


def payload_of(digest: bytes, nbytes: int) -> NDArray[np.uint8]:
    """The bytes a record with this digest should have: checkable without storing them."""
    return np.frombuffer(blake3(digest).digest(length=nbytes), dtype=np.uint8).copy()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 1_800_000_000.0) -> None:
        self._start_s = start_s
        self._passed_s = 0.0

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._passed_s += seconds

    def wall(self) -> float:
        return self._start_s + self._passed_s

    def monotonic(self) -> float:
        return self._passed_s


class FaultIo(PosixIo):
    """File operations that fail by plan, reproducibly from a seed.

    rates: operation ("preadv", "pwritev", "datasync", "create", "open_read", "unlink") -> effect ->
           probability. Effects:
           "eio", "enospc", "estale": the call fails with that error and does nothing;
           "short": half of the bytes are transferred and reported;
           "torn":  a random part is written, then the call fails;
           "flip":  one bit of what is read or written is wrong, success is reported;
           "lost":  nothing is written, success is reported.
    injected: how often each effect happened.
    """

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[str, Mapping[Effect, float]] | None = None,
        *,
        crash_at: int | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._rates = dict(rates or {})
        self._crash_at = crash_at
        self._lock = threading.Lock()
        self._fds: set[int] = set()
        self._crashed = False
        self.steps = 0
        self.injected: Counter[str] = Counter()

    def set_rates(self, rates: Mapping[str, Mapping[Effect, float]]) -> None:
        """Another plan from now on; an empty one ends the faults."""
        with self._lock:
            self._rates = dict(rates)

    @property
    def dead(self) -> bool:
        """Whether the planned crash has happened."""
        return self._crashed

    def crash(self) -> None:
        """What a killed process leaves: no descriptor and no lock, and it never acts again."""
        with self._lock:
            self._crashed = True
            fds, self._fds = self._fds, set()
        for fd in fds:
            super().close(fd)

    def create(self, path: Path) -> int:
        self._fail("create")
        return self._opened(super().create(path))

    def open_read(self, path: Path) -> int:
        self._fail("open_read")
        return self._opened(super().open_read(path))

    def open_write(self, path: Path) -> int:
        self._fail("open_write")
        return self._opened(super().open_write(path))

    def try_lock(self, path: Path, *, create: bool) -> int | None:
        self._fail("try_lock")
        fd = super().try_lock(path, create=create)
        return None if fd is None else self._opened(fd)

    def close(self, fd: int) -> None:
        with self._lock:
            if fd not in self._fds:
                return
            self._fds.remove(fd)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        effect = self._fail("preadv")
        targets = [memoryview(buffer) for buffer in buffers]
        if effect == "short":
            targets = _first_half(targets)
        got = super().preadv(fd, targets, offset)
        if effect == "flip" and got:
            self._flip_in(targets, got)
        return got

    def pwritev(self, fd: int, buffers: Sequence[Readable], offset: int) -> int:
        dying = self._step()
        effect = "torn" if dying else self._fail("pwritev")
        whole = bytearray(b"".join(bytes(buffer) for buffer in buffers))
        if effect == "lost":
            return len(whole)
        if effect == "flip" and whole:
            self._flip_in([memoryview(whole)], len(whole))
        if effect == "short":
            return super().pwritev(fd, [whole[: max(1, len(whole) // 2)]], offset)
        if effect == "torn":
            keep = self._random.randrange(len(whole) + 1)
            super().pwritev(fd, [whole[:keep]], offset)
            if dying:
                self.crash()
            raise OSError(errno.EIO, "injected torn write")
        return super().pwritev(fd, [whole], offset)

    def truncate(self, fd: int, length: int) -> None:
        if self._step():
            self.crash()
        self._fail("truncate")
        super().truncate(fd, length)

    def datasync(self, fd: int) -> None:
        if self._step():
            self.crash()
        self._fail("datasync")

    def unlink(self, path: Path) -> None:
        if self._step():
            self.crash()
        self._fail("unlink")
        super().unlink(path)

    def _opened(self, fd: int) -> int:
        with self._lock:
            self._fds.add(fd)
        return fd

    def _step(self) -> bool:
        """Count a step that changes the disk; True when the process dies in it."""
        with self._lock:
            self.steps += 1
            return self.steps == self._crash_at

    def _fail(self, operation: str) -> Effect | None:
        with self._lock:
            if self._crashed:
                raise OSError(errno.EIO, "this process is dead")
            for effect, rate in self._rates.get(operation, {}).items():
                if self._random.random() < rate:
                    self.injected[f"{operation} {effect}"] += 1
                    break
            else:
                return None
        codes = {"eio": errno.EIO, "enospc": errno.ENOSPC, "estale": errno.ESTALE}
        if effect in codes:
            raise OSError(codes[effect], f"injected {effect}")
        return effect

    def _flip_in(self, targets: Sequence[memoryview], length: int) -> None:
        at = self._random.randrange(length)
        for target in targets:
            if at < target.nbytes:
                target[at] ^= 1 << self._random.randrange(8)
                return
            at -= target.nbytes


def _first_half(targets: list[memoryview]) -> list[memoryview]:
    room = sum(target.nbytes for target in targets) // 2
    half: list[memoryview] = []
    for target in targets:
        if room <= 0:
            break
        half.append(target[:room])
        room -= target.nbytes
    return half
