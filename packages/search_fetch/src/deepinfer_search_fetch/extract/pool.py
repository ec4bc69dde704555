"""Extraction in processes of their own: a page that hangs or crashes a parser costs one request.

Three lanes, so that no page waits for somebody else's. `pages` is for everything that starts. A
page that is still at work after OVERTIME_SECONDS, or after CONTEND_SECONDS when another client
waits, gives up its place and goes on as `overtime`, at the lowest priority; for a while the pages
of that client and site start there. `documents` (PDF, office) have a lane of their own. A worker
that dies costs the page it had; the page is not tried again, and another worker is made ready
meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.admission import CLIENT, FairSlots, Ticket
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import (
    ContentError,
    InvalidRequestError,
    LimitError,
    SearchFetchError,
)
from deepinfer_search_fetch.extract.document import Document, Job, find_highlights, make_document
from deepinfer_search_fetch.extract.worker import header_of, too_much
from deepinfer_search_fetch.extract.worker_process import (
    PEAK_BYTES,
    WorkerFactory,
    WorkerLostError,
    document_of,
)
from deepinfer_search_fetch.models import Highlight

OVERTIME_SECONDS = 0.4
CONTEND_SECONDS = 0.1
HEAVY_SECONDS = 60.0
_OVERTIME_NICE = 19
_DOCUMENTS_NICE = 5
_MAX_HEAVY = 10_000
_DOCUMENT_MAGIC = (b"%PDF-", b"PK")
_ERRORS: dict[str, type[SearchFetchError]] = {
    "InvalidRequestError": InvalidRequestError,
    "LimitError": LimitError,
}


class Worker(Protocol):
    """One process; `ask` blocks, and is called by one thread at a time."""

    def ask(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """The answer's header and body. Raises WorkerLostError."""
        ...

    def alive(self) -> bool: ...

    def yield_cpu(self) -> None:
        """Go on at the lowest priority."""
        ...

    def stop(self) -> None: ...


@dataclass(slots=True)
class _Lane:
    slots: FairSlots
    nice: int
    idle: list[Worker] = field(default_factory=list[Worker])


