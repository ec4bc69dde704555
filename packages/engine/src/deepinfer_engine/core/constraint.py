"""Where a sequence stands in its grammar: by the tokens it has committed, and nothing else.

The state is rebuilt from the output whenever it is missing, so that a sequence may be parked, or
begun on one worker and continued on another. Only the step's thread touches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

MaskRow = npt.NDArray[np.int32]


class Matcher(Protocol):
    """A position in a grammar."""

    @property
    def accepted(self) -> int:
        """Tokens gone so far."""
        ...

    def fill(self, mask: MaskRow) -> bool:
        """Write the allowed tokens; False, and nothing written, behind the end."""
        ...

    def accept(self, token: int) -> bool:
        """Move on; False, and no move, if the token is not allowed."""
        ...

    def rollback(self, count: int) -> None: ...


class Grammar(Protocol):
    """A compiled grammar; immutable and shared by requests."""

    @property
    def mask_words(self) -> int: ...

    def matcher(self, prefix: str) -> Matcher:
        """A walk from behind `prefix`. Raises ConstraintError if nothing begins with it."""
        ...


class CompiledGrammar(Grammar, Protocol):
    """What a compiler makes of a text."""

    def thinking(self, tokens: int) -> Grammar:
        """The same, with at most so many tokens of thinking in front of the answer."""
        ...


class SequenceConstraint(Protocol):
    """`RowConstraint` of one sequence, which the step's thread alone touches."""

    @property
    def mask_words(self) -> int: ...

    def catch_up(self, tokens: Sequence[int], start: int) -> None:
        """Take the output `tokens[start:]` as far as it is not known yet."""
        ...

    def forget(self) -> None:
        """Give the memory of the walk back; `catch_up` walks again from the start."""
        ...

    def fill(self, rows: MaskRow, drafts: Sequence[int]) -> None:
        """See `RowConstraint.fill`. `catch_up` comes first."""
        ...


class GivenMask:
    """What the next token may be, told by the worker that holds the grammar."""

    __slots__ = ("_row",)

    def __init__(self, row: MaskRow) -> None:
        """row: int32 [mask_words]"""
        self._row = row

    @property
    def mask_words(self) -> int:
        return len(self._row)

    def catch_up(self, tokens: Sequence[int], start: int) -> None: ...

    def forget(self) -> None: ...

    def fill(self, rows: MaskRow, drafts: Sequence[int]) -> None:
        rows[0] = self._row


def mask_behind(grammar: Grammar, prefix: str, tokens: Sequence[int]) -> MaskRow:
    """int32 [mask_words]: what may come behind `prefix` and the output `tokens`."""
    state = ConstraintState(grammar, prefix)
    state.catch_up(tokens, 0)
    rows = np.full((1, grammar.mask_words), -1, dtype=np.int32)
    state.fill(rows, ())
    return rows[0]


class ConstraintState:
    """`backend.base.RowConstraint` of one sequence."""

    __slots__ = ("_broken", "_grammar", "_matcher", "_prefix")

    def __init__(self, grammar: Grammar, prefix: str) -> None:
        """Raises ConstraintError if the given beginning does not fit the grammar."""
        self._grammar = grammar
        self._prefix = prefix
        self._matcher: Matcher | None = grammar.matcher(prefix)
        self._broken = False

    @property
    def grammar(self) -> Grammar:
        return self._grammar

    @property
    def mask_words(self) -> int:
        return self._grammar.mask_words

    def catch_up(self, tokens: Sequence[int], start: int) -> None:
        """Take the output `tokens[start:]` as far as it is not known yet."""
        if self._matcher is None:
            self._matcher = self._grammar.matcher(self._prefix)
        for at in range(start + self._matcher.accepted, len(tokens)):
            if self._broken or not self._matcher.accept(tokens[at]):
                # Every token was sampled under a mask, so this is a fault. The next mask
                # allows nothing, which ends this sequence and no other.
                self._broken = True
                return

    def forget(self) -> None:
        """Give the memory of the walk back; `catch_up` walks again from the start."""
        self._matcher = None

    def fill(self, rows: MaskRow, drafts: Sequence[int]) -> None:
        """See `RowConstraint.fill`. `catch_up` comes first."""
        matcher = self._matcher
        if self._broken or matcher is None:
            rows[:] = 0
            return
        gone = 0
        going = matcher.fill(rows[0])
        for row, draft in enumerate(drafts):
            allowed = going and int(rows[row, draft // 32]) >> (draft % 32) & 1
            if not allowed or not matcher.accept(draft):
                break
            gone += 1
            going = matcher.fill(rows[row + 1])
        matcher.rollback(gone)
