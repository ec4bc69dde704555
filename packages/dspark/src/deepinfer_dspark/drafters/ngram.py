"""Drafts copied from where the last few tokens occurred before: no model, no device.

An index from n-grams to the position after their latest occurrence grows with the text, so a
round costs a few dictionary look-ups whatever the length of the history.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.uniforms import Uniforms
from deepinfer_dspark.verification import VerifyResult

Index = dict[tuple[int, ...], int]


REACH: Final = 32
"""How far back a match is followed: a long one is almost surely a copy."""
PRIOR: Final = 8.0
"""Positions that the first guess of an acceptance rate is worth."""
OWN_PRIOR: Final = 2.0
"""Positions that the rates of all texts are worth beside what one text did: few, since a sampled
text follows no copy that a greedy one would, and each that fails cost a verified draft."""


@dataclass(slots=True)
class _Text:
    """An index of one request's text, and what was last proposed for it."""

    indexed: int = 0
    after: Index = field(default_factory=dict[tuple[int, ...], int])
    suffixes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])  # at `indexed`
    matched: int = 0  # tokens before the proposal that agree with those before its source
    proposed_at: int = 0  # length of the text then
    proposed: list[int] = field(default_factory=list[int])
    believed: list[float] = field(default_factory=list[float])  # confidences of the proposed
    hits: float = 0.0  # positions of this text that came true, and those that were expected to
    expected: float = 0.0

    def trust(self) -> float:
        """What this text did beside what all texts do, at most 1."""
        return min(1.0, (self.hits + OWN_PRIOR) / (self.expected + OWN_PRIOR))


class NGramDrafter:
    """Prompt lookup: the continuation of the longest suffix (n_max..n_min tokens) seen before.

    Drafts are a function of the prefix (point mass), so any budget rule is lossless with them.
    The confidence of a draft is the share of drafts with as long a match behind them that came
    true, over all texts, lowered where this text did worse. It is learned from the texts, whether
    or not the drafts were verified.

    first_indexed: of a text that is new, only so many last tokens are indexed, so that the first
        round of a long prompt costs no more than that; None: all. What comes later is always.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self,
        max_tokens: int = 5,
        *,
        n_min: int = 2,
        n_max: int = 4,
        ewma: float = 0.02,
        first_indexed: int | None = None,
    ) -> None:
        if not 1 <= n_min <= n_max or max_tokens < 1 or not 0 <= ewma < 1:
            raise ShapeError(
                f"NGramDrafter wants 1 <= n_min <= n_max, max_tokens >= 1 and 0 <= ewma < 1, got "
                f"{n_min}, {n_max}, {max_tokens}, {ewma}"
            )
        if first_indexed is not None and first_indexed < 0:
            raise ShapeError(f"first_indexed counts tokens, got {first_indexed}")
        self.max_tokens = max_tokens
        self._first_indexed = first_indexed
        self._lengths = range(n_max, n_min - 1, -1)
        self._keep = 1.0 - ewma
        # by bit length of the match: 1, 2-3, 4-7, 8-15, 16-31, 32
        # (plain floats: of so few numbers numpy costs more than it saves)
        guess = (0.2, 0.3, 0.5, 0.8, 0.9, 0.95, 0.95)
        self._hits, self._seen = [g * PRIOR for g in guess], [PRIOR] * len(guess)
        steps = range(REACH + max_tokens + 1)
        self._class = [min(n.bit_length(), len(guess) - 1) for n in steps]
        self._texts: dict[Hashable, _Text] = {}

    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`; `rng` is not used."""
        tokens = np.zeros((batch.requests, self.max_tokens), dtype=np.int64)
        lengths = np.zeros(batch.requests, dtype=np.int64)
        conf = np.zeros((batch.requests, self.max_tokens))
        room = batch.room(self.max_tokens)
        for i, (request, history) in enumerate(zip(batch.request_ids, batch.history, strict=True)):
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = _Text()
            self._learn(text, history)
            at = self._find(text, history)
            if at is None:
                continue
            # also where no draft is wanted: what would have come true is worth knowing
            lengths[i] = room[i]
            text.matched = _agreement(history, at)
            text.proposed_at, text.proposed = len(history), self._copy(history, at)
            tokens[i] = text.proposed
            own = self._class[text.matched : text.matched + self.max_tokens]
            text.believed = [self._hits[c] / self._seen[c] for c in own]
            trust = text.trust()
            conf[i] = [rate * trust for rate in text.believed]
        return Proposal(tokens, lengths, conf=conf)

    def _learn(self, text: _Text, history: Sequence[int]) -> None:
        """Compare the last proposal with what came since; its positions up to the first miss."""
        text.hits, text.expected = self._keep * text.hits, self._keep * text.expected
        if not text.proposed:
            return
        came = history[text.proposed_at : text.proposed_at + len(text.proposed)]
        for k, (guess, token) in enumerate(zip(text.proposed, came, strict=False)):
            own = self._class[text.matched + k]
            text.hits += guess == token
            text.expected += text.believed[k]
            self._hits[own] = self._keep * self._hits[own] + (guess == token)
            self._seen[own] = self._keep * self._seen[own] + 1.0
            if guess != token:
                break
        text.proposed = []

    def _find(self, text: _Text, history: Sequence[int]) -> int | None:
        """Position after the latest earlier occurrence of the longest known suffix."""
        if text.indexed > len(history):  # a shorter history than before: another text
            text.indexed, text.after, text.suffixes = 0, {}, []
        if text.indexed == 0 and self._first_indexed is not None:
            text.indexed = max(0, len(history) - self._first_indexed)
        # an n-gram is entered once the token after it is known, so a suffix never finds itself
        after, total, begin = text.after, len(history), max(text.indexed, 1)
        if text.suffixes and begin < total:  # they were made to be looked for
            for gram in text.suffixes:
                after[gram] = begin
            begin += 1
        for end in range(begin, total):
            for n in self._lengths:
                if n <= end:
                    after[tuple(history[end - n : end])] = end
        text.indexed = max(total, 1)
        longest = tuple(history[-self._lengths[0] :])
        text.suffixes = [longest[-n:] for n in self._lengths if n <= total]
        for gram in text.suffixes:
            at = after.get(gram)
            if at is not None:
                return at
        return None

    def _copy(self, history: Sequence[int], at: int) -> list[int]:
        """Tokens from `at` on; past the end the drafts continue themselves (a repeating text)."""
        out = list(history[at : at + self.max_tokens])
        period = len(history) - at
        while len(out) < self.max_tokens:
            out.append(out[len(out) - period])
        return out

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Nothing to do: the next proposal sees in the text what came true."""

    def reset(self, request_id: Hashable) -> None:
        """Drop the index of a request."""
        self._texts.pop(request_id, None)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Copy the index of a request."""
        text = self._texts.get(request_id)
        if text is not None:
            self._texts[new_id] = replace(text, after=dict(text.after), proposed=[])


def _agreement(history: Sequence[int], at: int) -> int:
    """Tokens before `at` that equal those at the end of the history, up to REACH."""
    end, n = len(history), 0
    while n < REACH and n < at and history[at - 1 - n] == history[end - 1 - n]:
        n += 1
    return n
