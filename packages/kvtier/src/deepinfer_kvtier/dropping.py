"""Forgetting records in every tier."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_kvtier.tierset import TierSet


def drop_records(tiers: TierSet, kinds: Sequence[int], shard: int, digests: Sequence[bytes]) -> int:
    """Everything behind `Namespace.drop`; returns how many records were found."""
    found = 0
    for kind in kinds:
        for queue in (tiers.queue, *tiers.spills):
            if queue is not None:
                queue.discard(kind, digests)
        known = [sum(tiers.host.remove(kind, digest) is not None for digest in digests)]
        if tiers.directory is not None:
            known.append(tiers.directory.delete(kind, shard, digests))
        if not tiers.config.read_only:
            known.extend(tier.delete(kind, shard, digests) for tier in tiers.further)
        found += max(known)
    if tiers.directory is not None and not tiers.config.read_only:
        try:
            tiers.directory.write_control()
        except OSError:
            # Hidden here at once; the tombstones stay queued for the next write.
            tiers.counts["control_errors"] += 1
    tiers.sync_tiers()
    return found
