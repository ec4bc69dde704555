"""Extraction in processes of its own: a page that hangs or crashes a parser costs one request.

Parent and worker speak length-prefixed frames over pipes: a JSON header and the raw bytes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import struct
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import (
    ContentError,
    InvalidRequestError,
    LimitError,
    SearchFetchError,
)
from deepinfer_search_fetch.extract import Extraction
from deepinfer_search_fetch.extract.html import HtmlOptions

PAGES_PER_WORKER = 500
PEAK_BYTES = 300 * 1024 * 1024
_LENGTHS = struct.Struct("!II")
_DOCUMENT_MAGIC = (b"%PDF-", b"PK")
_ERRORS: dict[str, type[SearchFetchError]] = {
    "InvalidRequestError": InvalidRequestError,
    "LimitError": LimitError,
}
_MAX_FRAME = 256 * 1024 * 1024


class ExtractPool:
    """`workers` processes; 0 extracts in a thread of this process, without limits."""

    def __init__(self, workers: int, limits: Limits) -> None:
        self._limits = limits
        self._idle: asyncio.Queue[_Worker] | None = None
        self._size = workers
        self._all: list[_Worker] = []

    async def extract(
        self, body: bytes, url: str, content_type: str | None, options: HtmlOptions
    ) -> Extraction:
        """Like `deepinfer_search_fetch.extract.extract`, within the CPU and memory limits.

        A page that overruns is tried once more with the quick extractor; if that fails too:
        ContentError(extraction_empty).
        """
        if self._size == 0:
            from deepinfer_search_fetch.extract.dispatch import extract_document

            return await asyncio.to_thread(
                extract_document, body, url, content_type, options, self._limits
            )
        if self._idle is None:
            self._idle = asyncio.Queue()
            self._all = [_Worker(self._limits) for _ in range(self._size)]
            for worker in self._all:
                self._idle.put_nowait(worker)
        worker = await self._idle.get()
        try:
            try:
                return await worker.run(body, url, content_type, asdict(options))
            except _WorkerLostError:
                if body.startswith(_DOCUMENT_MAGIC):
                    raise LimitError(
                        "decompression_bomb",
                        "the document needs more memory or time than is allowed for one",
                    ) from None
                quick = {**asdict(options), "mode": "fast"}
                result = await worker.run(body, url, content_type, quick)
                result.warnings.append("extraction_overran_limits")
                return result
        except _WorkerLostError:
            raise ContentError(
                "extraction_empty", "the page exceeded the limits of every extractor"
            ) from None
        finally:
            self._idle.put_nowait(worker)

    async def close(self) -> None:
        """End all workers."""
        for worker in self._all:
            await worker.stop()


class _WorkerLostError(Exception):
    """The worker died or had to be killed."""


class _Worker:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: asyncio.subprocess.Process | None = None
        self._pages = 0

    async def run(
        self, body: bytes, url: str, content_type: str | None, options: dict[str, Any]
    ) -> Extraction:
        process = await self._started()
        stdin, stdout = process.stdin, process.stdout
        if stdin is None or stdout is None:
            raise _WorkerLostError
        header = json.dumps({"url": url, "content_type": content_type, "options": options}).encode()
        try:
            # CPU time is limited inside; the wall limit catches what waits instead of computing.
            async with asyncio.timeout(self._limits.extract_cpu_seconds * 3):
                stdin.write(_LENGTHS.pack(len(header), len(body)) + header + body)
                await stdin.drain()
                size, _ = _LENGTHS.unpack(await stdout.readexactly(_LENGTHS.size))
                answer = json.loads(await stdout.readexactly(size))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            await self.stop()
            raise _WorkerLostError from None
        except BaseException:  # cancelled in the middle of a frame: the pipe is out of step
            await self.stop()
            raise
        self._pages += 1
        # A page that needed much memory leaves it behind, in pieces that nothing else can use.
        if self._pages >= PAGES_PER_WORKER or answer["peak_bytes"] > PEAK_BYTES:
            await self.stop()
        if "error" in answer:
            error = answer["error"]
            kind = _ERRORS.get(error["type"], ContentError)
            raise kind(error["code"], error["message"], details=error["details"])
        record = answer["record"]
        record["links"] = [(link, text) for link, text in record["links"]]
        return Extraction(**record)

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._pages = 0
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                __name__,
                self._limits.model_dump_json(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_MAX_FRAME,
            )
        return self._process

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._process = None


def serve(stdin: BinaryIO, stdout: BinaryIO, limits: Limits) -> None:
    """The worker's loop: one frame in, one frame out, until the parent closes the pipe."""
    from deepinfer_search_fetch.extract.dispatch import extract_document

    most = limits.extract_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    while len(lengths := stdin.read(_LENGTHS.size)) == _LENGTHS.size:
        header_size, body_size = _LENGTHS.unpack(lengths)
        header = json.loads(stdin.read(header_size))
        body = stdin.read(body_size)
        # Readers of binary documents get little more than the document itself.
        room = _address_space_bytes() + limits.document_memory_bytes + len(body)
        is_document = body.startswith(_DOCUMENT_MAGIC)
        resource.setrlimit(resource.RLIMIT_AS, (min(room, most) if is_document else most, most))
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (spent + limits.extract_cpu_seconds, -1))
        try:
            record = extract_document(
                body,
                header["url"],
                header["content_type"],
                HtmlOptions(**header["options"]),
                limits,
            )
            answer: dict[str, Any] = {"record": asdict(record)}
        except SearchFetchError as error:
            answer = {
                "error": {
                    "type": type(error).__name__,
                    "code": error.code,
                    "message": error.message,
                    "details": error.details,
                }
            }
        answer["peak_bytes"] = _peak_bytes()
        frame = json.dumps(answer).encode("utf-8", "surrogatepass")
        stdout.write(_LENGTHS.pack(len(frame), 0) + frame)
        stdout.flush()


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    """The most memory this process ever held; getrusage would count the parent's at the fork."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, Limits.model_validate_json(sys.argv[1]))
