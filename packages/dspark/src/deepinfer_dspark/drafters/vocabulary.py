"""A draft model with a tokenizer of its own: tokens are matched by their strings.

A token of the draft model stands for the target's token of the same string; draft tokens without
one are never proposed. Target tokens without one are spelled with pieces the draft model has, so
that it still reads the whole text.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepinfer_dspark.arrays import Int
from deepinfer_dspark.drafters.mixed import CausalModel
from deepinfer_dspark.errors import ShapeError


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """to_target: int64 [draft tokens], the target's token of the same string or -1; spelled: draft
    tokens of every target token, () where it cannot be written."""

    to_target: Int
    spelled: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, target: Mapping[str, int], draft: Mapping[str, int]) -> VocabularyMap:
        """From two vocabularies, token string to id (`tokenizer.get_vocab()`).

        Strings must be written in one convention (two byte-level tokenizers, say). Raises
        ShapeError where they share no token or an id is negative or held twice.
        """
        for name, vocabulary in (("target", target), ("draft", draft)):
            ids = vocabulary.values()
            if not vocabulary or min(ids) < 0 or len(set(ids)) < len(vocabulary):
                raise ShapeError(f"the {name} vocabulary wants distinct ids of at least 0")
        to_target = np.full(max(draft.values()) + 1, -1, dtype=np.int64)
        for text, own in draft.items():
            to_target[own] = target.get(text, -1)
        if (to_target < 0).all():
            raise ShapeError("the two vocabularies share no token: are their strings of one kind?")
        longest = max(map(len, draft))
        spelled: list[tuple[int, ...]] = [()] * (max(target.values()) + 1)
        for text, own in target.items():
            spelled[own] = (draft[text],) if text in draft else _spell(text, draft, longest)
        return cls(to_target, tuple(spelled))

    @property
    def shared(self) -> int:
        """Tokens both have."""
        return int((self.to_target >= 0).sum())


def _spell(text: str, draft: Mapping[str, int], longest: int) -> tuple[int, ...]:
    """Longest pieces from the left, or () if a character has none."""
    out: list[int] = []
    at = 0
    while at < len(text):
        for end in range(min(len(text), at + longest), at, -1):
            if text[at:end] in draft:
                out.append(draft[text[at:end]])
                at = end
                break
        else:
            return ()
    return tuple(out)


@dataclass(slots=True)
class _Text:
    target: list[int] = field(default_factory=list[int])
    draft: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])  # of each target token in `draft`


class TranslatedModel:
    """A `CausalModel` over the target's vocabulary, made of one with another.

    Its logits are -inf where the draft model has no such token: q is exact, since drafts are drawn
    from these logits. A context longer than the model's is read from its end.
    """

    max_length: int | None = None

    def __init__(self, model: CausalModel, vocabulary: VocabularyMap) -> None:
        self._model, self._map = model, vocabulary
        known = np.flatnonzero(vocabulary.to_target >= 0)
        self._from, self._to = known, vocabulary.to_target[known]
        self._width = len(vocabulary.spelled)
        self._texts: dict[Hashable, _Text] = {}

    def logits(self, request_ids: Sequence[Hashable], texts: Sequence[Sequence[int]]) -> Any:
        """See `CausalModel.logits`."""
        own = [self._translated(r, t) for r, t in zip(request_ids, texts, strict=True)]
        limit = self._model.max_length
        found = self._model.logits(request_ids, own if limit is None else [t[-limit:] for t in own])
        inside = self._from < int(found.shape[1])  # a vocabulary may list more than the model has
        source, to = self._from[inside], self._to[inside]
        if isinstance(found, np.ndarray):
            out = np.full((found.shape[0], self._width), -np.inf, dtype=found.dtype)
        else:
            out = found.new_full((found.shape[0], self._width), float("-inf"))
        out[:, to] = found[:, source]
        return out

    def _translated(self, request: Hashable, text: Sequence[int]) -> list[int]:
        held = self._texts.setdefault(request, _Text())
        same = 0
        for a, b in zip(held.target, text, strict=False):
            if a != b:
                break
            same += 1
        del held.target[same:], held.ends[same:]
        del held.draft[held.ends[-1] if held.ends else 0 :]
        for token in text[same:]:
            if not 0 <= token < self._width:
                raise ShapeError(f"the target's vocabulary has no token {token}")
            held.draft += self._map.spelled[token]
            held.target.append(token)
            held.ends.append(len(held.draft))
        if not held.draft:  # nothing of the text can be written: any token is as good a start
            return [int(self._from[0])]
        return list(held.draft)

    def forget(self, request_id: Hashable) -> None:
        """Drop what is held of a request."""
        self._texts.pop(request_id, None)
        self._model.forget(request_id)
