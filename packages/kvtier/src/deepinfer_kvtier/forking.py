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
from typing import Any

# Not weak methods: their callbacks print a traceback when the interpreter ends before they do.
_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def call_in_children(owner: Any, method: Callable[[Any], None]) -> None:
    """Call `method(owner)` in every child forked from now on, as long as `owner` is there."""
    _calls[owner] = method


def give_up(descriptors: Iterable[int]) -> None:
    """In a child: close what was inherited; the locks on it stay with the parent alone."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _in_child() -> None:
    for owner, method in list(_calls.items()):
        method(owner)
    _calls.clear()


os.register_at_fork(after_in_child=_in_child)
