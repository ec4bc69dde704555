"""Ctrl-C between steps: an interrupt inside a step would leave a half-moved scheduler behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt(wake: Callable[[], None]) -> Generator[None]:
    """Raise KeyboardInterrupt behind the body, not in it; a second Ctrl-C is not deferred.

    Free outside the main thread and where the program handles the signal itself.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            signal.default_int_handler(number, frame)
        heard = True
        wake()

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if heard:
        raise KeyboardInterrupt
