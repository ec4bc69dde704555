"""When a writer takes snapshots of its own log, and what it gives back afterwards."""

from __future__ import annotations

from pathlib import Path

from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.logs import LogReader
from deepinfer_kvtier.store.segments import parse_segment_name
from deepinfer_kvtier.store.snapshots import (
    Snapshot,
    compact,
    numbers_of,
    snapshot_name,
    write_snapshot,
)


class Snapshotter:
    """Snapshots of one writer's log; used by whoever may append to it."""

    def __init__(self, folder: Path, store: bytes, writer: bytes, io: IoEngine) -> None:
        self._folder = folder
        self._store = store
        self._writer = writer
        self._io = io
        self._number: int | None = None
        self._frames = 0
        self._entries = 0

    def due(self, frames: int, least: int) -> bool:
        """Whether the log has grown by `least` frames and by as much as the last snapshot holds:
        then all snapshots together cost no more than a fixed share of the log."""
        return frames - self._frames >= max(least, self._entries // fmt.ENTRIES_PER_FRAME)

    def take(self, log_fd: int) -> int:
        """Write one and give back the log before the one before it; returns its bytes.

        Failing is harmless: the last snapshots are as good as before, and 0 is returned.
        """
        try:
            return self._take(log_fd)
        except OSError:
            return 0

    def _take(self, log_fd: int) -> int:
        log = LogReader(self._folder, self._store, self._io)
        try:
            entries = log.poll()
        finally:
            log.close()
        names = self._io.listdir(self._folder)
        files = (parse_segment_name(name) for name in names)
        alive = {file[2] for file in files if file is not None}
        taken = numbers_of(names)
        number = taken[0] + 1 if taken else 0
        snapshot = Snapshot(number, log.frames, compact(entries, alive))
        nbytes = write_snapshot(self._folder, snapshot, self._store, self._writer, self._io)
        former = self._number
        for other in taken:
            if other != former:
                self._io.unlink(self._folder / snapshot_name(other))
        if former is not None:
            self._io.punch(log_fd, 0, self._frames * fmt.PAGE)
        self._number = number
        self._frames, self._entries = log.frames, len(snapshot.entries)
        return nbytes
