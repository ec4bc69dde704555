"""Drafts copied from where the last few tokens occurred before: no model, no device.

An index from n-grams to the position after their latest occurrence grows with the text, so a
round costs a few dictionary look-ups whatever the length of the history.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.uniforms import Uniforms
from deepinfer_dspark.verification import VerifyResult

Index = dict[tuple[int, ...], int]


@dataclass(slots=True)
class _Text:
    indexed: int = 0
    after: Index = field(default_factory=dict[tuple[int, ...], int])
    matched: int = 0


class NGramDrafter:
    """Prompt lookup: the continuation of the longest suffix (n_max..n_min tokens) seen before.

    Drafts are a function of the prefix (point mass), so any budget rule is lossless with them.
    Confidence is the running acceptance rate by match length, the same for every position.
    """

    def __init__(
        self, max_tokens: int = 5, *, n_min: int = 2, n_max: int = 4, ewma: float = 0.05
    ) -> None:
        if not 1 <= n_min <= n_max or max_tokens < 1:
            raise ShapeError(
                f"NGramDrafter wants 1 <= n_min <= n_max and max_tokens >= 1, got {n_min}, "
                f"{n_max}, {max_tokens}"
            )
        self.max_tokens = max_tokens
        self._lengths = range(n_max, n_min - 1, -1)
        self._ewma = ewma
        self._rate = np.full(n_max + 1, 0.5)
        self._texts: dict[Hashable, _Text] = {}

    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`; `rng` is not used."""
        tokens = np.zeros((batch.requests, self.max_tokens), dtype=np.int64)
        lengths = np.zeros(batch.requests, dtype=np.int64)
        conf = np.zeros((batch.requests, self.max_tokens))
        room = batch.room(self.max_tokens)
        for i, (request, history) in enumerate(zip(batch.request_ids, batch.history, strict=True)):
            text = self._texts.setdefault(request, _Text())
            at = self._find(text, history)
            if at is None or room[i] == 0:
                continue
            lengths[i] = room[i]
            conf[i] = self._rate[text.matched]
            tokens[i] = self._copy(history, at)
        return Proposal(tokens, lengths, conf=conf)

    def _find(self, text: _Text, history: Sequence[int]) -> int | None:
        """Position after the latest earlier occurrence of the longest known suffix."""
        if text.indexed > len(history):  # a shorter history than before: another text
            text.indexed, text.after = 0, {}
        # an n-gram is entered once the token after it is known, so a suffix never finds itself
        for end in range(max(text.indexed, 1), len(history)):
            for n in self._lengths:
                if n <= end:
                    text.after[tuple(history[end - n : end])] = end
        text.indexed = max(len(history), 1)
        for n in self._lengths:
            if n <= len(history):
                at = text.after.get(tuple(history[-n:]))
                if at is not None:
                    text.matched = n
                    return at
        text.matched = 0
        return None

    def _copy(self, history: Sequence[int], at: int) -> list[int]:
        """Tokens from `at` on; past the end the drafts continue themselves (a repeating text)."""
        out = list(history[at : at + self.max_tokens])
        period = len(history) - at
        while len(out) < self.max_tokens:
            out.append(out[len(out) - period])
        return out

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Update the acceptance rate of the match lengths that were just judged."""
        judged = result.judged
        for i, request in enumerate(request_ids):
            text = self._texts.get(request)
            if text is None or text.matched == 0 or judged[i] == 0:
                continue
            accepted = min(int(result.n_accepted[i]), int(judged[i]))
            for k in range(int(judged[i])):
                hit = float(k < accepted)
                self._rate[text.matched] += self._ewma * (hit - self._rate[text.matched])

    def reset(self, request_id: Hashable) -> None:
        """Drop the index of a request."""
        self._texts.pop(request_id, None)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Copy the index of a request."""
        text = self._texts.get(request_id)
        if text is not None:
            self._texts[new_id] = _Text(text.indexed, dict(text.after), text.matched)
