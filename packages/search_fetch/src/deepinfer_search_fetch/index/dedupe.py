"""Near-duplicate detection: 64-bit simhash over shingles of the extracted text."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from deepinfer_search_fetch.extract.tree import words

MAX_DISTANCE = 3
MIN_LENGTH_RATIO = 0.8
MIN_WORDS = 50
_WORDS_READ = 4000


def fingerprint(text: str) -> tuple[int, int]:
    """(simhash of 3-word shingles, number of words); texts under MIN_WORDS words hash exactly."""
    found = words(text)[:_WORDS_READ]
    if len(found) < MIN_WORDS:
        return _hash64(" ".join(found)), len(found)
    counters = [0] * 64
    for i in range(len(found) - 2):
        bits = _hash64(" ".join(found[i : i + 3]))
        for b in range(64):
            counters[b] += 1 if bits >> b & 1 else -1
    return sum(1 << b for b in range(64) if counters[b] > 0), len(found)


def near_duplicates(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """True if two fingerprints belong to copies of one text."""
    shorter, longer = sorted((a[1], b[1]))
    if longer < MIN_WORDS or shorter < MIN_WORDS:
        return a == b
    return (a[0] ^ b[0]).bit_count() <= MAX_DISTANCE and shorter >= MIN_LENGTH_RATIO * longer


@lru_cache(maxsize=100_000)
def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
