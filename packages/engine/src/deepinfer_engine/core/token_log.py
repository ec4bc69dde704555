"""The tokens of a sequence, counted as they come: penalties ask at every step."""

from __future__ import annotations

from collections import Counter


class TokenLog(list[int]):
    """A list that only grows at its end. Its counts cost what was added since they were asked for.

    Only one thread asks.
    """

    __slots__ = ("_counted", "_counts", "_distinct", "_start")

    def __init__(self, tokens: tuple[int, ...]) -> None:
        super().__init__(tokens)
        self._start = self._counted = 0
        self._counts: Counter[int] = Counter()
        self._distinct: list[int] | None = None

    def counts(self, start: int) -> Counter[int]:
        """How often each token stands at `start` or behind; the caller changes nothing in it."""
        if start != self._start or self._counted < start:
            self._start = self._counted = start
            self._counts = Counter()
            self._distinct = None
        self._counts.update(self[self._counted :])
        self._counted = len(self)
        return self._counts

    def before(self, start: int) -> list[int]:
        """The tokens before `start`, each once, in order of their ids; `counts(start)` comes
        first."""
        if self._distinct is None:
            self._distinct = sorted(set(self[:start]))
        return self._distinct
