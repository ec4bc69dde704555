"""The thread that steps an `EngineLoop`, so that a step never holds up sockets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from deepinfer_engine.pd.watchdog import StepMonitor, Watchdog, thread_cpu_s

log = logging.getLogger(__name__)


class Steps(Protocol):
    """What a step thread runs: `core.loop.EngineLoop`, or an encode worker's queue."""

    def step(self, now: float) -> object | None:
        """One step; None when there was nothing to do."""
        ...

    def wait_for_work(self) -> None: ...

    def wake(self) -> None: ...

    def abort_all(self, reason: Literal["error"]) -> None: ...

    def close(self) -> None: ...

    @property
    def waits_for(self) -> Sequence[threading.Thread]: ...


class StepThread:
    """Steps while there is work and sleeps on the loop's condition while there is none."""

    def __init__(
        self,
        loop: Steps,
        *,
        failed: Callable[[BaseException], None],
        looked: Callable[[str], None] = lambda trouble: None,
        helpers_cpu_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`failed` is called from the thread, once, when a step raised: the engine is then over.
        `looked` is called twice a second from another thread with what is wrong, or nothing.
        `helpers_cpu_s`: processor time of other processes that steps wait for."""
        self._loop = loop
        self._failed = failed
        self._looked = looked
        self._stopping = False
        self.monitor = StepMonitor()
        self.trouble = ""
        """Why no step comes to an end; empty while steps do."""
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._watchdog = Watchdog(
            self.monitor,
            self._thread,
            told=self._tell,
            helpers_cpu_s=lambda: helpers_cpu_s() + sum(map(thread_cpu_s, loop.waits_for)),
        )

    @property
    def last_step_s(self) -> float:
        """Duration of the last step, for the load report."""
        return self.monitor.last_s

    def start(self) -> None:
        self._thread.start()
        self._watchdog.start()

    def stop(self) -> None:
        """Return after the step in flight; queued sequences stay where they are."""
        self._watchdog.stop()
        self._stopping = True
        self._loop.wake()
        if self._thread is not threading.current_thread():
            # One that stands still would keep the whole worker from ending.
            self._thread.join(None if not self.trouble else 1.0)

    def _tell(self, trouble: str) -> None:
        if trouble and not self.trouble:
            log.error("%s", trouble)
        self.trouble = trouble
        self._looked(trouble)

    def _run(self) -> None:
        try:
            while not self._stopping:
                started = time.monotonic()
                self.monitor.began(started)
                if self._loop.step(started) is None:
                    self.monitor.idle()
                    self._loop.wait_for_work()
                else:
                    self.monitor.ended(time.monotonic())
        except BaseException as error:
            self.monitor.idle()
            log.exception("an engine step failed; every request of this worker ends")
            self._failed(error)
            self._loop.abort_all("error")
        finally:
            self._loop.close()
