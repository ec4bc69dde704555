"""A thread that takes checksums of queued records ahead of the writes.

Not an executor: handing work to one takes locks that its thread may hold while it waits for the
interpreter, and the first call waits for that thread to start. A producer does not wait here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from deepinfer_kvtier.puts.outgoing import Outgoing, take_checksums

_Job = tuple["Future[None]", Sequence[Outgoing]]


class Summer:
    """Takes checksums in the order of `submit`."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, records: Sequence[Outgoing]) -> Future[None]:
        """Done when the records have their checksums. Never blocks."""
        future: Future[None] = Future()
        self._jobs.put((future, records))
        return future

    def close(self) -> None:
        """Cancel what has not begun and let the thread end."""
        try:
            while job := self._jobs.get_nowait():
                job[0].cancel()
        except Empty:
            pass
        self._jobs.put(None)

    def _run(self) -> None:
        while job := self._jobs.get():
            future, records = job
            if future.set_running_or_notify_cancel():
                try:
                    take_checksums(records)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
            del job, future, records  # nothing of a caller's is held until the next one comes
