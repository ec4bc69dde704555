"""Bringing compressed records back into the form they were put in."""

from __future__ import annotations

import time
from collections import Counter

from deepinfer_kvtier.checksums import checksum_of
from deepinfer_kvtier.coding import codec
from deepinfer_kvtier.coding.compression import expand, warn_missing
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.packed_reads import check_packed
from deepinfer_kvtier.store.reading import Wanted


def open_compressed(
    stored: memoryview,
    trailer: fmt.Trailer | None,
    want: Wanted,
    kind: int,
    shard: int,
    counts: Counter[str],
) -> Status:
    """Verify one compressed record and expand it, or leave it in `want.packed` for its key.

    returns: SKIPPED for a good record that this process cannot expand.
    """
    status = check_packed(stored, trailer, want, kind, shard, counts)
    if status is Status.OK and not codec.installed():
        want.packed = None
        status = _missing(counts)
    elif status is Status.OK and not want.seal:
        want.packed = None
        status = expand_into(want, stored, counts)
    elif want.packed is not None:
        want.packed = memoryview(bytearray(stored))
    return status


def expand_into(want: Wanted, stored: memoryview, counts: Counter[str]) -> Status:
    """Expand verified bytes in the clear into their destination, and sum what arrived there.

    returns: SKIPPED where this process has not got the codec.
    """
    if not codec.installed():
        return _missing(counts)
    started = time.perf_counter()
    status = expand(stored, want.views)
    if status is Status.OK:
        want.checksum = checksum_of(want.views)
        counts["expanded_records"] += 1
        counts["expanded_bytes"] += want.nbytes
        counts["expand_us"] += int((time.perf_counter() - started) * 1e6)
    else:
        counts["corrupt" if status is Status.CORRUPT else "codec_missing"] += 1
    return status


def _missing(counts: Counter[str]) -> Status:
    counts["codec_missing"] += 1
    warn_missing('pip install "deepinfer-kvtier[zstd]"')
    return Status.SKIPPED
