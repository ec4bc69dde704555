"""How processes on one directory tell who is alive, who is new, and when a file may go.

Two answers. On a local file system the kernel knows: a lock on a writer's `hb` ends with its
process, and an open descriptor outlives the name of its file. On a mounted shared file system
(3FS, NFS, CephFS) neither holds, so there `hb` is a counter that other machines judge by their own
clock, and files go a grace period after their tombstone.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final, Protocol

from deepinfer_kvtier.base.config import KVTierConfig, MountSettings
from deepinfer_kvtier.base.files import IoEngine
from deepinfer_kvtier.base.timing import Breaker, Clock
from deepinfer_kvtier.log.segments import HEARTBEAT, NAME_LENGTH, WRITERS, LockLiveness, is_writer

_ROSTER: Final = "roster-"
_ADOPT: Final = ".adopt."


class Liveness(Protocol):
    """What the directory tier asks.

    shared:  other machines see the directory: they must be able to read before they are told, no
             bad read of one machine is believed by the others, nothing rests on a descriptor.
    grace_s: seconds between the tombstone of a file and its deletion.
    """

    shared: bool
    grace_s: float

    def claim_folder(self) -> tuple[bytes, Path, int | None]:
        """A fresh folder for a writer: its id, path, and the lock it holds. raises: OSError."""
        ...

    def announce(self, name: str) -> None:
        """The folder's log exists now: let the others find it. raises: OSError."""
        ...

    def names(self, *, listing: bool) -> list[str]:
        """Folders of all writers; without `listing` what is known plus what was announced.

        raises: OSError.
        """
        ...

    def adopting(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """Whether this process may finish a writer's log: its owner is dead, nobody else does it.

        raises: OSError.
        """
        ...

    def beat(self) -> None:
        """Renew the sign of life of the own folder. raises: OSError."""
        ...

    def is_fenced(self) -> bool:
        """Whether others may have taken the own folder for dead: then it must not be used again."""
        ...

    def forget(self, name: str) -> None:
        """The folder is removed."""
        ...

    def leftovers(self) -> list[Path]:
        """Files in `w` that nobody needs any more. raises: OSError."""
        ...


def open_liveness(root: Path, io: IoEngine, clock: Clock, config: KVTierConfig) -> Liveness:
    """The way that fits the mode of a store."""
    if config.mode != "shared-fs":
        return LockLiveness(root, io)
    return HeartbeatLiveness(
        root,
        io,
        clock,
        dead_after_s=config.mount.adopt_after_s,
        grace_s=config.mount.grace_s,
        listing_s=config.mount.listing_s,
    )


class HeartbeatLiveness:
    """Machines on one mounted file system: counters, claims by exclusive creation, a roster.

    A new writer creates the next free `roster-<n>` with its name in it, so that others find it by
    one `open` a poll instead of a listing. A dead writer is adopted by whoever creates
    `<writer>.adopt.<k>`; if the adopter dies too, the next k is up.
    """

    shared = True

    def __init__(
        self,
        root: Path,
        io: IoEngine,
        clock: Clock,
        *,
        dead_after_s: float,
        grace_s: float,
        listing_s: float,
    ) -> None:
        self._folder = root / WRITERS
        self._io = io
        self._clock = clock
        self._dead_after_s = dead_after_s
        self._listing_s = listing_s
        self.grace_s = grace_s
        self._names: set[str] = set()
        self._listed_at = float("-inf")
        self._next_roster = 0
        self._unread: set[int] = set()
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._claims: dict[str, tuple[int, float]] = {}
        self._heartbeat: Path | None = None
        self._count = 0
        self._beat_at = float("-inf")

    def claim_folder(self) -> tuple[bytes, Path, int | None]:
        """The name is random and mkdir must succeed, so it is ours."""
        writer = secrets.token_bytes(16)
        path = self._folder / writer.hex()
        self._io.mkdir(path)
        self._io.close(self._io.create(path / HEARTBEAT))
        self._heartbeat, self._count = path / HEARTBEAT, 0
        self._beat_at = self._clock.monotonic()
        self.beat()
        return writer, path, None

    def announce(self, name: str) -> None:
        """Take the next free roster number."""
        self._list()
        while True:
            path = self._folder / f"{_ROSTER}{self._next_roster}"
            try:
                fd = self._io.create(path)
            except FileExistsError:
                self._unread.add(self._next_roster)
                self._next_roster += 1
                continue
            try:
                self._io.pwritev(fd, [name.encode()], 0)
                self._io.datasync(fd)
            finally:
                self._io.close(fd)
            return

    def names(self, *, listing: bool) -> list[str]:
        """Listed at the start and every `listing_s` at most; the roster is read each time."""
        if listing and self._clock.monotonic() - self._listed_at >= self._listing_s:
            self._list()
        while True:
            try:
                self._read_roster(self._next_roster)
            except FileNotFoundError:
                break
            self._next_roster += 1
        for number in list(self._unread):
            with contextlib.suppress(FileNotFoundError):
                self._read_roster(number)
        return sorted(self._names)

    @contextlib.contextmanager
    def adopting(self, name: str) -> Generator[bool]:
        """Yields True to exactly one process at a time, and only for a writer that looks dead."""
        yield self._looks_dead(name) and self._claim(name)

    def beat(self) -> None:
        """Write and flush the next count; the time before the write counts as the sign of life.

        A folder that others may have adopted gets no more signs: it stays abandoned.
        """
        if self._heartbeat is None or self.is_fenced():
            return
        now = self._clock.monotonic()
        self._count += 1
        fd = self._io.open_write(self._heartbeat)
        try:
            self._io.pwritev(fd, [self._count.to_bytes(8, "little")], 0)
            self._io.datasync(fd)
        finally:
            self._io.close(fd)
        self._beat_at = now

    def is_fenced(self) -> bool:
        """Half of the time after which others may adopt: they may have seen the last beat late."""
        return self._clock.monotonic() - self._beat_at > self._dead_after_s / 2

    def forget(self, name: str) -> None:
        """The folder is removed: drop what is known of it, and the claims on it."""
        self._names.discard(name)
        self._seen.pop(name, None)
        self._claims.pop(name, None)

    def leftovers(self) -> list[Path]:
        """Claims on folders that are gone, and roster entries nobody can still look for.

        The newest roster entry stays: the next number must be above every one ever used.
        """
        files = self._io.listdir(self._folder)
        folders = {file for file in files if is_writer(file)}
        old: list[Path] = []
        for file in files:
            claimed = file.partition(_ADOPT)[0]
            if claimed != file and claimed not in folders:
                old.append(self._folder / file)
        numbers = sorted(_roster_numbers(files))
        for number in numbers[:-1]:
            if number < self._next_roster and number not in self._unread:
                name = self._roster_name(number)
                if name is not None and name not in folders:
                    old.append(self._folder / f"{_ROSTER}{number}")
        return old

    # -- inside

    def _list(self) -> None:
        self._listed_at = self._clock.monotonic()
        files = self._io.listdir(self._folder)
        self._names = {file for file in files if is_writer(file)}
        self._next_roster = max((self._next_roster, *(n + 1 for n in _roster_numbers(files))))

    def _read_roster(self, number: int) -> None:
        """Learn the name in one entry; one that is not written out yet is read again later."""
        name = self._roster_name(number)
        if name is None:
            self._unread.add(number)
        else:
            self._unread.discard(number)
            self._names.add(name)

    def _roster_name(self, number: int) -> str | None:
        raw = self._read(self._folder / f"{_ROSTER}{number}", NAME_LENGTH)
        try:
            name = bytes.fromhex(raw.decode("ascii")).hex()
        except ValueError:
            return None
        return name if is_writer(name) else None

    def _looks_dead(self, name: str) -> bool:
        """Its count has not changed for `dead_after_s` of our own clock."""
        try:
            count = self._read(self._folder / name / HEARTBEAT, 8)
        except FileNotFoundError:
            count = b""
        now = self._clock.monotonic()
        known = self._seen.get(name)
        if known is None or known[0] != count:
            self._seen[name] = count, now
            return False
        return now - known[1] >= self._dead_after_s

    def _claim(self, name: str) -> bool:
        number, first_seen = self._claims.get(name, (0, float("-inf")))
        now = self._clock.monotonic()
        if now - first_seen < self._dead_after_s:
            return False
        try:
            self._io.close(self._io.create(self._folder / f"{name}{_ADOPT}{number}"))
        except FileExistsError:
            # Somebody is at it; if its log has not ended after as long again, that one died too.
            self._claims[name] = number + 1, now
            return False
        self._claims[name] = number + 1, now
        return True

    def _read(self, path: Path, size: int) -> bytes:
        fd = self._io.open_read(path)
        try:
            raw = bytearray(size)
            return bytes(raw[: self._io.preadv(fd, [raw], 0)])
        finally:
            self._io.close(fd)


def _roster_numbers(files: list[str]) -> list[int]:
    numbers = (file.removeprefix(_ROSTER) for file in files if file.startswith(_ROSTER))
    return [int(number) for number in numbers if number.isdigit()]


class Polled(Protocol):
    """What is polled: the directory tier."""

    breaker: Breaker
    liveness: Liveness

    def refresh(self, *, listing: bool = True) -> None: ...


class Poller:
    """Reads the others' logs every `poll_s`, and gives a sign of life every `heartbeat_s`.

    Two threads: a sign of life has to reach the server, and the news do not wait for that.
    """

    def __init__(self, disk: Polled, settings: MountSettings) -> None:
        self._disk = disk
        self._stop = threading.Event()
        self.errors = 0
        self._threads = [
            threading.Thread(target=self._run, args=job, name=f"kvtier-{name}", daemon=True)
            for name, *job in (
                ("poll", settings.poll_s, self._poll),
                ("beat", settings.heartbeat_s, disk.liveness.beat),
            )
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop; a call into a hung mount may outlive this."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5.0)

    def _poll(self) -> None:
        if not self._disk.breaker.is_open:
            self._disk.refresh(listing=False)

    def _run(self, every_s: float, work: Callable[[], None]) -> None:
        while not self._stop.wait(every_s):
            try:
                work()
            except OSError:
                self.errors += 1
                self._disk.breaker.error()
