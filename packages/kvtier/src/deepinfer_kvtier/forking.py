"""What becomes of an open cache in a forked child: it is closed there, and its parent's in no way.

A child inherits descriptors, but none of the threads. It would write where its parent writes, and
the locks on the descriptors, which tell other processes what is alive and in use, would outlast a
parent that dies.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Forkable(Protocol):
    """What has threads and descriptors that belong to one process."""

    def left_to_parent(self) -> None: ...


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()


def end_in_children(cache: Forkable) -> None:
    """Call `cache.left_to_parent()` in every child that is forked from now on."""
    _open.add(cache)


def give_up(descriptors: Iterable[int]) -> None:
    """In a child: close what was inherited; the locks on it stay with the parent alone."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _in_child() -> None:
    for cache in list(_open):
        cache.left_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)
