"""How long is the stored prefix of a chain? Asked of a location service in few, small rounds.

Blocks are published parents first and go deepest first, so presence along a chain is monotone but
for faults. A round asks at most 24 evenly spaced depths and leaves 1/25 of the range: 600 blocks
take two rounds and at most 48 keys, where asking for all would take 600.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

PROBES_A_ROUND: Final = 24


def prefix_length(
    length: int, present: Callable[[Sequence[int]], Sequence[bool]], *, probes: int = PROBES_A_ROUND
) -> int:
    """Depth up to which a chain of `length` blocks is stored, as far as the answers are monotone.

    present: answers for depths 1..length in one round trip: is the block that ends there stored?
    """
    good, bad = 0, length + 1
    while bad - good > 1:
        depths = _spread(good, bad, probes)
        for depth, there in zip(depths, present(depths), strict=True):
            if not there:
                bad = depth
                break
            good = depth
    return good


def _spread(good: int, bad: int, probes: int) -> list[int]:
    """At most `probes` depths strictly between two bounds, as evenly as whole numbers allow."""
    gap = bad - good
    if gap - 1 <= probes:
        return list(range(good + 1, bad))
    return [good + gap * i // (probes + 1) for i in range(1, probes + 1)]
