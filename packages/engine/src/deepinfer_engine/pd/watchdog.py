"""Whether steps go on: watched from a thread of its own, which waits for no step and no lock.

A step is stuck when it has shown no sign of work for longer than 20 usual steps, and never before
five seconds. Signs of work are seen from outside, so that no model has to give any: the step's
thread has used processor time, or stands elsewhere in its code. A long prefill shows them all the
time; a thread that waits for a lock, a device or a disk that is gone shows none. Where other
processes compute with the worker, their processor time counts as its own.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LEAST_S = 5.0
STEPS = 20
RUNAWAY_S = 600.0
"""Working or not: a step this long is stuck, in a loop that never ends for one."""
LOOK_S = 0.5
_CPU_S = 0.01
"""Processor time that is a sign of work."""
_AVERAGE_WEIGHT = 0.1
_CPUCLOCK_OF_THREAD = 6
"""Linux: the scheduler's clock, of one thread."""


def thread_cpu_s(thread: threading.Thread) -> float:
    """Processor time that a thread has used; 0 before it began, some time after it has ended,
    and where the system does not tell (it is Linux that does)."""
    if thread.native_id is None:
        return 0.0
    try:
        # By its number: its handle is a pointer, which leads nowhere once the thread has ended.
        return time.clock_gettime((~thread.native_id << 3) | _CPUCLOCK_OF_THREAD)
    except OSError:
        return 0.0


class StepMonitor:
    """When steps began, worked and ended. Reads no clock; written by two threads, one value each.

    `began`, `ended`: from the step's thread. `worked`: from the watchdog's.
    """

    def __init__(self) -> None:
        self.average_s = 0.0
        self.last_s = 0.0
        self._running: tuple[int, float] | None = None
        """Number of the step that runs, and since when."""
        self._number = 0
        self._sign: tuple[int, float] = (0, 0.0)
        """When which step last showed a sign of work."""

    def began(self, now: float) -> None:
        self._number += 1
        self._running = (self._number, now)

    def ended(self, now: float) -> None:
        assert self._running is not None
        self.last_s = now - self._running[1]
        self._running = None
        self.average_s += _AVERAGE_WEIGHT * (self.last_s - self.average_s)

    def idle(self) -> None:
        """It began, and there was nothing to do."""
        self._running = None

    def worked(self, now: float) -> None:
        running = self._running
        if running is not None:
            self._sign = (running[0], now)

    def suspended(self, seconds: float) -> None:
        """The whole process stood still for so long: that is no time of its step."""
        running = self._running
        if running is not None:
            self._running = (running[0], running[1] + seconds)

    @property
    def limit_s(self) -> float:
        return max(LEAST_S, STEPS * self.average_s)

    def trouble(self, now: float) -> str:
        """What is wrong with the step that runs; empty where nothing is."""
        running = self._running
        if running is None:
            return ""
        number, began = running
        signed, at = self._sign
        quiet = now - (max(began, at) if signed == number else began)
        if quiet > self.limit_s:
            return f"a step has stood still for {quiet:.0f} s"
        if now - began > max(RUNAWAY_S, 5 * STEPS * self.average_s):
            return f"a step has run for {now - began:.0f} s"
        return ""


class Watchdog:
    """Looks twice a second from its own thread; `look` is one such look."""

    def __init__(
        self,
        monitor: StepMonitor,
        thread: threading.Thread,
        *,
        told: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        helpers_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """told: hears `monitor.trouble` after every look, from the watchdog's thread.
        helpers_cpu_s: processor time of other threads and processes that a step waits for."""
        self._monitor = monitor
        self._watched = thread
        self._told = told
        self._clock = clock
        self._helpers_cpu_s = helpers_cpu_s
        self._looked = clock()
        self._place: tuple[tuple[int, int], ...] = ()
        self._cpu_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def look(self) -> None:
        now = self._clock()
        # A process that was stopped, and goes on, has been still through no fault of its step.
        gap = now - self._looked
        self._looked = now
        if gap > LEAST_S / 2:
            self._monitor.suspended(gap)
            self._monitor.worked(now)
        elif self._shows_work():
            self._monitor.worked(now)
        self._told(self._monitor.trouble(now))

    def _shows_work(self) -> bool:
        ident = self._watched.ident
        if ident is None:
            return False
        frame = sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]
        place: list[tuple[int, int]] = []
        while frame is not None:
            place.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        moved = tuple(place) != self._place
        self._place = tuple(place)
        cpu_s = thread_cpu_s(self._watched) + self._helpers_cpu_s()
        used = cpu_s - self._cpu_s
        self._cpu_s = cpu_s
        return moved or used >= _CPU_S

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception("the watchdog could not look; it will again")
