"""Patterns in text that arrives in pieces: what is plain, and what must be held back."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHORT = 32
"""Up to this length one look for first characters is cheaper than `is_plain`."""


class Patterns:
    """Texts that are looked for in an answer, none of them empty."""

    __slots__ = ("_first", "_reach", "_texts", "has_first")

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._reach = max(map(len, texts)) - 1
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
        if text[-1] == "\n":
            return False
        for pattern in self._texts:
            if pattern in text:
                return False
        return not self.held(text)
