"""How much of a prompt a step reads while other sequences wait for their next token.

A step with prompt tokens may take `gap` times as long as a step without. What steps take is seen,
not modelled: the share of prompt tokens grows while steps are shorter than that, and shrinks when
they are longer. A token far into its prompt costs more than one at its beginning, so each depth has
a share of its own: what a short prompt was allowed would be too much for one that goes on behind a
long cached beginning. Without a measured step to compare with, one step is left without prompt
tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LEAST = 16
"""Prompt tokens a step reads at least, so that every prompt ends."""
FIRST = 32
"""... and before anything is known."""
DEPTH = 512
"""Positions below this are one depth, below the double the next, and so on."""
DEEPER = 0.8
"""What a depth that nobody was at yet is allowed of the one above it."""
DOWN, UP = 0.3, 0.03
"""How far the usual step follows a shorter and a longer one: what neighbours on the machine add to
a step must not become what is usual."""
AGAIN = 256
"""Steps with prompt tokens after which one without is measured again: contexts have grown."""


@dataclass(slots=True)
class Pace:
    """Sizes by what steps took."""

    gap: float
    """0 = prompts are not held back."""
    _usual: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds of a step without prompt tokens, by size of the batch in powers of two."""
    _tokens: dict[int, float] = field(default_factory=dict[int, float])
    """What was allowed last, by depth."""
    limit: float = math.inf
    """Seconds a step may take, whatever is usual."""
    _since: int = 0

    def tokens(self, rows: int, most: int, position: int = 0) -> int:
        """Prompt tokens of the next step beside so many rows, at most `most`, from a position in
        their prompt on; 0: none this time."""
        if not rows or not self.gap:
            return most
        if rows.bit_length() not in self._usual or self._since >= AGAIN:
            self._since = 0
            return 0
        return min(most, max(LEAST, int(self._allowed(_depth(position)))))

    def took(self, rows: int, prompt_tokens: int, seconds: float, position: int = 0) -> None:
        """A step is over."""
        if not rows or seconds <= 0:
            return
        size = rows.bit_length()
        usual = self._usual.get(size)
        if not prompt_tokens:
            if usual is None:
                self._usual[size] = seconds
            else:
                follows = DOWN if seconds < usual else UP
                self._usual[size] = usual + follows * (min(seconds, 3 * usual) - usual)
            return
        self._since += 1
        if usual is None:
            return
        # A smaller chunk than was allowed, the end of a prompt, says nothing against more.
        ratio = min(max(min(self.gap * usual, self.limit) / seconds, 0.5), 1.25)
        depth = _depth(position)
        allowed = self._allowed(depth)
        if ratio < 1 or prompt_tokens >= int(allowed):
            self._tokens[depth] = max(LEAST, min(prompt_tokens, allowed) * ratio)

    def _allowed(self, depth: int) -> float:
        for above in range(depth, -1, -1):
            if above in self._tokens:
                return self._tokens[above] * DEEPER ** (depth - above)
        return min(self._tokens.values(), default=FIRST)


def _depth(position: int) -> int:
    return (position // DEPTH).bit_length()
