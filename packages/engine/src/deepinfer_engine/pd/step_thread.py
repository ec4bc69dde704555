"""The thread that steps an `EngineLoop`, so that a step never holds up sockets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from deepinfer_engine.core.loop import EngineLoop

log = logging.getLogger(__name__)


class StepThread:
    """Steps while there is work and sleeps on the loop's condition while there is none."""

    def __init__(self, loop: EngineLoop, *, failed: Callable[[BaseException], None]) -> None:
        """`failed` is called from the thread, once, when a step raised: the engine is then over."""
        self._loop = loop
        self._failed = failed
        self._stopping = False
        self.last_step_s = 0.0
        """Duration of the last step, for the load report."""
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Return after the step in flight; queued sequences stay where they are."""
        self._stopping = True
        self._loop.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                started = time.monotonic()
                if self._loop.step(started) is None:
                    self._loop.wait_for_work()
                else:
                    self.last_step_s = time.monotonic() - started
        except BaseException as error:
            log.exception("an engine step failed; every request of this worker ends")
            self._failed(error)
            self._loop.abort_all("error")
