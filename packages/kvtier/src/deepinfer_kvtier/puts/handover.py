"""What a source looked like when it was handed over without a copy.

Until the ticket is done the source belongs to the cache; an engine that reuses a slot too early
would have its new bytes stored under the old name. So the caller's thread takes a witness of the
source, and whoever has copied or written the bytes compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.buffers import Records
from deepinfer_kvtier.checksums import checksum_of

HandoverCheck = Literal["sampled", "full", "off"]
SAMPLE_EVERY: Final = 1024
"""Bytes from one sampled word of 8 to the next: whatever changes 1,032 bytes in a row is noticed,
for a fifth of the price of a checksum."""
_SAMPLED_FROM: Final = 16 << 10  # smaller records are summed whole as quickly


class Witness:
    """Of one record: its checksum, or words of it and where they come from."""

    __slots__ = ("_source", "_words", "checksum")

    def __init__(self, checksum: bytes | None, source: NDArray[np.uint64] | None = None) -> None:
        self.checksum = checksum
        self._source = source
        self._words = None if source is None else source.tobytes()

    def fits(self, views: Sequence[memoryview]) -> bool:
        """Whether these bytes are, as far as this witness can tell, those of the source."""
        if self._words is None:
            return checksum_of(views) == self.checksum
        (view,) = views
        return _words_of(np.frombuffer(view, dtype=np.uint8)).tobytes() == self._words

    def still_fits(self, source: Sequence[memoryview]) -> bool:
        """`fits` for the source itself."""
        return self.fits(source) if self._source is None else self._source.tobytes() == self._words


def take_witnesses(
    source: Records, which: Sequence[int], check: HandoverCheck
) -> Sequence[Witness | None]:
    """A witness of each of these records; None without a check.

    "sampled" looks at every 128th word of records that lie at equal distances; others, and small
    ones, cost as much to sample as to sum and get a checksum, as all do with "full".
    """
    if check == "off":
        return [None] * len(which)
    rows = source.rows
    if check == "full" or rows is None or source.payload < _SAMPLED_FROM:
        return [Witness(checksum_of(source.views(i))) for i in which]
    # Row by row: for a large array numpy gives the interpreter away, and the caller would have to
    # wait for it behind the writing thread.
    words = _words_of(rows)
    return [Witness(None, words[i]) for i in which]


def _words_of(payload: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Sampled words of uint8 [..., bytes]."""
    whole = payload.shape[-1] // 8 * 8
    words: NDArray[np.uint64] = payload[..., :whole].view(np.uint64)
    return words[..., :: SAMPLE_EVERY // 8]