class ExtractPool:
    """`workers` processes for pages, twice as many for overtime, half as many for documents; they
    start when they are needed. 0 extracts on threads of this process, without limits.

    start, clock: replaceable for tests; `start(nice)` makes a worker.
    """

    def __init__(
        self,
        workers: int,
        limits: Limits,
        *,
        start: Callable[[int], Worker] | None = None,
        clock: Callable[[], float] = time.monotonic,
        overtime_seconds: float = OVERTIME_SECONDS,
    ) -> None:
        self._limits = limits
        self._size = workers
        self._clock = clock
        self._overtime_seconds = overtime_seconds
        self._factory = WorkerFactory(limits)
        self._start: Callable[[int], Worker] = start or self._factory.start
        size, some = max(workers, 1), max(workers - 1, 1)
        self._pages = _Lane(FairSlots("extraction", size, per_host=some, clock=clock), 0)
        self._overtime = _Lane(
            FairSlots("extraction of long pages", 2 * size, per_client=size), _OVERTIME_NICE
        )
        few = max(1, (workers + 1) // 2)
        self._documents = _Lane(FairSlots("extraction of documents", few), _DOCUMENTS_NICE)
        self._heavy: dict[tuple[str, str], float] = {}
        # One for each place, since they wait for workers; what is short has its own.
        self._waiting = ThreadPoolExecutor(3 * size + few, "search-fetch-extract")
        self._threads = ThreadPoolExecutor(2, "search-fetch-pages")
        self._starters = ThreadPoolExecutor(2, "search-fetch-worker-start")
        self._guard = threading.Lock()
        self._alive: set[Worker] = set()
        self._closed = False

    async def warm(self) -> None:
        """Start the workers for pages, before the first page comes."""
        if self._size:
            missing = self._size - len(self._pages.idle)
            loop = asyncio.get_running_loop()
            made = [loop.run_in_executor(self._starters, self._make, 0) for _ in range(missing)]
            self._pages.idle += await asyncio.gather(*made)

    async def extract(self, body: bytes, job: Job) -> Document:
        """The document, within the limits of time and memory.

        Raises LimitError for what exceeds them, and what `extract_document` raises.
        """
        if not self._size:
            async with self._pages.slots.slot():
                return await asyncio.get_running_loop().run_in_executor(
                    self._waiting, make_document, body, job, self._limits
                )
        answer, content = await self._run(header_of(job), body, _host(job.url))
        return await self._off_loop(document_of, answer["document"], content)

    async def highlights(self, markdown: str, query: str) -> list[Highlight]:
        """See `document.find_highlights`."""
        if not self._size:
            async with self._pages.slots.slot():
                return await self._off_loop(find_highlights, markdown, query)
        header = {"op": "highlight", "query": query}
        answer, _ = await self._run(header, markdown.encode("utf-8", "surrogatepass"), "")
        return [Highlight(**h) for h in answer["highlights"]]

    async def close(self) -> None:
        """End all workers."""
        with self._guard:
            self._closed = True
            workers = list(self._alive)
        for worker in workers:
            self._end(worker)
        for lane in (self._pages, self._overtime, self._documents):
            lane.idle.clear()
        self._factory.close()
        for threads in (self._waiting, self._threads, self._starters):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self, header: dict[str, Any], body: bytes, host: str
    ) -> tuple[dict[str, Any], bytes]:
        client = CLIENT.get()
        lane = self._lane_for(body, client, host)
        held = _Held(lane, await lane.slots.take(host))
        worker: Worker | None = None
        whole = False
        try:
            worker = await self._take_worker(lane, client)
            asked = asyncio.get_running_loop().run_in_executor(
                self._waiting, worker.ask, header, body
            )
            answer, content = await self._until_done(asked, worker, held, client, host)
            whole = answer["peak_bytes"] <= PEAK_BYTES
        except WorkerLostError as lost:
            if lost.limit is None:
                raise ContentError(
                    "extraction_empty", "the page ended the process that read it"
                ) from None
            raise too_much(lost.limit, self._limits) from None
        finally:
            if worker is not None:
                self._put_back(worker, held.lane, whole=whole)
            held.give()
        if "error" in answer:
            error = answer["error"]
            raise _ERRORS.get(error["type"], ContentError)(
                error["code"],
                error["message"],
                http_status=error["http_status"],
                retryable=error["retryable"],
                details=error["details"],
            )
        return answer, content

    def _lane_for(self, body: bytes, client: str, host: str) -> _Lane:
        if body.startswith(_DOCUMENT_MAGIC):
            return self._documents
        until = max(self._heavy.get(key, 0.0) for key in ((client, ""), (client, host)))
        return self._overtime if until > self._clock() else self._pages

    async def _until_done(
        self,
        asked: asyncio.Future[tuple[dict[str, Any], bytes]],
        worker: Worker,
        held: _Held,
        client: str,
        host: str,
    ) -> tuple[dict[str, Any], bytes]:
        """The worker's answer; on the way the page may have to leave the lane it started in."""
        contend = min(CONTEND_SECONDS, self._overtime_seconds)
        waited = 0.0
        while held.lane is self._pages:
            done, _ = await asyncio.wait([asked], timeout=contend)
            if done:
                break
            waited += contend
            overtime = waited >= self._overtime_seconds
            if not overtime and not held.lane.slots.others_wait(client):
                continue
            if overtime:
                self._note_heavy(client, host)
            place = self._overtime.slots.take_now(client, host)
            if place is not None:
                if client:  # a process of its own has nobody to give way to
                    worker.yield_cpu()
                held.move(self._overtime, place)
                self._refill(self._pages)
            elif overtime and held.lane.slots.others_wait(client):
                worker.stop()
                raise LimitError(
                    "rate_limited",
                    "the page takes long to read, and others wait; try again later",
                    details={"limit": "extraction of long pages", "value": self._size},
                )
        return await asked

    def _note_heavy(self, client: str, host: str) -> None:
        if len(self._heavy) >= _MAX_HEAVY:
            self._heavy.clear()
        # A library's process is no client that could be told from others: its sites are.
        self._heavy[(client, "" if client else host)] = self._clock() + HEAVY_SECONDS

    async def _take_worker(self, lane: _Lane, client: str) -> Worker:
        while lane.idle and not lane.idle[-1].alive():
            self._end(lane.idle.pop())
        if lane.idle:
            worker = lane.idle.pop()
            if client and lane is self._overtime:
                worker.yield_cpu()
            return worker
        return await asyncio.get_running_loop().run_in_executor(
            self._starters, self._make, lane.nice if client else 0
        )

    def _make(self, nice: int) -> Worker:
        """A new worker; on a thread: the first one takes a second. Raises LimitError after
        `close`."""
        worker = self._start(nice)
        with self._guard:
            if not self._closed:
                self._alive.add(worker)
                return worker
        worker.stop()
        raise LimitError("unavailable", "the extraction workers were ended")

    def _end(self, worker: Worker) -> None:
        with self._guard:
            self._alive.discard(worker)
        worker.stop()

    def _put_back(self, worker: Worker, lane: _Lane, *, whole: bool) -> None:
        """Keep a worker that is fit for the next page, and end another."""
        if whole and not self._closed and len(lane.idle) < self._size:
            lane.idle.append(worker)
            return
        self._end(worker)
        if not whole:
            self._refill(lane)

    def _refill(self, lane: _Lane) -> None:
        """Make another worker ready, so that the next page does not wait for its start."""

        def ready(made: asyncio.Future[Worker]) -> None:
            if made.cancelled() or made.exception() is not None:
                return
            if self._closed or len(lane.idle) >= self._size:
                self._end(made.result())
            else:
                lane.idle.append(made.result())

        if not self._closed:
            loop = asyncio.get_running_loop()
            starting = loop.run_in_executor(self._starters, self._make, lane.nice)
            starting.add_done_callback(ready)

    async def _off_loop(self, call: Callable[..., Any], *values: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *values)


class _Held:
    """The place a page holds, whichever lane it is in by now."""

    def __init__(self, lane: _Lane, ticket: Ticket) -> None:
        self.lane = lane
        self._ticket = ticket

    def move(self, lane: _Lane, ticket: Ticket) -> None:
        self.give()
        self.lane, self._ticket = lane, ticket

    def give(self) -> None:
        self.lane.slots.give(self._ticket)


def _host(url: str) -> str:
    try:
        return urls.registrable_domain(urls.parse(url).host) if url else ""
    except SearchFetchError:
        return ""
