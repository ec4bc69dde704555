"""A grammar that needs no library: what may come next is a function of what came before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from deepinfer_engine.core.types import Constraint
from deepinfer_engine.errors import ConstraintError

EOS = 256
WORDS = -(-257 // 32)
TENS = Constraint("tens")
"""Each token is at most ten above the one before (modulo 256); may end behind the fifth."""
DIES = Constraint("dies")
"""Nothing is allowed behind the third token."""


def _tens(before: Sequence[int]) -> Iterable[int]:
    last = before[-1] if before else 0
    ids = [(last + step) % 256 for step in range(11)]
    return [*ids, EOS] if len(before) >= 5 else ids


def _dies(before: Sequence[int]) -> Iterable[int]:
    return range(256) if len(before) < 3 else ()


def _endless(before: Sequence[int]) -> Iterable[int]:
    return [token for token in _tens(before) if token != EOS]


RULES: dict[str, Callable[[Sequence[int]], Iterable[int]]] = {
    "tens": _tens,
    "dies": _dies,
    "endless": _endless,
    "bad": _tens,
}


def obeys(name: str, output: Sequence[int]) -> bool:
    return all(token in set(RULES[name](output[:at])) for at, token in enumerate(output))


class ToyMatcher:
    def __init__(self, rule, log):
        self.rule, self.log, self.tokens = rule, log, []
        log.append("made")

    @property
    def accepted(self):
        return len(self.tokens)

    def fill(self, mask):
        if self.tokens and self.tokens[-1] == EOS:
            return False
        bits = np.zeros(WORDS * 32, dtype=np.uint8)
        bits[list(self.rule(self.tokens))] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept(self, token):
        if token not in set(self.rule(self.tokens)):
            return False
        self.tokens.append(token)
        return True

    def rollback(self, count):
        assert count <= len(self.tokens)
        del self.tokens[len(self.tokens) - count :]


@dataclass
class ToyGrammar:
    name: str
    log: list[str] = field(default_factory=list)
    mask_words: int = WORDS
    most: int | None = None

    def thinking(self, tokens: int) -> ToyGrammar:
        return ToyGrammar(self.name, self.log, most=tokens)

    def matcher(self, prefix: str) -> ToyMatcher:
        if prefix == "wrong":
            raise ConstraintError("the beginning does not fit", param="messages")
        return ToyMatcher(RULES[self.name], self.log)


class ToyCompiler:
    """A `GrammarCompiler`. `hold(text)` keeps a text from being ready until it is `let_go`."""

    def __init__(self) -> None:
        self.held: dict[str, Future] = {}
        self.errors: dict[str, Exception] = {}
        self.submitted: list[str] = []
        self.closed = False
        self.abandoned: list[str] = []

    def hold(self, text: str) -> None:
        self.held[text] = Future()

    def let_go(self, text: str) -> None:
        self._settle(self.held.pop(text), text)

    def _settle(self, future: Future, text: str) -> None:
        if text in self.errors:
            future.set_exception(self.errors[text])
        else:
            future.set_result(ToyGrammar(text))

    def submit(self, text: str) -> Future:
        self.submitted.append(text)
        if text in self.held:
            return self.held[text]
        future: Future = Future()
        self._settle(future, text)
        return future

    def counters(self) -> dict[str, float]:
        return {"grammar_compilations": len(self.submitted)}

    def abandon(self, text: str) -> None:
        self.abandoned.append(text)

    def gauges(self) -> dict[str, float]:
        return {"grammar_queue": len(self.held)}

    def close(self) -> None:
        self.closed = True
