"""Tokenising long texts in processes of their own.

A text of megabytes takes seconds and, in the tokenizer's tables, a hundred times its size. In a
child that costs the event loop nothing, ends with the client that asked for it, cannot pass a
limit of memory, and is given back to the system when the child goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgpack
import numpy as np

from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.server.limits import FairSlots

log = logging.getLogger(__name__)

LONG_CHARACTERS = 64 * 1024
"""A shorter text takes some ten milliseconds, less than the way to a child and back is worth."""
KEPT_CHARACTERS = 1024 * 1024
"""A child that was given more is ended after it: its memory is not returned otherwise."""
_LENGTH = struct.Struct("<Q")
_PASSED_ON = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL")


class TokeniserProcesses:
    """Children for one `tokenizer.json`; each is started when first needed."""

    def __init__(self, path: Path, *, processes: int, memory_bytes: int = 4 << 30) -> None:
        self._path = path
        self._memory_bytes = memory_bytes
        self._slots = FairSlots(processes)
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._lock = threading.Lock()
        self.counters = {"tokenised_apart": 0, "tokenisers_ended": 0}

    @asynccontextmanager
    async def job(self, caller: str | None) -> AsyncGenerator[Job]:
        """A turn for one request of this caller; leaving it kills what still runs for it."""
        async with self._slots.hold(caller):
            job = Job(self)
            try:
                yield job
            finally:
                job.close()

    def close(self) -> None:
        with self._lock:
            children, self._all = self._all, set()
            self._idle.clear()
        for child in children:
            child.kill()

    def take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive:
                    return child
                self._all.discard(child)
        child = _Child(self._path, self._memory_bytes)
        with self._lock:
            self._all.add(child)
        return child

    def put_back(self, child: _Child, *, keep: bool) -> None:
        with self._lock:
            if keep and child in self._all:
                self._idle.append(child)
                return
            self._all.discard(child)
            self.counters["tokenisers_ended"] += 1
        child.kill()


class Job:
    """What a codec tokenises one request with, from a thread; see `codec.protocol.Tokenising`."""

    def __init__(self, processes: TokeniserProcesses) -> None:
        self._processes = processes
        self._child: _Child | None = None
        self._closed = False
        self._lock = threading.Lock()

    def encode(self, text: str, special_ranges: Sequence[tuple[int, int]] | None) -> list[int]:
        """Ids of a prompt, or with None of a text in which special spellings count."""
        with self._lock:
            if self._closed:
                raise EngineUnavailable("nobody waits for this prompt any more")
            child = self._child = self._processes.take()
        self._processes.counters["tokenised_apart"] += 1
        answer = child.ask({"text": text, "ranges": special_ranges})
        with self._lock:
            self._child = None
        self._processes.put_back(child, keep=answer is not None and len(text) <= KEPT_CHARACTERS)
        if answer is None:
            if self._closed:
                raise EngineUnavailable("nobody waits for this prompt any more")
            raise InvalidRequest(
                f"a text of {len(text)} characters takes more memory to tokenise than is allowed; "
                "shorten it",
                param="messages",
            )
        if "error" in answer:
            raise InvalidRequest(str(answer["error"]), param="messages")
        return np.frombuffer(answer["ids"], dtype="<i4").tolist()

    def close(self) -> None:
        """End the child that works for this job, if one does."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()


class _Child:
    def __init__(self, path: Path, memory_bytes: int) -> None:
        argv = [sys.executable, "-m", __name__, str(path), str(memory_bytes)]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # It sees what clients wrote; keys are no business of its.
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                start_new_session=True,
            )
        except OSError as exc:
            raise EngineUnavailable(
                f"a tokenising process cannot be started: {exc.strerror}"
            ) from exc

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """None: the process ended meanwhile."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, message)
            return _read(self._process.stdout)
        except (OSError, ValueError):
            return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError, ValueError):
                pipe.close()


def _write(pipe: IO[bytes], message: dict[str, Any]) -> None:
    data = cast(bytes, msgpack.packb(message, use_bin_type=True, unicode_errors="surrogatepass"))
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> dict[str, Any] | None:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(head)[0]
    data = pipe.read(size)
    if len(data) < size:
        return None
    return msgpack.unpackb(data, raw=False, unicode_errors="surrogatepass")


def main() -> None:
    """The child: one answer for each question, until its parent closes the pipe."""
    path, memory = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from deepinfer_engine.adapters.recipe import RecipeError, Tokenizer

    tokenizer = Tokenizer.from_file(path)
    while (question := _read(sys.stdin.buffer)) is not None:
        text, ranges = question["text"], question["ranges"]
        answer: dict[str, Any]
        try:
            ids = (
                tokenizer.encode(text)
                if ranges is None
                else tokenizer.encode_prompt(text, [(a, b) for a, b in ranges])
            )
            answer = {"ids": np.asarray(ids, dtype="<i4").tobytes()}
        except (RecipeError, ValueError, UnicodeError) as error:
            answer = {"error": str(error)}
        _write(sys.stdout.buffer, answer)


if __name__ == "__main__":
    main()
