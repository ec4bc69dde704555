"""Registry of segment files: small numbers for rows, open descriptors as leases.

On a local file system an open descriptor keeps the bytes of an unlinked file readable, so pinning a
segment means holding its descriptor open. There, too, a descriptor in use carries a
lock that collectors of all processes respect: what one process has leased, another one can still
load. The lock ends with its process.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deepinfer_kvtier.base.files import IoEngine

MAX_IDLE_DESCRIPTORS = 128
WRITERS: Final = "w"
HEARTBEAT: Final = "hb"
NAME_LENGTH: Final = 32


@dataclass(slots=True, eq=False)
class Segment:
    """One segment file: `local` is its number in this process, `number` the one in its log."""

    local: int
    writer: bytes
    number: int
    path: Path
    cls: str
    bucket: int
    sealed: bool = False
    tombstoned: bool = False  # whoever still finds the file may unlink it
    tombstoned_at: float | None = None  # monotonic time at which this process heard of that
    moved: bool = False  # everything alive in it has been written elsewhere
    gone: bool = False
    bytes: int = 0  # the most that its records in the index ever took
    fd: int | None = None
    users: int = 0
    stale: list[int] = field(default_factory=list[int])  # closed when nobody reads any more


class SegmentSet:
    """All segments this process has heard of.

    locks: whether the file system has locks by which processes tell each other what they use.
    """

    def __init__(
        self, root: Path, io: IoEngine, class_names: Mapping[int, str], *, locks: bool = True
    ) -> None:
        self._locks = locks
        self._root = root
        self._class_names = class_names
        self._io = io
        self._lock = threading.Lock()
        self._by_local: list[Segment] = []
        self._by_name: dict[tuple[bytes, int], Segment] = {}
        self._idle: dict[int, Segment] = {}
        self._closed = False

    def get(self, local: int) -> Segment:
        """By the number rows carry."""
        return self._by_local[local]

    def all(self) -> list[Segment]:
        """Every segment that is not known to be gone."""
        with self._lock:
            return [segment for segment in self._by_local if not segment.gone]

    def tombstoned(self) -> list[Segment]:
        """Segments that a process has given up; their files may be left over."""
        with self._lock:
            return [segment for segment in self._by_local if segment.tombstoned]

    def named(self, writer: bytes, number: int) -> Segment | None:
        """By writer and number; None when this process has not heard of it."""
        return self._by_name.get((writer, number))

    def discover(self, writer: bytes) -> None:
        """Register the segment files that lie in a writer's folder now. raises: OSError."""
        folder = self._root / "w" / writer.hex()
        try:
            names = self._io.listdir(folder)
        except FileNotFoundError:
            return
        for name in names:
            parsed = parse_segment_name(name)
            if parsed is not None:
                cls, bucket, number = parsed
                self._register(writer, number, folder / name, cls, bucket)

    def announced(self, writer: bytes, number: int, cls: int, bucket: int) -> None:
        """A log says that a segment of the class with this code begins: no listing is needed."""
        name = self._class_names.get(cls)
        if name is not None:
            path = self._root / "w" / writer.hex() / f"seg-{name}-{bucket}-{number}.kvs"
            self._register(writer, number, path, name, bucket)

    def need(self, writer: bytes, number: int) -> Segment:
        """The segment an index entry names; a file that is not there counts as gone.

        raises: OSError.
        """
        known = self.named(writer, number)
        if known is None:
            self.discover(writer)
            known = self.named(writer, number)
        if known is None:
            path = self._root / "w" / writer.hex() / f"seg-?-{number}.kvs"
            known = self._register(writer, number, path, "", 0)
            known.gone = True
        return known

    def acquire(self, local: int) -> int | None:
        """Descriptor of a segment, held until `release`; None when the file is gone.

        raises: OSError.
        """
        with self._lock:
            segment = self._by_local[local]
            if segment.fd is not None:
                return segment.fd if self._use(segment) else None
            if segment.gone:
                return None
        try:
            fd = self._open(segment)
        except FileNotFoundError:
            segment.gone = True
            return None
        with self._lock:
            if segment.fd is None:
                segment.fd, fd = fd, -1
            mine = segment.fd if self._use(segment) else None
        if fd >= 0:
            self._io.close(fd)
        return mine

    def release(self, local: int) -> None:
        """Give one `acquire` back; a few idle descriptors stay open for the next reader."""
        surplus: list[int] = []
        with self._lock:
            segment = self._by_local[local]
            segment.users -= 1
            if segment.users == 0:
                surplus.extend(segment.stale)
                segment.stale.clear()
            if segment.users == 0 and segment.fd is not None:
                if self._locks:
                    self._io.unshare(segment.fd)
                self._idle[local] = segment
                if segment.gone or self._closed:
                    surplus.append(self._forget_descriptor(segment))
                while len(self._idle) > MAX_IDLE_DESCRIPTORS:
                    oldest = next(iter(self._idle.values()))
                    surplus.append(self._forget_descriptor(oldest))
        for fd in surplus:
            self._io.close(fd)

    def reopen(self, local: int) -> int | None:
        """A fresh descriptor, by path, of a segment that the caller holds and failed to read from.

        returns: None when the file is gone. raises: OSError.
        """
        segment = self._by_local[local]
        try:
            fd = self._open(segment)
        except FileNotFoundError:
            segment.gone = True
            return None
        if self._locks and not self._io.share(fd):
            self._io.close(fd)
            return None
        with self._lock:
            if segment.fd is not None:
                segment.stale.append(segment.fd)
            segment.fd = fd
        return fd

    def _open(self, segment: Segment) -> int:
        """Open by path, twice: one interrupted or stale answer says nothing about the file."""
        try:
            return self._io.open_read(segment.path)
        except FileNotFoundError:
            raise
        except OSError:
            return self._io.open_read(segment.path)

    def is_leased(self, segment: Segment) -> bool:
        """Whether any process uses the file now. raises: OSError."""
        if not self._locks:
            return False
        try:
            return self._io.is_shared(segment.path)
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def claimed(self, segment: Segment) -> Generator[bool]:
        """Whether no process uses the file; if so, none can begin to before the block ends.

        raises: OSError.
        """
        fd: int | None = None
        free = True
        if self._locks:
            with contextlib.suppress(FileNotFoundError):
                fd = self._io.claim(segment.path)
                free = fd is not None
        try:
            yield free
        finally:
            if fd is not None:
                self._io.close(fd)

    def empty(self, segment: Segment) -> None:
        """Give the space of a claimed file back; without effect where claims mean nothing.

        A process that still has it open looks whether it has a name before it uses it again.
        """
        if not self._locks:
            return
        with contextlib.suppress(OSError):
            fd = self._io.open_write(segment.path)
            try:
                self._io.truncate(fd, 0)
            finally:
                self._io.close(fd)

    def mark_gone(self, segment: Segment) -> None:
        """The file is unlinked or lost; holders of its descriptor may finish reading."""
        fd = -1
        with self._lock:
            segment.gone = True
            if segment.users == 0 and segment.fd is not None:
                fd = self._forget_descriptor(segment)
        if fd >= 0:
            self._io.close(fd)

    def users(self) -> int:
        """Held descriptors, for leak tests."""
        with self._lock:
            return sum(segment.users for segment in self._by_local)

    def descriptors(self) -> list[int]:
        """All that are open, without a look at the lock."""
        stale = [fd for segment in self._by_local for fd in segment.stale]
        return stale + [segment.fd for segment in self._by_local if segment.fd is not None]

    def close(self) -> None:
        """Close every descriptor; those in use when their reader finishes."""
        with self._lock:
            self._closed = True
            idle = [self._forget_descriptor(segment) for segment in list(self._idle.values())]
        for fd in idle:
            self._io.close(fd)

    def _register(self, writer: bytes, number: int, path: Path, cls: str, bucket: int) -> Segment:
        with self._lock:
            known = self._by_name.get((writer, number))
            if known is None:
                known = Segment(len(self._by_local), writer, number, path, cls, bucket)
                self._by_local.append(known)
                self._by_name[writer, number] = known
            return known

    def _use(self, segment: Segment) -> bool:
        """One more user of an open segment; False when another process is deleting it."""
        assert segment.fd is not None
        if segment.users == 0 and self._locks and not self._io.share(segment.fd):
            self._idle[segment.local] = segment
            return False
        segment.users += 1
        self._idle.pop(segment.local, None)
        return True

    def _forget_descriptor(self, segment: Segment) -> int:
        assert segment.fd is not None
        fd, segment.fd = segment.fd, None
        self._idle.pop(segment.local, None)
        return fd


