"""Near-duplicate detection on extracted text: 64-bit simhash, then MinHash where it is unsure.

Shingles are three index terms in a row (for CJK text that is two characters). Up to MAX_DISTANCE
different bits two texts are copies; up to UNSURE_DISTANCE their estimated Jaccard similarity
decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.analyzers import content_terms

MAX_DISTANCE = 3
UNSURE_DISTANCE = 8
MIN_JACCARD = 0.8
MIN_LENGTH_RATIO = 0.8
MIN_WORDS = 50
PERMUTATIONS = 128
_WORDS_READ = 4000
_CHARACTERS_READ = 32_000
_CACHED_HASHES = 200_000
_U64 = np.uint64
_FACTOR: Final = _U64(0x9E3779B97F4A7C15)
_SEEDS: Final = np.random.Generator(np.random.PCG64(7)).integers(
    0, 2**64 - 1, (2, PERMUTATIONS), dtype=_U64, endpoint=True
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """simhash: 64 bits of the first _WORDS_READ terms, an exact hash under MIN_WORDS. words: how
    many terms there are in all."""

    simhash: int
    words: int


def fingerprint(text: str, boilerplate: Callable[[str], bool] | None = None) -> Fingerprint:
    """The fingerprint of a text. boilerplate: lines for which it is true are left out."""
    if boilerplate is not None:
        text = "\n".join(line for line in text.split("\n") if not boilerplate(line))
    return fingerprint_of_terms(content_terms(text))


def fingerprint_of_terms(terms: Sequence[str]) -> Fingerprint:
    """The same for a text that was analysed already."""
    if len(terms) < MIN_WORDS:
        return Fingerprint(_HASHES[" ".join(terms)], len(terms))
    shingles = _shingles(terms[:_WORDS_READ])
    bits = np.unpackbits(shingles.astype(">u8").view(np.uint8).reshape(-1, 8), axis=1)
    majority = bits.sum(axis=0, dtype=np.int32) * 2 > len(shingles)
    return Fingerprint(int.from_bytes(np.packbits(majority).tobytes(), "big"), len(terms))


def near_duplicates(
    a: Fingerprint, b: Fingerprint, texts: Callable[[], tuple[str, str]] | None = None
) -> bool:
    """True if two fingerprints belong to copies of one text.

    texts: gives both texts when the fingerprints alone cannot tell; None says no then.
    """
    shorter, longer = sorted((a.words, b.words))
    if shorter < MIN_WORDS:
        return a == b
    distance = (a.simhash ^ b.simhash).bit_count()
    if distance > UNSURE_DISTANCE or shorter < MIN_LENGTH_RATIO * longer:
        return False
    if distance <= MAX_DISTANCE:
        return True
    return texts is not None and jaccard(*texts()) >= MIN_JACCARD


def jaccard(a: str, b: str) -> float:
    """Estimated share of common shingles, 0..1 (MinHash, PERMUTATIONS permutations)."""
    return float(np.mean(_signature(a) == _signature(b)))


def _signature(text: str) -> NDArray[np.uint64]:
    """uint64 [PERMUTATIONS]: the least hash of any shingle under each permutation."""
    found = content_terms(text[:_CHARACTERS_READ])[:_WORDS_READ]
    shingles = np.unique(_shingles(found)) if len(found) >= 3 else np.zeros(1, _U64)
    multipliers, offsets = _SEEDS[0] | _U64(1), _SEEDS[1]
    return ((shingles[:, None] * multipliers + offsets) >> _U64(16)).min(axis=0)


def _shingles(terms: Sequence[str]) -> NDArray[np.uint64]:
    """uint64 [n - 2]: one mixed hash per run of three terms."""
    hashes = np.fromiter(map(_HASHES.__getitem__, terms), _U64, len(terms))
    mixed = (hashes[:-2] * _FACTOR + hashes[1:-1]) * _FACTOR + hashes[2:]
    # The finaliser of splitmix64: every input bit reaches every output bit.
    mixed = (mixed ^ (mixed >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> _U64(27))) * _U64(0x94D049BB133111EB)
    return mixed ^ (mixed >> _U64(31))


class _Hashes(dict[str, int]):
    """Text -> 64-bit hash, kept for what comes again."""

    def __missing__(self, text: str) -> int:
        if len(self) >= _CACHED_HASHES:
            self.clear()
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
        found = self[text] = int.from_bytes(digest, "big")
        return found


_HASHES = _Hashes()


class HostLines:
    """Which lines a host repeats on many of its pages: boilerplate that extraction kept.

    A line counts once a page; it is boilerplate once it stood on more than `share` of at least
    `min_pages` pages. Memory is bounded: at most `max_lines` distinct lines a host are counted.
    """

    def __init__(self, *, share: float = 0.2, min_pages: int = 10, max_lines: int = 5000) -> None:
        self._share = share
        self._min_pages = min_pages
        self._max_lines = max_lines
        self._pages: dict[str, int] = {}
        self._lines: dict[str, dict[int, int]] = {}

    def see(self, host: str, text: str) -> None:
        """Count one page."""
        self._pages[host] = self._pages.get(host, 0) + 1
        counts = self._lines.setdefault(host, {})
        for key in {_HASHES[line.strip()] for line in _nonempty(text)}:
            if key in counts or len(counts) < self._max_lines:
                counts[key] = counts.get(key, 0) + 1

    def boilerplate(self, host: str) -> Callable[[str], bool] | None:
        """A test for lines of this host; None while too few pages were seen."""
        pages = self._pages.get(host, 0)
        if pages < self._min_pages:
            return None
        counts = self._lines[host]
        return lambda line: counts.get(_HASHES[line.strip()], 0) > self._share * pages


def _nonempty(text: str) -> Iterable[str]:
    return (line for line in text.split("\n") if line.strip())
