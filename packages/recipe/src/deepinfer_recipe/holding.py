"""How much of a text must be held back because it may be the beginning of a pattern."""

from __future__ import annotations

from collections.abc import Iterable


def proper_prefixes(patterns: Iterable[str]) -> tuple[str, ...]:
    """All proper prefixes of the patterns, longest first."""
    prefixes = {pattern[:n] for pattern in patterns for n in range(1, len(pattern))}
    return tuple(sorted(prefixes, key=len, reverse=True))


def held_suffix(text: str, prefixes: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is one of the prefixes (longest first)."""
    if not text.endswith(prefixes):
        return 0
    return len(next(prefix for prefix in prefixes if text.endswith(prefix)))
