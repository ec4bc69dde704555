"""Retention in an object store: segments expire by their last use, in two steps.

First a segment leaves the manifest, so that nobody new finds it; `grace_s` later, counted by the
clock of the process that deletes, its objects go. Who still read it then gets a miss.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from deepinfer_kvtier.base.config import RetentionClass
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.remote.tiers.manifest import (
    Manifest,
    change,
    latest,
    list_generations,
    manifest_path,
)
from deepinfer_kvtier.remote.tiers.objects import ObjectStore, S3TierConfig

# An object that no manifest names may be on its way in; after this long it is a leftover.
ORPHAN_AGE = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class S3GcReport:
    """What one collection did. buried: segments taken out of manifests; deleted: objects."""

    tombstoned: int
    deleted: int
    orphans: int


class Collected(Protocol):
    """What a collector needs of its tier."""

    clock: Clock
    classes: dict[str, RetentionClass]
    config: S3TierConfig
    objects: ObjectStore
    counts: Counter[str]

    def take_touches(self) -> dict[tuple[str, int], int]: ...


class S3Collector:
    """Collection for one tier; any number of processes may collect the same prefix."""

    def __init__(self, tier: Collected) -> None:
        self._tier = tier
        self._grave_seen: dict[tuple[str, int], float] = {}

    def collect(self) -> S3GcReport:
        """Write marks of use, tombstone what is expired, delete what has been long enough.

        raises: Unavailable.
        """
        tier = self._tier
        touched = tier.take_touches()
        tombstoned = deleted = 0
        listed = list_generations(tier.objects)
        manifests = {writer: latest(tier.objects, writer)[0] for writer in listed}
        for writer, manifest in manifests.items():
            seen = {n: at for (name, n), at in touched.items() if name == writer}
            ripe = self._ripe(manifest)
            for number in ripe:
                tier.objects.delete(f"seg/{writer}/{number}.kvs")
                tier.objects.delete(f"idx/{writer}/{number}.kvx")
                self._grave_seen.pop((writer, number), None)
                deleted += 1
            changed = change(
                tier.objects,
                writer,
                lambda current, seen=seen, ripe=ripe: self._edit(current, seen, ripe),
            )
            manifests[writer] = changed
            tombstoned += len(manifest.segments.keys() - changed.segments.keys())
        self._drop_tombs(manifests)
        for writer, manifest in manifests.items():
            if manifest.empty:
                for generation in list_generations(tier.objects, writer).get(writer, []):
                    if generation <= manifest.generation:
                        tier.objects.delete(manifest_path(writer, generation))
        orphans = self._sweep(manifests)
        tier.counts["gc_buried_segments"] += tombstoned
        tier.counts["gc_deleted_segments"] += deleted
        tier.counts["gc_orphans"] += orphans
        return S3GcReport(tombstoned, deleted, orphans)

    def _ripe(self, manifest: Manifest) -> set[int]:
        """Buried segments whose grace is over by this process's own clock."""
        now = self._tier.clock.monotonic()
        ripe: set[int] = set()
        for number in manifest.grave:
            first = self._grave_seen.setdefault((manifest.writer, number), now)
            if now - first >= self._tier.config.grace_s:
                ripe.add(number)
        return ripe

    def _edit(self, manifest: Manifest, seen: dict[int, int], ripe: set[int]) -> Manifest | None:
        """Marks of use, burials and finished deletions in one change; None when nothing is due."""
        now = self._tier.clock.wall()
        segments = dict(manifest.segments)
        for number, info in manifest.segments.items():
            policy = self._tier.classes.get(info.cls)
            ttl = None if policy is None else policy.ttl_s
            used = seen.get(number, 0)
            if ttl is not None and used - info.seen_s >= ttl / 8:
                segments[number] = info = replace(info, seen_s=used)
            if ttl is not None and now - max(info.seen_s, used) >= ttl:
                del segments[number]
        fresh = tuple(manifest.segments.keys() - segments.keys())
        grave = (*(n for n in manifest.grave if n not in ripe), *fresh)
        if segments == manifest.segments and grave == manifest.grave:
            return None
        return replace(manifest, segments=segments, grave=grave)

    def _drop_tombs(self, manifests: dict[str, Manifest]) -> None:
        """Tombstones are needed only while a segment lives that may hold what they hide."""
        if any(manifest.segments or manifest.grave for manifest in manifests.values()):
            return
        for writer, manifest in manifests.items():
            if manifest.tombs:
                manifests[writer] = change(
                    self._tier.objects, writer, lambda current: replace(current, tombs=())
                )

    def _sweep(self, manifests: dict[str, Manifest]) -> int:
        """Objects that no manifest names: left by a writer that died between two requests."""
        named: set[str] = set()
        for writer, manifest in manifests.items():
            for number in (*manifest.segments, *manifest.grave):
                named |= {f"seg/{writer}/{number}.kvs", f"idx/{writer}/{number}.kvx"}
            named |= {f"idx/{writer}/{number}.kvx" for number in manifest.tombs}
        horizon = datetime.fromtimestamp(self._tier.clock.wall(), UTC) - ORPHAN_AGE
        orphans = [
            path
            for folder in ("seg/", "idx/")
            for path, changed in self._tier.objects.list(folder)
            if path not in named and changed < horizon
        ]
        for path in orphans:
            self._tier.objects.delete(path)
        return len(orphans)