def parse_segment_name(name: str) -> tuple[str, int, int] | None:
    """(class, bucket start, number) of `seg-<class>-<bucket>-<n>.kvs`; None for other files."""
    if not (name.startswith("seg-") and name.endswith(".kvs")):
        return None
    fields = name[4:-4].rsplit("-", 2)
    if len(fields) != 3 or not (fields[1].isdigit() and fields[2].isdigit()):
        return None
    return fields[0], int(fields[1]), int(fields[2])


def is_writer(name: str) -> bool:
    """Whether a name in `w` is the folder of a writer."""
    return len(name) == NAME_LENGTH


class LockLiveness:
    """Processes of one machine: the kernel's locks say who lives."""

    shared = False
    grace_s = 0.0

    def __init__(self, root: Path, io: IoEngine) -> None:
        self._folder = root / WRITERS
        self._io = io

    def claim_folder(self) -> tuple[bytes, Path, int | None]:
        """Another name when a survey took the lock first."""
        while True:
            writer = secrets.token_bytes(16)
            path = self._folder / writer.hex()
            self._io.mkdir(path)
            lock = self._io.try_lock(path / HEARTBEAT, create=True)
            if lock is not None:
                return writer, path, lock

    def announce(self, name: str) -> None:
        """A listing is cheap here."""

    def names(self, *, listing: bool) -> list[str]:
        """Always a fresh listing."""
        try:
            return [name for name in self._io.listdir(self._folder) if is_writer(name)]
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def adopting(self, name: str) -> Generator[bool]:
        """Holding the lock means that the owner is gone and nobody else is at it."""
        try:
            lock = self._io.try_lock(self._folder / name / HEARTBEAT, create=False)
        except FileNotFoundError:
            lock = None
        try:
            yield lock is not None
        finally:
            if lock is not None:
                self._io.close(lock)

    def beat(self) -> None:
        """The lock is the sign of life."""

    def is_fenced(self) -> bool:
        """The lock is held as long as the process lives."""
        return False

    def forget(self, name: str) -> None:
        """Nothing is remembered here."""

    def leftovers(self) -> list[Path]:
        """Folders hold everything there is."""
        return []
