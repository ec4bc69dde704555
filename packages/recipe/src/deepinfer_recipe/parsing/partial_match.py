"""Patterns in text that arrives in pieces: what is plain, and what must be held back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

from deepinfer_recipe.native import routines as native

ValuePath: TypeAlias = tuple[Callable[[str], object], Callable[[str], bool], Callable[[str], None]]
"""Whether short text has a first character, whether text is plain, and where plain text goes."""
SHORT = 32
"""Up to this length one look for first characters is cheaper than `is_plain`."""

_LONG_PATTERN = 64
"""Longer ones are left to Python's search, whose time is linear whatever text and pattern are."""


class Patterns:
    """Texts that are looked for in an answer, none of them empty."""

    __slots__ = ("_are_short", "_first", "_reach", "_texts", "has_first")

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        longest = max(map(len, texts))
        self._reach = longest - 1
        self._are_short = longest <= _LONG_PATTERN
        firsts = re.escape("".join(sorted({text[0] for text in texts})))
        self._first = re.compile(f"[{firsts}]").search
        self.has_first = re.compile(f"[{firsts}\n]").search
        """Finds a pattern's first character or a newline; short text without any is plain."""

    def held(self, text: str) -> int:
        """Length of the longest end of `text` that may be the beginning of a pattern."""
        found = self._first(text, max(0, len(text) - self._reach))
        while found:
            end = text[found.start() :]
            for pattern in self._texts:
                if len(pattern) > len(end) and pattern.startswith(end):
                    return len(end)
            found = self._first(text, found.start() + 1)
        return 0

    def is_plain(self, text: str) -> bool:
        """Whether `text` has no pattern, ends with none's beginning, and not with a newline."""
        if native is not None and self._are_short:
            return native.is_plain(text, self._texts)
        return self._is_plain(text)

    def _is_plain(self, text: str) -> bool:
        if text.endswith("\n"):
            return False
        for pattern in self._texts:
            if pattern in text:
                return False
        return not self.held(text)


# Parsers look for the same few texts of the format again and again. What a request brings, such
# as stop sequences, is not kept.


@lru_cache(maxsize=64)
def alternation(*texts: str) -> re.Pattern[str]:
    """Finds whichever of the format's texts comes first."""
    return re.compile("|".join(map(re.escape, texts)))


@lru_cache(maxsize=64)
def patterns_of(*texts: str) -> Patterns:
    """Patterns of the format's own texts."""
    return Patterns(texts)
