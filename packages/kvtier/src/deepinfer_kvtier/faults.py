"""Files that fail by plan, for tests: of the cache, and of what is built on it."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from deepinfer_kvtier.base.files import IoEngine, PosixIo, Readable

Effect = Literal[
    "eio",
    "enospc",
    "estale",
    "short",
    "torn",
    "flip",
    "lost",
    "delay",
    "duplicate",
    "stale",
    "reordered",
]
DELAY_S = 0.0005


class FaultIo:
    """File operations that fail by plan, reproducibly from a seed.

    rates: operation ("preadv", "pwritev", "datasync", "create", "open_read", "unlink") -> effect ->
           probability. Effects:
           "eio", "enospc", "estale": the call fails with that error and does nothing;
           "short": half of the bytes are transferred and reported;
           "torn":  a random part is written, then the call fails;
           "flip":  one bit of what is read or written is wrong, success is reported;
           "lost":  nothing is written, success is reported;
           "duplicate": what is written appears once more behind itself;
           "delay": the call takes half a millisecond longer;
           "stale": ("disk_bytes") the size of an earlier time, 0, is reported;
           "reordered": ("datasync") success is reported before anything is safe.
    track:    remember what is not safe yet, for `power_loss`.
    over:     the engine below that does what is not made to fail; default `PosixIo`.
    injected: how often each effect happened.
    """

    def __init__(
        self,
        seed: int = 0,
        rates: Mapping[str, Mapping[Effect, float]] | None = None,
        *,
        crash_at: int | None = None,
        track: bool = False,
        over: IoEngine | None = None,
    ) -> None:
        self._over = over or PosixIo()
        self._random = random.Random(seed)
        self._rates = dict(rates or {})
        self._crash_at = crash_at
        self._lock = threading.Lock()
        self._fds: dict[int, Path] = {}
        self._unsafe: dict[Path, list[tuple[int, int, bytes]]] | None = {} if track else None
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
            fds, self._fds = self._fds, {}
        for fd in fds:
            self._over.close(fd)

    def power_loss(self) -> int:
        """`crash`, and of the writes that were not safe each is undone or not, by chance.

        returns: how many were undone.
        """
        self.crash()
        undone = 0
        for path, writes in (self._unsafe or {}).items():
            if not path.exists():
                continue
            with path.open("r+b") as file:
                for offset, length, before in reversed(writes):
                    if self._random.random() < 0.5:
                        file.seek(offset)
                        file.write(before.ljust(length, b"\0"))
                        undone += 1
        self.injected["power loss, writes undone"] += undone
        return undone

    def create(self, path: Path) -> int:
        self._fail("create")
        return self._opened(self._over.create(path), path)

    def open_read(self, path: Path) -> int:
        self._fail("open_read")
        return self._opened(self._over.open_read(path), path)

    def open_write(self, path: Path) -> int:
        self._fail("open_write")
        return self._opened(self._over.open_write(path), path)

    def try_lock(self, path: Path, *, create: bool) -> int | None:
        self._fail("try_lock")
        fd = self._over.try_lock(path, create=create)
        return None if fd is None else self._opened(fd, path)

    def share(self, fd: int) -> bool:
        self._fail("share")
        return self._over.share(fd)

    def unshare(self, fd: int) -> None:
        with self._lock:
            if fd not in self._fds:
                return  # it went with the crash
        self._over.unshare(fd)

    def claim(self, path: Path) -> int | None:
        self._fail("claim")
        fd = self._over.claim(path)
        return None if fd is None else self._opened(fd, path)

    def close(self, fd: int) -> None:
        with self._lock:
            if fd not in self._fds:
                return
            del self._fds[fd]
        self._over.close(fd)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        effect = self._fail("preadv")
        targets = [memoryview(buffer) for buffer in buffers]
        if effect == "short":
            targets = _first_half(targets)
        got = self._over.preadv(fd, targets, offset)
        if effect == "flip" and got:
            self._flip_in(targets, got)
        return got

    def pwritev(self, fd: int, buffers: Sequence[Readable], offset: int) -> int:
        dying = self._step()
        effect = "torn" if dying else self._fail("pwritev")
        whole = bytearray(b"".join(bytes(buffer) for buffer in buffers))
        self._remember(fd, offset, len(whole))
        if effect == "lost":
            return len(whole)
        if effect == "flip" and whole:
            self._flip_in([memoryview(whole)], len(whole))
        if effect == "short":
            return self._write(fd, whole[: max(1, len(whole) // 2)], offset)
        if effect == "torn":
            keep = self._random.randrange(len(whole) + 1)
            self._write(fd, whole[:keep], offset)
            if dying:
                self.crash()
            raise OSError(errno.EIO, "injected torn write")
        if effect == "duplicate":
            self._write(fd, whole, offset + len(whole))
        return self._write(fd, whole, offset)

    def truncate(self, fd: int, length: int) -> None:
        if self._step():
            self.crash()
        self._fail("truncate")
        self._over.truncate(fd, length)

    def datasync(self, fd: int) -> None:
        if self._step():
            self.crash()
        if self._fail("datasync") != "reordered" and self._unsafe is not None:
            with self._lock:
                path = self._fds.get(fd)
                if path is not None:
                    self._unsafe.pop(path, None)

    def disk_bytes(self, path: Path) -> int:
        return 0 if self._fail("disk_bytes") == "stale" else self._over.disk_bytes(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._step():
            self.crash()
        self._fail("rename")
        self._over.rename(source, target)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self._fail("punch")
        self._over.punch(fd, offset, length)

    def unlink(self, path: Path) -> None:
        if self._step():
            self.crash()
        self._fail("unlink")
        self._over.unlink(path)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._over.allocate(fd, offset, length)

    def listdir(self, path: Path) -> list[str]:
        return self._over.listdir(path)

    def mkdir(self, path: Path) -> None:
        self._over.mkdir(path)

    def rmdir(self, path: Path) -> None:
        self._over.rmdir(path)

    def space(self, path: Path) -> tuple[int, int]:
        return self._over.space(path)

    def is_shared(self, path: Path) -> bool:
        return self._over.is_shared(path)

    def facts(self) -> Mapping[str, str | int]:
        return self._over.facts()

    def _opened(self, fd: int, path: Path) -> int:
        with self._lock:
            self._fds[fd] = path
        return fd

    def _remember(self, fd: int, offset: int, length: int) -> None:
        """Keep what a write is about to replace."""
        if self._unsafe is not None:
            before = bytearray(length)
            del before[max(0, self._over.preadv(fd, [before], offset)) :]
            with self._lock:
                path = self._fds.get(fd)
                if path is None:
                    raise _dead()
                self._unsafe.setdefault(path, []).append((offset, length, bytes(before)))

    def _write(self, fd: int, data: bytearray, offset: int) -> int:
        """Not after a crash: the number of the descriptor may be that of another file by now."""
        with self._lock:
            if fd not in self._fds:
                raise _dead()
            return self._over.pwritev(fd, [data], offset)

    def _step(self) -> bool:
        """Count a step that changes the disk; True when the process dies in it."""
        with self._lock:
            self.steps += 1
            return self.steps == self._crash_at

    def _fail(self, operation: str) -> Effect | None:
        with self._lock:
            if self._crashed:
                raise _dead()
            for effect, rate in self._rates.get(operation, {}).items():
                if self._random.random() < rate:
                    self.injected[f"{operation} {effect}"] += 1
                    break
            else:
                return None
        codes = {"eio": errno.EIO, "enospc": errno.ENOSPC, "estale": errno.ESTALE}
        if effect in codes:
            raise OSError(codes[effect], f"injected {effect}")
        if effect == "delay":
            time.sleep(DELAY_S)
        return effect

    def _flip_in(self, targets: Sequence[memoryview], length: int) -> None:
        at = self._random.randrange(length)
        for target in targets:
            if at < target.nbytes:
                target[at] ^= 1 << self._random.randrange(8)
                return
            at -= target.nbytes


def _dead() -> OSError:
    return OSError(errno.EIO, "this process is dead")


def _first_half(targets: list[memoryview]) -> list[memoryview]:
    room = sum(target.nbytes for target in targets) // 2
    half: list[memoryview] = []
    for target in targets:
        if room <= 0:
            break
        half.append(target[:room])
        room -= target.nbytes
    return half
