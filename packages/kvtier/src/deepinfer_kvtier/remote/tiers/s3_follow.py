"""Following what others put under a prefix of an object store: manifests, then their indexes."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.remote.tiers.manifest import Manifest, list_generations, read_manifest
from deepinfer_kvtier.remote.tiers.objects import Absent, Exists, ObjectStore, Unavailable
from deepinfer_kvtier.remote.tiers.remote_index import RemoteIndex
from deepinfer_kvtier.remote.tiers.s3_layout import index_path, new_format, parse_format


class S3Follower:
    """Brings an index to what the manifests say, as far as they changed since the last look.

    lock: held while the index follows; who changes a manifest and the index together holds it, too.
    """

    def __init__(
        self,
        objects: ObjectStore,
        index: RemoteIndex,
        counts: Counter[str],
        readers: Executor,
        *,
        read_only: bool,
    ) -> None:
        self._objects = objects
        self._index = index
        self._counts = counts
        self._readers = readers
        self._read_only = read_only
        self._generations: dict[str, int] = {}
        self._store: bytes | None = None
        self.lock = threading.Lock()

    def refresh(self) -> None:
        """Take in what other writers have changed since the last call. raises: Unavailable."""
        with self.lock:
            store = self.identity()
            listed = list_generations(self._objects)
            for writer in self._generations.keys() - listed.keys():
                self._apply(store, Manifest(writer))
                del self._generations[writer]
            for writer, numbers in listed.items():
                if self._generations.get(writer) == numbers[-1]:
                    continue
                manifest = read_manifest(self._objects, writer, numbers[-1])
                if manifest is None:
                    self._counts["bad_manifests"] += 1
                elif self._apply(store, manifest):
                    self._generations[writer] = numbers[-1]

    def _apply(self, store: bytes, manifest: Manifest) -> bool:
        """Bring the table to what a manifest says, tombstones first; False = look again later."""
        writer, complete = manifest.writer, True
        for _, entries in self._read_indexes(store, writer, manifest.tombs):
            if entries is None:
                complete = False
            else:
                self._index.add(writer, entries)
        known = self._index.known(writer)
        for number in known - manifest.segments.keys():
            self._index.forget_segment(self._index.named(writer, number))
        fresh = sorted(manifest.segments.keys() - known)
        for number, entries in self._read_indexes(store, writer, fresh):
            if entries is None:
                complete = False
            else:
                self._index.named(writer, number)
                self._index.add(writer, entries)
        return complete

    def _read_indexes(
        self, store: bytes, writer: str, numbers: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[Any] | None]]:
        """Index objects in order, several requests at a time. raises: Unavailable."""

        def read(number: int) -> NDArray[Any] | None:
            return self._read_index(store, writer, number)

        return zip(numbers, self._readers.map(read, numbers), strict=True)

    def _read_index(self, store: bytes, writer: str, number: int) -> NDArray[Any] | None:
        """Entries of an index object; None when it is absent or damaged. raises: Unavailable."""
        try:
            raw = self._objects.get(index_path(writer, number))
        except Absent:
            return None
        frames: list[NDArray[Any]] = []
        for i in range(len(raw) // fmt.PAGE):
            frame = memoryview(raw)[i * fmt.PAGE : (i + 1) * fmt.PAGE]
            entries = fmt.parse_frame(frame, i, store, bytes.fromhex(writer))
            if entries is None:
                self._counts["bad_index_objects"] += 1
                return None
            frames.append(entries)
        return np.concatenate(frames) if frames else None

    def identity(self) -> bytes:
        """Store id of the prefix, made by whoever comes first. raises: Unavailable."""
        if self._store is None:
            try:
                raw = self._objects.get("FORMAT.json")
            except Absent:
                if self._read_only:
                    raise Unavailable("no store under this prefix") from None
                with contextlib.suppress(Exists):
                    self._objects.create("FORMAT.json", [new_format()])
                try:
                    raw = self._objects.get("FORMAT.json")
                except Absent:
                    raise Unavailable("what was just created is not there") from None
            self._store = parse_format(raw)
        return self._store
