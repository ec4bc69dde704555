"""What becomes of an open cache in a forked child: it is closed there, and its parent's in no way.

A child inherits descriptors, but none of the threads. It would write where its parent writes, and
the locks on the descriptors, which tell other processes what is alive and in use, would outlast a
parent that dies.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable

_calls: set[weakref.WeakMethod[Callable[[], None]]] = set()


def call_in_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child forked from now on, as long as its object is there."""
    _calls.add(weakref.WeakMethod(method, _calls.discard))


def give_up(descriptors: Iterable[int]) -> None:
    """In a child: close what was inherited; the locks on it stay with the parent alone."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _in_child() -> None:
    for reference in list(_calls):
        method = reference()
        if method is not None:
            method()
    _calls.clear()


os.register_at_fork(after_in_child=_in_child)
