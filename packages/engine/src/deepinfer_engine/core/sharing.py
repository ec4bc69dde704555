"""Prompts that begin alike and arrive together: the first computes, the others wait and hit.

Without this every prompt of one wave finds an empty cache, and a long common beginning is computed
as often as there are prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_engine.core.sequence import LiveSequence, Phase

_BUSY = (Phase.ADMITTED, Phase.PREFILLING)


class PrefixSharing:
    """Which admitted prompts wait for which. Under the loop's lock."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._computing: list[LiveSequence] = []
        self._waiting: list[tuple[LiveSequence, LiveSequence, int]] = []
        """(who waits, for whom, until so many of its tokens are computed)."""

    def hold(self, admitted: Sequence[LiveSequence]) -> list[LiveSequence]:
        """Those that may look up their prefix now; the others come out of `due`."""
        self._computing = [seq for seq in self._computing if seq.phase in _BUSY]
        free: list[LiveSequence] = []
        for seq in admitted:
            leader, common = self._leader(seq)
            if leader is None:
                free.append(seq)
                self._computing.append(seq)
            else:
                leader.wanted_borders.add(common)
                self._waiting.append((seq, leader, common))
        return free

    def due(self) -> list[LiveSequence]:
        """Those whose wait is over: computed as far as they need, or given up."""
        over = [w for w in self._waiting if self._is_over(*w)]
        if over:
            self._waiting = [w for w in self._waiting if w not in over]
            self._computing += [seq for seq, _, _ in over]
        return [seq for seq, _, _ in over]

    def _is_over(self, seq: LiveSequence, leader: LiveSequence, common: int) -> bool:
        offered = min(leader.num_tokens, leader.published_blocks * self._size)
        return seq.aborting or leader.phase not in _BUSY or offered >= common

    def _leader(self, seq: LiveSequence) -> tuple[LiveSequence | None, int]:
        """Who computes the longest beginning of this prompt just now, in whole blocks."""
        best, most = None, 0
        for other in self._computing:
            common = self._common(seq, other)
            if common > max(most, other.num_tokens):
                best, most = other, common
        return best, most

    def _common(self, seq: LiveSequence, other: LiveSequence) -> int:
        one, two = seq.request, other.request
        if one.salt != two.salt or one.pictures or two.pictures or one.prompt_logprobs is not None:
            return 0
        size, a, b = self._size, one.token_ids, two.token_ids
        # The last token of a prompt is always computed.
        limit = min(len(a) - 1, len(b)) // size * size
        at = 0
        while at < limit and a[at : at + size] == b[at : at + size]:
            at += size
        return at
