"""A directory with a large index, made without writing the records it names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.log_reader import Snapshot, compact, write_snapshot

SLOT_PAGES = 28
WRITER = bytes(range(16))


def million(store: Path, records: int, *, snapshot: bool) -> None:
    """The index of `records` blocks as a killed writer leaves it; its segments are empty files.

    snapshot: with a snapshot of all of it, and the log before it given back; else the log alone.
    """
    kvtier.open(store).close()
    identity = bytes.fromhex(json.loads((store / "FORMAT.json").read_text())["store"])
    folder = store / "w" / WRITER.hex()
    folder.mkdir()
    rng = np.random.default_rng(0)
    entries = np.zeros(records, dtype=fmt.ENTRY)
    entries["key_lo"] = rng.integers(0, 2**64, records, dtype=np.uint64)
    entries["key_hi"] = rng.integers(0, 2**64, records, dtype=np.uint64)
    per_segment = (8 << 30) // (SLOT_PAGES * fmt.PAGE)
    entries["segment"], place = np.divmod(np.arange(records), per_segment)
    entries["page"] = 1 + place * SLOT_PAGES
    entries["length"] = 113_920
    entries["cls"] = 2
    segments = set(range(int(entries["segment"][-1]) + 1))
    for number in segments:
        (folder / f"seg-chat-0-{number}.kvs").touch()
    frames = fmt.pack_frames(entries, 0, identity, WRITER)
    with (folder / "idx-0.kvx").open("wb") as log:
        if snapshot:
            io = PosixIo()
            reduced = Snapshot(0, len(frames), compact(entries, segments))
            write_snapshot(folder, reduced, identity, WRITER, io)
            log.truncate(len(frames) * fmt.PAGE)
        else:
            log.writelines(frames)
