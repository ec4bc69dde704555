"""Tail of one writer's index log, from its newest snapshot on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.scan import scan_folder
from deepinfer_kvtier.store.snapshots import Snapshot, read_newest

_CHUNK_FRAMES = 256


class LogReader:
    """Reads the frames that were added since the last `poll`; never trusts the size of the file.

    The first poll of a log of more than a few frames begins with the newest good snapshot. So does
    one that finds the frames it needs given back to the file system; without a good snapshot the
    segments themselves are read.
    """

    def __init__(self, folder: Path, store: bytes, io: IoEngine) -> None:
        self.folder = folder
        self.writer = bytes.fromhex(folder.name)
        self.ended = False
        self.bad_frames = 0
        self.bad_snapshots = 0
        self.rescans = 0
        self.frames = 0
        self.snapshot: Snapshot | None = None
        self._store = store
        self._io = io
        self._fd: int | None = None

    def poll(self) -> NDArray[Any]:
        """New entries in order; empty when there are none, the log is gone, or it has ended.

        raises: OSError other than "the file is gone".
        """
        if self.ended:
            return _NOTHING
        if self._fd is None:
            try:
                self._fd = self._io.open_read(self.folder / "idx-0.kvx")
            except FileNotFoundError:
                return _NOTHING
        found: list[NDArray[Any]] = []
        while True:
            raw, frames = self._read_chunk(self._fd)
            if self.frames == 0 and frames == _CHUNK_FRAMES:
                shortcut = self._from_snapshot()
                if shortcut:
                    found.extend(shortcut)
                    continue
            if frames and not any(raw[: fmt.PAGE]):
                substitute = self._over_hole(self._fd)
                if substitute is None:
                    break
                found.extend(substitute)
                continue
            fresh = self._parse(raw, frames)
            found.extend(fresh)
            if frames < _CHUNK_FRAMES or not fresh:
                break
        entries = np.concatenate(found) if found else _NOTHING
        # The end mark is the last entry of a log, and of a snapshot of an ended one.
        if len(entries) and entries["flags"][-1] & fmt.FLAG_LOG_END:
            self.ended = True
            self.close()
        return entries

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd is not None:
            self._io.close(self._fd)
            self._fd = None

    def _from_snapshot(self) -> list[NDArray[Any]]:
        """Entries of the newest snapshot that reaches further than this reader."""
        snapshot, damaged = read_newest(
            self.folder, self._store, self.writer, self._io, beyond=self.frames
        )
        self.bad_snapshots = max(self.bad_snapshots, damaged)
        if snapshot is None:
            return []
        self.snapshot = snapshot
        self.frames = snapshot.next_frame
        return [snapshot.entries]

    def _over_hole(self, fd: int) -> list[NDArray[Any]] | None:
        """What stands in for frames that are gone; None at the end of the log."""
        end = self._end_of_hole(fd)
        if end is None:
            return None
        found = self._from_snapshot()
        if not found:
            self.rescans += 1
            found = [scan_folder(self.folder, self._io)]
            self.frames = end
        return found

    def _end_of_hole(self, fd: int) -> int | None:
        """Number of the first good frame behind the missing ones."""
        at = self.frames
        while True:
            chunk = bytearray(_CHUNK_FRAMES * fmt.PAGE)
            frames = self._io.preadv(fd, [chunk], at * fmt.PAGE) // fmt.PAGE
            for i in range(frames):
                frame = memoryview(chunk)[i * fmt.PAGE : (i + 1) * fmt.PAGE]
                if fmt.parse_frame(frame, at + i, self._store, self.writer) is not None:
                    return at + i
            if frames < _CHUNK_FRAMES:
                return None
            at += frames

    def _read_chunk(self, fd: int) -> tuple[memoryview, int]:
        chunk = bytearray(_CHUNK_FRAMES * fmt.PAGE)
        got = self._io.preadv(fd, [chunk], self.frames * fmt.PAGE)
        return memoryview(chunk), got // fmt.PAGE

    def _parse(self, raw: memoryview, frames: int) -> list[NDArray[Any]]:
        """Good frames from the front; a bad one is skipped only when a good one follows it.

        The last frame may be half written: then the next poll reads it again.
        """
        good: list[NDArray[Any]] = []
        bad_run = 0
        start = self.frames
        for i in range(frames):
            frame = raw[i * fmt.PAGE : (i + 1) * fmt.PAGE]
            entries = fmt.parse_frame(frame, start + i, self._store, self.writer)
            if entries is None:
                bad_run += 1
                continue
            self.bad_frames += bad_run
            bad_run = 0
            self.frames = start + i + 1
            good.append(entries)
        return good


_NOTHING: NDArray[Any] = np.zeros(0, dtype=fmt.ENTRY)
