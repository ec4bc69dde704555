"""The extraction workers' processes: frames in, frames out, until the parent closes the pipe.

A frame is a JSON header and bytes behind it. Every job has a limit of CPU time, of which the kernel
ends the process, and one of memory.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import LimitError, SearchFetchError
from deepinfer_search_fetch.extract.document import (
    Document,
    Job,
    find_highlights,
    make_document,
)
from deepinfer_search_fetch.extract.html import HtmlOptions

LENGTHS = struct.Struct("!II")
NUMBER = struct.Struct("!i")
STATUS = struct.Struct("!i")
LOWEST_NICE = 19
# Below the service's own process, which works for everybody: eight pages that are read at once
# would else leave its event loop a ninth of the processors.
PAGES_NICE = 5
_WARM_PAGE = b"<html lang=en><title>Warm</title><body><h1>Warm</h1><p>" + b"Words of a page. " * 40


def fork_workers(control: socket.socket, limits: Limits) -> None:
    """Read all modules, then fork a worker for every message until the parent closes its end.

    A message is the worker's nice value, with three pipe ends: its standard input, its standard
    output, and where its exit status is written when it has ended. The answer is its process id.
    """
    _warm(limits)
    gc.collect()
    gc.freeze()  # a worker's collections then touch, and copy, none of this
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, _noticed)
    signal.set_wakeup_fd(wake_write)
    statuses: dict[int, int] = {}
    control.send(b"w")
    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_ended(statuses)
        if control not in ready:
            continue
        message, ends, _, _ = socket.recv_fds(control, NUMBER.size, 3)
        if not message:
            return
        stdin, stdout, status = ends
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (control.fileno(), wake_read, wake_write, status, *statuses.values()):
                os.close(end)
            _work(stdin, stdout, limits, *NUMBER.unpack(message))
        os.close(stdin)
        os.close(stdout)
        if pid > 0:
            statuses[pid] = status
        else:
            os.close(status)
        control.send(NUMBER.pack(pid))


def _noticed(number: int, frame: FrameType | None) -> None:
    """The wake-up pipe has it already."""
    del number, frame


def _report_ended(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = statuses.pop(pid)
        with suppress(OSError):
            os.write(end, STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(end)


def _work(stdin: int, stdout: int, limits: Limits, nice: int) -> NoReturn:
    """A forked worker's whole life."""
    code = 1
    try:
        if nice == LOWEST_NICE:
            lowest_priority(0)
        else:
            os.nice(nice)
        if nice <= PAGES_NICE:
            _warm(limits)  # the first page of a fork copies memory: not while somebody waits
        serve(os.fdopen(stdin, "rb"), os.fdopen(stdout, "wb"), limits)
        code = 0
    except (BrokenPipeError, KeyboardInterrupt):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _warm(limits: Limits) -> None:
    """Read a page in every mode, which loads what is loaded late and touches what is used."""
    for mode in ("article", "fast"):
        make_document(_WARM_PAGE, Job("", "text/html", HtmlOptions(mode=mode)), limits)


def lowest_priority(pid: int) -> None:
    """Let a process run when no other wants the processor. Raises OSError where it has ended.

    The nice value alone leaves it its slice when another wakes up, a few milliseconds each time.
    """
    os.setpriority(os.PRIO_PROCESS, pid, LOWEST_NICE)
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def serve(stdin: BinaryIO, stdout: BinaryIO, limits: Limits) -> None:
    """A worker's loop: one frame in, one frame out."""
    while len(lengths := stdin.read(LENGTHS.size)) == LENGTHS.size:
        header_size, body_size = LENGTHS.unpack(lengths)
        header: dict[str, Any] = json.loads(stdin.read(header_size))
        body = stdin.read(body_size)
        _limit_memory(limits)
        signal.setitimer(signal.ITIMER_PROF, limits.extract_cpu_seconds)
        content = ""
        try:
            if header["op"] == "highlight":
                found = find_highlights(body.decode("utf-8", "surrogatepass"), header["query"])
                answer: dict[str, Any] = {"highlights": [h.model_dump() for h in found]}
            else:
                document = make_document(body, job_of(header), limits)
                content = document.content
                answer = {"document": record_of(document)}
        except SearchFetchError as error:
            answer = {"error": _told(error)}
        except MemoryError:
            answer = {"error": _told(too_much("extract_memory_bytes", limits))}
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer["peak_bytes"] = _status("VmHWM")
        send(stdout, answer, content.encode("utf-8", "surrogatepass"))


def send(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    """Write one frame."""
    head = json.dumps(header).encode("utf-8", "surrogatepass")
    stream.write(LENGTHS.pack(len(head), len(body)) + head)
    stream.write(body)
    stream.flush()


def header_of(job: Job) -> dict[str, Any]:
    """A job as JSON values."""
    return {"op": "extract", **asdict(job)}


def job_of(header: dict[str, Any]) -> Job:
    options = HtmlOptions(**header["options"])
    return Job(header["url"], header["content_type"], options, header["format"])


def record_of(document: Document) -> dict[str, Any]:
    """A document without its content, as JSON values; see `pool.document_of`."""
    extraction = asdict(document.extraction)
    del extraction["content"]
    entries = document.outline
    return {
        "extraction": extraction,
        "pages": asdict(document.pages),
        "digest": document.digest,
        "scripted": document.scripted,
        "outline": None if entries is None else [e.model_dump() for e in entries],
    }


def too_much(limit: str, limits: Limits) -> LimitError:
    """The error of a page that reached a limit of its worker."""
    value = getattr(limits, limit)
    return LimitError(
        "decompression_bomb",
        f"the page needs more than {limit} = {value} allows for one",
        details={"limit": limit, "value": value},
    )


def _told(error: SearchFetchError) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "code": error.code,
        "message": error.message,
        "http_status": error.http_status,
        "retryable": error.retryable,
        "details": error.details,
    }


def _limit_memory(limits: Limits) -> None:
    """Let this process grow by what is left of `extract_memory_bytes`.

    What the kernel limits is writable memory; what counts is what is resident, so the difference
    between the two now stays allowed.
    """
    room = max(limits.extract_memory_bytes - _status("VmRSS"), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + room, hard))


def _status(name: str) -> int:
    """Bytes that the kernel counts for this process under `name`."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    fork_workers(socket.socket(fileno=int(sys.argv[2])), Limits.model_validate_json(sys.argv[1]))
