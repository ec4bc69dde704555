"""What a killed process left behind: index what it wrote but did not index, then end its log.

The kernel drops a process's lock on its folder when it dies, so holding that lock means its owner
is gone and nobody else is adopting it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.files import IoEngine, write_all
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.log_reader import LogReader, scan_slots
from deepinfer_kvtier.log.segments import parse_segment_name
from deepinfer_kvtier.log.writer import Snapshotter

if TYPE_CHECKING:
    from deepinfer_kvtier.log.disk import DiskTier


_SNAPSHOT_FRAMES = 1024


def adopt(disk: DiskTier, name: str) -> bool:
    """Finish the log of a dead writer; False when it lives, is ended, or has no folder any more.

    raises: OSError.
    """
    folder = disk.root / "w" / name
    with disk.liveness.adopting(name) as mine:
        if not mine:
            return False
        # A writer on another machine may only have been away: its files are left as they are.
        cut = not disk.liveness.shared
        return _finish_log(folder, disk.store, disk.io, cut=cut)


def _finish_log(folder: Path, store: bytes, io: IoEngine, *, cut: bool) -> bool:
    log = LogReader(folder, store, io)
    try:
        entries = log.poll()
        if log.ended:
            return False
        writer, frames = log.writer, log.frames
    finally:
        log.close()
    files = sorted(io.listdir(folder))
    found = [_scan_tail(folder / file, entries, io, cut=cut) for file in files]
    end = np.zeros(1, dtype=fmt.ENTRY)
    end["flags"] = fmt.FLAG_LOG_END
    # Two batches: the end mark has to be the last entry of the last frame.
    additions = [part for part in found if len(part)]
    try:
        fd = io.open_write(folder / "idx-0.kvx")
    except FileNotFoundError:
        # It died between making its folder and its log.
        fd = io.create(folder / "idx-0.kvx")
    try:
        for batch in (*additions, end):
            for frame in fmt.pack_frames(batch, frames, store, writer):
                write_all(io, fd, [frame], frames * fmt.PAGE)
                frames += 1
        io.datasync(fd)
        if frames >= _SNAPSHOT_FRAMES:
            Snapshotter(folder, store, writer, io).take(fd)
    finally:
        io.close(fd)
    return True


def _scan_tail(path: Path, entries: NDArray[Any], io: IoEngine, *, cut: bool) -> NDArray[Any]:
    """Entries for the slots behind the last indexed one; with `cut` the rest of the file goes.

    The writer may have died before it compared the bytes with those it was handed.
    """
    parsed = parse_segment_name(path.name)
    if parsed is None:
        return _NOTHING
    number = parsed[2]
    known = entries[(entries["segment"] == number) & ((entries["flags"] & fmt.CONTROL_FLAGS) == 0)]
    start = fmt.PAGE
    if len(known):
        last = known[np.argmax(known["page"])]
        start = int(last["page"]) * fmt.PAGE + fmt.slot_bytes(int(last["length"]))
    fd = io.open_write(path) if cut else io.open_read(path)
    try:
        found, end = scan_slots(fd, start, number, io, verify=True)
        if cut:
            io.truncate(fd, end)
    finally:
        io.close(fd)
    return np.concatenate(found) if found else _NOTHING


_NOTHING: NDArray[Any] = np.zeros(0, dtype=fmt.ENTRY)
