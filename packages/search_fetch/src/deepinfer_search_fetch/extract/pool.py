"""Extraction in processes of their own: a page that hangs or crashes a parser costs one request.

Three lanes, so that no page waits for somebody else's. Pages start in `pages`, those of a client
that used much CPU lately in `overtime`, at the lowest priority (see `accounts`). Pages of several
clients start at once even where cores are fewer: a short page is done sooner beside long ones than
behind them. A page that has used OVERTIME_SECONDS of CPU, or CONTEND_SECONDS where it keeps another
client from working and its own has not used much less than the others, gives up its place in
`pages` and goes on in `overtime`; until it ends the pages of its client start there. Where no place
is free there, a page of the client that used most ends.
`documents` (PDF, office) have a lane of their own. A worker that dies costs the page it had; the
page is not tried again, and another worker is made ready meanwhile.
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
from deepinfer_search_fetch.accounts import LONG_SECONDS, Accounts
from deepinfer_search_fetch.admission import CLIENT, FairSlots, Ticket
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import (
    ContentError,
    InvalidRequestError,
    LimitError,
    SearchFetchError,
)
from deepinfer_search_fetch.extract.document import Document, Job, find_highlights, make_document
from deepinfer_search_fetch.extract.worker import LOWEST_NICE, PAGES_NICE, header_of, too_much
from deepinfer_search_fetch.extract.worker_process import (
    PEAK_BYTES,
    WorkerFactory,
    WorkerLostError,
    document_of,
)
from deepinfer_search_fetch.models import Highlight

OVERTIME_SECONDS = 0.4
CONTEND_SECONDS = 0.05
PAGES_A_WORKER = 4
_LOOK_SECONDS = 0.025
_ACCOUNT_SECONDS = 1.0
_OVERTIME_WALL_SECONDS = 2.0
_DOCUMENTS_NICE = 10
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

    def cpu_seconds(self) -> float:
        """CPU time it has used so far; 0 when it has ended."""
        ...

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
    """`workers` processes for pages of one client, PAGES_A_WORKER times as many of several clients,
    twice as many for overtime, half as many for documents; they start when they are needed. 0
    extracts on threads of this process, without limits.

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
        pages_a_worker: int = PAGES_A_WORKER,
    ) -> None:
        self._limits = limits
        self._size = workers
        self._clock = clock
        self._overtime_seconds = overtime_seconds
        self._factory = WorkerFactory(limits)
        self._start: Callable[[int], Worker] = start or self._factory.start
        size, some = max(workers, 1), max(workers - 1, 1)
        places = pages_a_worker * size
        self._accounts = Accounts(clock)
        self._pages = _Lane(
            FairSlots(
                "extraction",
                places,
                per_client=size,
                per_process=size,
                per_host=some,
                kept=places // 2,
                modest=self._accounts.modest,
                clock=clock,
            ),
            PAGES_NICE,
        )
        self._overtime = _Lane(
            # Whoever always has pages here leaves half of the places to others.
            FairSlots("extraction of long pages", 2 * size, per_client=size, kept=size),
            LOWEST_NICE,
        )
        few = max(1, (workers + 1) // 2)
        self._documents = _Lane(FairSlots("extraction of documents", few), _DOCUMENTS_NICE)
        self._running: list[_Held] = []
        # One for each place, since they wait for workers; what is short has its own.
        self._waiting = ThreadPoolExecutor(places + 2 * size + few, "search-fetch-extract")
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
            nice = self._pages.nice
            made = [loop.run_in_executor(self._starters, self._make, nice) for _ in range(missing)]
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
        held = _Held(lane, await lane.slots.take(host), _payer(client, host))
        if lane is self._pages and self._lane_for(body, client, host) is self._overtime:
            held.give()  # while it waited its client had long pages
            lane = self._overtime
            held = _Held(lane, await lane.slots.take(host), held.payer)
        whole = False
        try:
            held.worker = worker = await self._take_worker(lane, client)
            held.charged = worker.cpu_seconds()
            self._running.append(held)
            asked = asyncio.get_running_loop().run_in_executor(
                self._waiting, worker.ask, header, body
            )
            answer, content = await self._until_done(asked, worker, held, client, host)
            whole = answer["peak_bytes"] <= PEAK_BYTES
        except WorkerLostError as lost:
            if held.gave_way:
                raise LimitError(
                    "rate_limited",
                    "the page takes long to read, and others wait; try again later",
                    details={"limit": "extraction of long pages", "value": self._size},
                ) from None
            self._charge(held, self._limits.extract_cpu_seconds)
            if lost.limit is None:
                raise ContentError(
                    "extraction_empty", "the page ended the process that read it"
                ) from None
            raise too_much(lost.limit, self._limits) from None
        finally:
            if held.worker is not None:
                self._charge(held)
                self._accounts.ended(held.payer)
                self._running.remove(held)
                self._put_back(held.worker, held.lane, whole=whole)
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
        if self._accounts.spends_much(_payer(client, host)):
            return self._overtime
        if client and self._overtime.slots.holds(client):
            return self._overtime
        return self._pages

    async def _until_done(
        self,
        asked: asyncio.Future[tuple[dict[str, Any], bytes]],
        worker: Worker,
        held: _Held,
        client: str,
        host: str,
    ) -> tuple[dict[str, Any], bytes]:
        """The worker's answer; on the way the page may have to leave the lane it started in."""
        tick = min(_LOOK_SECONDS, self._overtime_seconds)
        waited = 0.0
        while not asked.done():
            await asyncio.wait([asked], timeout=tick)
            self._charge(held)
            waited += tick
            if held.lane is not self._pages or asked.done():
                tick = _ACCOUNT_SECONDS
                continue
            # By its CPU time: a page that was kept from working is not long.
            overtime = held.cost >= self._overtime_seconds or waited >= _OVERTIME_WALL_SECONDS
            others = held.lane.slots.crowded(client, self._size)
            contends = others and held.cost >= CONTEND_SECONDS
            if not overtime and (not contends or self._accounts.spends_less(held.payer)):
                continue
            place = self._overtime.slots.take_now(client, host)
            if place is not None:
                if client:  # a process of its own has nobody to give way to
                    worker.yield_cpu()
                held.move(self._overtime, place)
                self._refill(self._pages)
            elif others:
                self._end_greediest(held, client)
        return await asked

    def _charge(self, held: _Held, at_least: float = 0.0, *, long: bool = False) -> None:
        """Put what a page has cost since the last time on its client's account."""
        worker = held.worker
        used = worker.cpu_seconds() if worker is not None else 0.0
        new = max(used - held.charged, at_least, 0.0)
        before, held.cost = held.cost, held.cost + new
        held.charged = max(used, held.charged)
        if held.lane is not self._documents:
            long = long or before < LONG_SECONDS <= held.cost
        self._accounts.add(held.payer, new, long=long)

    def _end_greediest(self, held: _Held, client: str) -> None:
        """End `held` where its client has long pages at work, else one of who used most lately."""
        victim = held
        if not self._overtime.slots.holds(client):
            long = [h for h in self._running if h.lane is self._overtime and not h.gave_way]
            victim = max(long, key=lambda h: self._accounts.spent(h.payer), default=held)
        if victim.worker is not None:
            victim.gave_way = True
            self._charge(victim, long=True)
            victim.worker.stop()

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
    """A page at work, and the place it holds, whichever lane it is in by now."""

    def __init__(self, lane: _Lane, ticket: Ticket, payer: str) -> None:
        self.lane = lane
        self.payer = payer
        self.worker: Worker | None = None
        self.charged = self.cost = 0.0  # CPU time: of the worker, of the page
        self.gave_way = False
        self._ticket = ticket

    def move(self, lane: _Lane, ticket: Ticket) -> None:
        self.give()
        self.lane, self._ticket = lane, ticket

    def give(self) -> None:
        self.lane.slots.give(self._ticket)


def _payer(client: str, host: str) -> str:
    """Whose account a page goes to. A library's process is no client that could be told from
    others: its sites are."""
    return client or f"site {host}"


def _host(url: str) -> str:
    try:
        return urls.registrable_domain(urls.parse(url).host) if url else ""
    except SearchFetchError:
        return ""
