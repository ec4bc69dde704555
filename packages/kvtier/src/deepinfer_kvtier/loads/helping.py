"""One list of work, taken from by the calling thread and by threads that help it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from typing import Final, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Urgency(Protocol):
    """How a read lets more urgent ones pass between two of its pieces."""

    @property
    def contested(self) -> bool:
        """Whether a more urgent read waits or runs."""
        ...

    def give_way(self) -> None:
        """Let more urgent reads pass, if there are any. Called with no lock held."""
        ...


class _Alone:
    contested = False

    def give_way(self) -> None:
        """Nobody waits."""


ALONE: Final[Urgency] = _Alone()
"""Of work that nobody queued: it never gives way."""


def with_helpers(
    work: Callable[[bool], Result], pool: Executor | None, helpers: int
) -> list[Result]:
    """Do `work(False)` here and `work(True)` in up to `helpers` threads of a pool.

    returns: what each of those that began has returned, that of this thread first. None of them
             runs any more, also when one raises.
    """
    others = [] if pool is None else [pool.submit(work, True) for _ in range(helpers)]
    try:
        results = [work(False)]
    finally:
        # Nobody may write to the destinations once this call has returned.
        wait([other for other in others if not other.cancel()])
    return results + [other.result() for other in others if not other.cancelled()]


def taken(left: deque[Item], turn: Urgency, *, helping: bool) -> Iterator[Item]:
    """What this thread takes from the list, until nothing is left.

    turn: more urgent loads pass between two items; who helps leaves the rest to the calling thread.
    """
    while left:
        if turn.contested:
            if helping:
                return
            turn.give_way()
        try:
            item = left.popleft()
        except IndexError:  # another thread took the last one
            return
        yield item
