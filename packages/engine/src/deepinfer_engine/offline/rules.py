"""Tokens that are allowed or forbidden whatever the model says, as a grammar of its own or around
one: `allowed_token_ids`, `bad_words`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_engine.core.constraint import Grammar, MaskRow, Matcher


class TokenRules:
    """`core.constraint.Grammar`; `inner` is the grammar that holds besides."""

    def __init__(
        self,
        vocab_size: int,
        allowed: Sequence[int] | None,
        banned: Sequence[tuple[int, ...]],
        inner: Grammar | None = None,
    ) -> None:
        """banned: runs of tokens whose last may not follow the others."""
        self._inner = inner
        self._words = -(-vocab_size // 32) if inner is None else inner.mask_words
        bits = np.zeros(self._words * 32, dtype=np.uint8)
        if allowed is None:
            bits[:] = 1
        else:
            bits[list(allowed)] = 1
        for run in banned:
            if len(run) == 1:
                bits[run[0]] = 0
        self.base: MaskRow = np.packbits(bits, bitorder="little").view(np.int32)
        self.runs = [run for run in banned if len(run) > 1]

    @property
    def mask_words(self) -> int:
        return self._words

    def matcher(self, prefix: str) -> _RuleMatcher:
        return _RuleMatcher(self, None if self._inner is None else self._inner.matcher(prefix))


class _RuleMatcher:
    """`core.constraint.Matcher`."""

    def __init__(self, rules: TokenRules, inner: Matcher | None) -> None:
        self._rules = rules
        self._inner = inner
        self._output: list[int] = []

    @property
    def accepted(self) -> int:
        return len(self._output)

    def fill(self, mask: MaskRow) -> bool:
        if self._inner is None:
            mask[:] = -1
        elif not self._inner.fill(mask):
            return False
        mask &= self._rules.base
        for run in self._rules.runs:
            if tuple(self._output[1 - len(run) :]) == run[:-1]:
                word, bit = divmod(run[-1], 32)
                mask[word] = int(mask[word]) & ~np.int32(np.uint32(1 << bit).view(np.int32))
        return True

    def accept(self, token: int) -> bool:
        if self._inner is not None and not self._inner.accept(token):
            return False
        self._output.append(token)
        return True

    def rollback(self, count: int) -> None:
        if self._inner is not None:
            self._inner.rollback(count)
        if count:
            del self._output[-count:]
