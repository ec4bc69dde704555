"""Every outcome of a function of uniforms and its probability, without knowing how it decides.

The function asks for one uniform after the other. For each it falls into pieces of [0, 1) inside
which it behaves alike; borders between pieces are found by bisection, and each piece is followed
with the next uniform. Two values behave alike if they give the same results for a fixed set of
continuations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

Uniform = Callable[[], float]
Play = Callable[[Uniform], tuple[int, ...]]
"""Plays the function once with the given source of uniforms and returns what it emitted."""

GRID: Final = 17
CONTINUATIONS: Final = 12
DEPTH: Final = 12
PRECISION: Final = 1e-9


class TooManyUniformsError(Exception):
    """The function asked for more uniforms than `DEPTH`."""


def outcomes(play: Play, seed: int = 0) -> Iterator[tuple[tuple[int, ...], float]]:
    """(what is emitted, probability) over all uniforms; the same text may come more than once."""
    tails: Any = np.random.default_rng(seed).random((CONTINUATIONS, DEPTH))
    yield from _follow(play, [], 1.0, tails)


def _run(play: Play, head: list[float], tail: Any) -> tuple[tuple[int, ...], int]:
    """What is emitted, and how many uniforms were asked for."""
    asked = 0

    def uniform() -> float:
        nonlocal asked
        asked += 1
        if asked > DEPTH:
            raise TooManyUniformsError
        return head[asked - 1] if asked <= len(head) else float(tail[asked - 1])

    return play(uniform), asked


def _follow(
    play: Play, head: list[float], weight: float, tails: Any
) -> Iterator[tuple[tuple[int, ...], float]]:
    emitted, asked = _run(play, head, tails[0])
    if asked <= len(head):
        yield emitted, weight
        return

    def behaviour(u: float) -> tuple[Any, ...]:
        return tuple(_run(play, [*head, u], tail) for tail in tails)

    # uneven points: a function that rounds is not caught on its own grid
    points = [0.0, *(((i + 0.437) / GRID) for i in range(GRID)), 1.0 - 2**-53]
    low = left = points[0]
    seen = behaviour(low)
    for right in points[1:]:
        at = behaviour(right)
        while seen != at:
            a, b = left, right
            while b - a > PRECISION:
                middle = (a + b) / 2
                if behaviour(middle) == seen:
                    a = middle
                else:
                    b = middle
            yield from _follow(play, [*head, (low + a) / 2], weight * (b - low), tails)
            low = left = b
            seen = behaviour(b)
        left = right
    yield from _follow(play, [*head, (low + 1.0) / 2], weight * (1.0 - low), tails)
