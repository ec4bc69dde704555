"""A worker's process as its parent sees it, and the process that makes them.

A fresh interpreter needs a second to read its modules. So one process reads them once, and every
worker is a fork of it: a worker that had to be ended is replaced within milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import LimitError
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.document import Document
from deepinfer_search_fetch.extract.tokens import PageTable
from deepinfer_search_fetch.extract.worker import LENGTHS, NUMBER, STATUS, lowest_priority
from deepinfer_search_fetch.models import OutlineEntry

PAGES_PER_WORKER = 500
PEAK_BYTES = 250 * 1024 * 1024
_END_SECONDS = 10.0


class WorkerLostError(Exception):
    """The worker died or had to be killed. limit: what it reached, None for a crash."""

    def __init__(self, limit: str | None = None) -> None:
        super().__init__(limit or "crashed")
        self.limit = limit


class WorkerFactory:
    """Starts workers by forking a process that has read all modules; that one starts when the first
    worker is asked for, and again if it was lost."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self, nice: int = 0) -> WorkerProcess:
        """A worker that is ready for its first page. Raises LimitError(unavailable)."""
        with self._guard:
            for _ in range(2):
                with suppress(OSError):
                    return self._forked(nice)
                self._forget()
        raise LimitError("unavailable", "no process for reading pages could be started")

    def close(self) -> None:
        """End the process that forks; workers end when their pipes are closed."""
        with self._guard:
            self._closed = True
            self._forget()

    def _forked(self, nice: int) -> WorkerProcess:
        control = self._control or self._begin()
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        status_read, status_write = os.pipe()
        try:
            given = (stdin_read, stdout_write, status_write)
            socket.send_fds(control, [NUMBER.pack(nice)], given)
            pid = _forked_pid(control.recv(NUMBER.size))
            pidfd = os.pidfd_open(pid)
        except OSError:
            for end in (stdin_write, stdout_read, status_read):
                os.close(end)
            raise
        finally:
            for end in (stdin_read, stdout_write, status_write):
                os.close(end)
        return WorkerProcess(self._limits, pid, pidfd, stdin_write, stdout_read, status_read)

    def _begin(self) -> socket.socket:
        if self._closed:
            raise LimitError("unavailable", "the extraction workers were ended")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deepinfer_search_fetch.extract.worker",
                 self._limits.model_dump_json(), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._control = ours
        if not ours.recv(1):
            raise OSError("the process that forks workers did not start")
        return ours

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


class WorkerProcess:
    """One worker and the pipes to it; see `WorkerFactory`."""

    def __init__(
        self, limits: Limits, pid: int, pidfd: int, stdin: int, stdout: int, status: int
    ) -> None:
        # CPU time is limited inside; this ends what waits instead of computing.
        self._wall_seconds = limits.extract_wall_seconds
        self.pid = pid
        self._pidfd, self._status = pidfd, status
        self._stdin, self._stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self._pages = 0
        self._overdue = False
        self._guard = threading.Lock()
        self._stopped = False
        self._ended: int | None = None

    def ask(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """See `pool.Worker.ask`."""
        self._pages += 1
        head = json.dumps(header).encode()
        overdue = threading.Timer(self._wall_seconds, self._end_overdue)
        overdue.daemon = True
        overdue.start()
        try:
            self._stdin.write(LENGTHS.pack(len(head), len(body)) + head)
            self._stdin.write(body)
            self._stdin.flush()
            answer, content = self._read()
        except (OSError, ValueError, EOFError):
            raise self._lost() from None
        finally:
            overdue.cancel()
        if self._pages >= PAGES_PER_WORKER:
            answer["peak_bytes"] = PEAK_BYTES + 1  # it has served long enough
        return answer, content

    def alive(self) -> bool:
        """Whether it can be given a page."""
        return not self._stopped and not _readable(self._pidfd, 0)

    def cpu_seconds(self) -> float:
        """CPU time it has used so far; 0 when it has ended."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)  # what clock_getcpuclockid(3) answers
        except OSError:
            return 0.0

    def yield_cpu(self) -> None:
        """Go on at the lowest priority."""
        with suppress(OSError):
            lowest_priority(self.pid)

    def stop(self) -> None:
        """End it; what is asked of it meanwhile is a WorkerLostError."""
        with self._guard:
            if self._stopped:
                return
            self._stopped = True
        self._kill()
        # Not here: a thread may be reading, and sees the end of the pipe first.
        threading.Thread(target=self._close, daemon=True).start()

    def _kill(self) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _close(self) -> None:
        self._exit_code()
        for stream in (self._stdout, self._stdin):
            with suppress(OSError, ValueError):
                stream.close()
        with self._guard:
            os.close(self._pidfd)
            os.close(self._status)

    def _end_overdue(self) -> None:
        self._overdue = True
        self.stop()

    def _lost(self) -> WorkerLostError:
        """Why there is no answer."""
        if self._overdue:
            return WorkerLostError("extract_wall_seconds")
        if not self._stopped:
            self._kill()
        ended = self._exit_code()
        return WorkerLostError("extract_cpu_seconds" if ended == -signal.SIGPROF else None)

    def _exit_code(self) -> int:
        """How it ended, which it is about to; 1 if nobody can tell."""
        with self._guard:
            if self._ended is not None:
                return self._ended
            told = b""
            if _readable(self._status, _END_SECONDS):
                told = os.read(self._status, STATUS.size)
            code = int(STATUS.unpack(told)[0]) if len(told) == STATUS.size else 1
            self._ended = code
            return code

    def _read(self) -> tuple[dict[str, Any], bytes]:
        lengths = self._stdout.read(LENGTHS.size)
        if len(lengths) < LENGTHS.size:
            raise EOFError
        header_size, body_size = LENGTHS.unpack(lengths)
        head, body = self._stdout.read(header_size), self._stdout.read(body_size)
        if len(head) + len(body) < header_size + body_size:
            raise EOFError
        return json.loads(head), body


def _forked_pid(told: bytes) -> int:
    (pid,) = NUMBER.unpack(told) if len(told) == NUMBER.size else (-1,)
    if pid < 0:
        raise OSError("no worker was forked")
    return pid


def _readable(end: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def document_of(record: dict[str, Any], content: bytes) -> Document:
    """The document of `worker.record_of` and its content."""
    extraction = record["extraction"]
    for name in ("links", "images"):
        extraction[name] = [(url, text) for url, text in extraction[name]]
    pages = record["pages"]
    pages["frames"] = {int(k): (v[0], v[1]) for k, v in pages["frames"].items()}
    entries = record["outline"]
    return Document(
        Extraction(content=content.decode("utf-8", "surrogatepass"), **extraction),
        PageTable(**pages),
        record["digest"],
        record["scripted"],
        None if entries is None else tuple(OutlineEntry(**e) for e in entries),
    )
