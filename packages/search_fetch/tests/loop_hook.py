"""Counts what an event loop must not do itself: read, decode or write in proportion to a page."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import deepinfer_search_fetch

SOURCE = Path(deepinfer_search_fetch.__file__).parent
_READING = ("extract", "analyzers.py", "net/decode.py", "net/charset.py", "index/dedupe.py")
_SEARCHING = ("search/engine.py", "search/retrieve.py", "search/judge.py", "search/snippets.py")
HEAVY = (*_READING, *_SEARCHING)
LIGHT = {
    # These find a page in a table, or choose the lane of a job.
    ("tokens.py", "paginate"),
    ("tokens.py", "_page_end"),
    # These ask the system about a process, or end it.
    *(("worker_process.py", name) for name in ("alive", "_readable", "yield_cpu", "stop", "_kill")),
    ("worker_process.py", "cpu_seconds"),
    ("worker.py", "lowest_priority"),
}
JSON_FILES = str(Path(json.__file__).parent)
LARGE_JSON = 16 * 1024


class LoopHook:
    """A profile function for the thread of an event loop; `found` names the calls it caught."""

    def __init__(self) -> None:
        self.found = Counter[str]()
        self._heavy = tuple(str(SOURCE / part) for part in HEAVY)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(JSON_FILES):
            self._json(frame, event, argument)
        if event != "call" or not code.co_filename.startswith(self._heavy):
            return
        name = Path(code.co_filename).name
        records = ("pool.py", "document.py", "html.py", "__init__.py", "dedupe.py")
        if name in records and (
            name == "pool.py" or code.co_name in ("__init__", "content", "__create_fn__")
        ):
            return  # the lanes themselves, and records
        if (name, code.co_name) not in LIGHT and code.co_name not in ("header_of", "<module>"):
            self.found[f"{name}:{code.co_name}"] += 1

    def _json(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_name
        if event == "call" and name == "loads" and len(frame.f_locals["s"]) > LARGE_JSON:
            self.found["json:loads"] += 1
        if event == "return" and name == "dumps" and len(argument or "") > LARGE_JSON:
            self.found["json:dumps"] += 1


@contextmanager
def heavy_calls_on_this_thread() -> Iterator[Counter[str]]:
    """While this thread runs its event loop."""
    hook = LoopHook()
    sys.setprofile(hook)
    try:
        yield hook.found
    finally:
        sys.setprofile(None)


@contextmanager
def heavy_calls_on(loop: asyncio.AbstractEventLoop) -> Iterator[Counter[str]]:
    """The same for a loop that runs in another thread."""
    hook = LoopHook()

    async def put(profile: LoopHook | None) -> None:
        sys.setprofile(profile)

    asyncio.run_coroutine_threadsafe(put(hook), loop).result(30)
    try:
        yield hook.found
    finally:
        asyncio.run_coroutine_threadsafe(put(None), loop).result(30)
