"""Nobody waits for the page of another: places, lanes, look-ups, bodies, an idle event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from service_harness import Service, call, read_reply, request_bytes

import deepinfer_search_fetch
from deepinfer_search_fetch import AsyncSearchFetch, Config, FetchRequest, SearchRequest
from deepinfer_search_fetch.accounts import (
    HALF_LIFE_SECONDS,
    LITTLE_SECONDS,
    Accounts,
)
from deepinfer_search_fetch.admission import CLIENT, FairSlots, Ticket, WorkThreads
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import LimitError, SearchFetchError, UpstreamError
from deepinfer_search_fetch.extract import pool as pool_module
from deepinfer_search_fetch.extract.document import Job, make_document
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.pool import CONTEND_SECONDS, ExtractPool
from deepinfer_search_fetch.extract.worker import LOWEST_NICE, PAGES_NICE, header_of, record_of
from deepinfer_search_fetch.extract.worker_process import WorkerFactory, WorkerLostError
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.net.resolver import SystemResolver
from deepinfer_search_fetch.search.engine import search
from deepinfer_search_fetch.service.ratelimit import (
    DELAY_SECONDS,
    DELAYED_PER_CLIENT,
    FREE_REFUSALS,
    ConnectionPace,
    RefusalDelays,
)
from deepinfer_search_fetch.service.settings import ServiceSettings

Listener = Any  # see conftest
SOURCE = Path(deepinfer_search_fetch.__file__).parent
RUNAWAY_SECONDS = 60
PAGE = b"<title>Voles</title><h1>Voles</h1><p>" + b"Voles live in the grass of the meadow. " * 20


async def as_client(name: str, work: Any) -> Any:
    """Await as the client of that name."""

    async def run() -> Any:
        CLIENT.set(name)
        return await work

    return await asyncio.create_task(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# Places


def test_the_client_that_used_least_comes_next() -> None:
    async def run() -> list[str]:
        now = [0.0]
        slots = FairSlots("places", 1, clock=lambda: now[0])
        order: list[str] = []

        async def use(name: str, seconds: float) -> None:
            async with slots.slot():
                order.append(name)
                now[0] += seconds

        first = await as_client("greedy", slots.take())
        waiting = [asyncio.create_task(as_client("greedy", use("greedy", 1))) for _ in range(5)]
        await until(lambda: len(slots._waiting) == 5)
        waiting.append(asyncio.create_task(as_client("modest", use("modest", 1))))
        await until(lambda: len(slots._waiting) == 6)
        now[0] += 2
        slots.give(first)
        await asyncio.gather(*waiting)
        slots.audit()
        return order

    assert asyncio.run(run())[0] == "modest"


def test_a_client_and_a_host_hold_no_more_than_their_share() -> None:
    async def run() -> tuple[list[bool], list[bool], list[bool]]:
        slots = FairSlots("places", 4, per_client=2, per_host=1)
        clients = [slots.take_now("a", f"h{i}") is not None for i in range(3)]
        hosts = [slots.take_now(c, "same") is not None for c in ("b", "c")]
        own = [slots.take_now("", h) is not None for h in ("x", "y")]
        slots.audit()
        return clients, hosts, own

    assert asyncio.run(run()) == ([True, True, False], [True, False], [True, False])


def test_busy_clients_leave_some_places_to_who_used_little() -> None:
    async def run() -> tuple[list[bool], list[bool]]:
        now = [0.0]

        def worked(slots: FairSlots, client: str) -> None:
            ticket = slots.take_now(client)
            assert ticket is not None
            now[0] += 6
            slots.give(ticket)

        slots = FairSlots("places", 3, kept=2, clock=lambda: now[0])
        for client in ("greedy", "eager"):
            worked(slots, client)
        got = [slots.take_now(c) is not None for c in ("greedy", "greedy", "eager", "modest")]
        slots.audit()
        alone = FairSlots("places", 3, kept=2, clock=lambda: now[0])
        for _ in range(2):
            worked(alone, "greedy")
        return got, [alone.take_now("greedy") is not None for _ in range(3)]

    got, everything = asyncio.run(run())
    assert got == [True, False, False, True]
    assert everything == [True, True, True]  # with nobody else there nothing is kept


def test_who_held_a_place_for_long_and_used_little_is_not_busy() -> None:
    async def run(modest: Callable[[str], bool] | None) -> bool:
        now = [0.0]
        slots = FairSlots("reading", 2, kept=1, modest=modest, clock=lambda: now[0])
        for client in ("greedy", "waits for a processor"):
            place = slots.take_now(client)
            assert place is not None
            now[0] += 20.0
            slots.give(place)
        assert slots.take_now("greedy") is not None
        assert slots.take_now("greedy") is None
        return slots.take_now("waits for a processor") is not None

    assert not asyncio.run(run(None))
    assert asyncio.run(run(lambda client: client != "greedy"))


def test_on_a_slow_machine_a_page_finds_a_place_though_its_client_held_one_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The other page would give its place up after this time, and hide who waited for it.
    monkeypatch.setattr(pool_module, "_OVERTIME_WALL_SECONDS", 1e9)

    async def body() -> None:
        lanes = Lanes(pages_a_worker=2, overtime_seconds=100.0)
        pages = lanes.pool._pages.slots
        try:
            for client, seconds in (("modest", 0.1), ("greedy", 10 * LITTLE_SECONDS)):
                place = await as_client(client, pages.take("a.example"))
                lanes.now += 20.0
                pages.give(place)
                lanes.pool._accounts.add(client, seconds)
            for _ in range(5):
                lanes.pool._accounts.ended("modest")
            greedy = asyncio.create_task(lanes.read("greedy", "quiet long"))
            await until(lambda: lanes.asked()["quiet long"] == 1)
            assert await lanes.read("modest", "short", "b.example") == "ok"
            assert not greedy.done()
            lanes.released.set()
            assert await greedy == "ok"
        finally:
            lanes.released.set()
            await lanes.pool.close()

    asyncio.run(asyncio.wait_for(body(), RUNAWAY_SECONDS))


def test_places_are_crowded_where_others_wait_or_hold_more_than_there_are_cores() -> None:
    async def run() -> list[bool]:
        slots = FairSlots("places", 3, per_client=2, per_process=1)
        found: list[bool] = []
        for client in ("a", "a", "b"):
            assert slots.take_now(client) is not None
            found.append(slots.crowded("a", 2))
        waiting = asyncio.create_task(as_client("b", slots.take()))
        await until(lambda: slots.crowded("a", 9))
        found.append(slots.crowded("b", 9))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        library = FairSlots("places", 3, per_process=1)
        return [*found, *(library.take_now("") is None for _ in range(2))]

    assert asyncio.run(run()) == [False, False, True, False, False, True]


def test_pages_of_several_clients_are_read_at_once_on_one_core() -> None:
    async def body() -> None:
        lanes = Lanes(pages_a_worker=4)
        try:
            long = asyncio.create_task(lanes.read("greedy", "quiet long"))
            await until(lambda: lanes.asked()["quiet long"] == 1)
            assert await lanes.read("modest", "short", "b.example") == "ok"
            assert not long.done()
            assert {w.nice for w in lanes.made} == {PAGES_NICE}
            lanes.released.set()
            assert await long == "ok"
        finally:
            lanes.released.set()
            await lanes.pool.close()

    asyncio.run(asyncio.wait_for(body(), RUNAWAY_SECONDS))


def test_beside_others_a_page_gives_way_unless_its_client_used_much_less() -> None:
    async def body() -> None:
        lanes = Lanes(pages_a_worker=2, overtime_seconds=1.0)
        lanes.pool._accounts.add("greedy", 10 * LITTLE_SECONDS)
        for _ in range(3):
            lanes.pool._accounts.ended("modest")
        try:
            greedy = asyncio.create_task(lanes.read("greedy", "quiet long"))
            await until(lambda: lanes.asked()["quiet long"] == 1)
            modest = asyncio.create_task(lanes.read("modest", "mild long", "b.example"))
            await until(lambda: lanes.asked()["mild long"] == 1)
            worker = next(w for w in lanes.made if "mild long" in w.asked)
            await until(lambda: worker.looks > 10)
            assert worker.nice == PAGES_NICE
            lanes.pool._accounts.add("modest", 10 * LITTLE_SECONDS)
            await until(lambda: worker.nice == LOWEST_NICE)
            lanes.released.set()
            assert await asyncio.gather(greedy, modest) == ["ok", "ok"]
        finally:
            lanes.released.set()
            await lanes.pool.close()

    asyncio.run(asyncio.wait_for(body(), RUNAWAY_SECONDS))


def test_too_many_waiting_requests_of_one_client_are_refused_with_the_limit() -> None:
    async def run() -> LimitError:
        slots = FairSlots("places", 1, waiting=2)
        await as_client("a", slots.take())
        tasks = [asyncio.create_task(as_client("a", slots.take())) for _ in range(2)]
        await until(lambda: len(slots._waiting) == 2)
        with pytest.raises(LimitError) as caught:
            await as_client("a", slots.take())
        other = asyncio.create_task(as_client("b", slots.take()))
        await until(lambda: len(slots._waiting) == 3)
        for task in (*tasks, other):
            task.cancel()
        await asyncio.gather(*tasks, other, return_exceptions=True)
        slots.audit()
        return caught.value

    error = asyncio.run(run())
    assert error.code == "rate_limited"
    assert error.retryable
    assert error.details == {"limit": "waiting for places", "value": 2}


def test_places_come_back_from_waiters_that_left_and_work_that_failed() -> None:
    def fail() -> None:
        raise ValueError("no")

    async def run() -> None:
        threads = WorkThreads("work", 1)
        slots = threads._slots
        held = await slots.take()
        waiting = asyncio.create_task(threads.run(fail))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        slots.give(held)
        slots.give(held)
        slots.audit()
        with pytest.raises(ValueError, match="no"):
            await threads.run(fail)
        assert await threads.run(lambda: 7) == 7
        threads.close()

    asyncio.run(run())


# Names


@contextmanager
def silent_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Names that begin with "slow" hang until the block ends; others are 127.0.0.2."""
    released, asked = threading.Event(), Counter[str]()

    def look_up(host: str, *rest: Any, **more: Any) -> list[Any]:
        asked[host] += 1
        if host.startswith("slow"):
            released.wait(RUNAWAY_SECONDS)
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        yield asked
    finally:
        released.set()


def test_slow_names_delay_neither_a_search_nor_another_page(
    config: Config, site: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.page("/", PAGE)

    async def run() -> list[str]:
        async with AsyncSearchFetch(config) as client:
            with silent_names(monkeypatch) as asked:
                slow = [
                    asyncio.create_task(
                        client.fetch(FetchRequest(url=f"http://slow{i}.test:{site.port}/"))
                    )
                    for i in range(40)
                ]
                while len(asked) < 32:
                    await asyncio.sleep(0.01)
                async with asyncio.timeout(RUNAWAY_SECONDS):
                    await client.search(SearchRequest(query="voles"))
                    page = await client.fetch(FetchRequest(url=f"http://ok.test:{site.port}/"))
                assert "Voles live" in page.content
                for task in slow:
                    task.cancel()
                await asyncio.gather(*slow, return_exceptions=True)
        return [page.title or ""]

    assert asyncio.run(run()) == ["Voles"]


def test_one_client_cannot_take_every_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        resolver = SystemResolver(timeout_seconds=RUNAWAY_SECONDS, lookups=20)
        with silent_names(monkeypatch) as asked:
            slow = [
                asyncio.create_task(as_client("greedy", resolver.resolve(f"slow{i}.test")))
                for i in range(30)
            ]
            while len(asked) < 16:
                await asyncio.sleep(0.01)
            found = await as_client("modest", resolver.resolve("ok.test"))
            assert sum(n for name, n in asked.items() if name.startswith("slow")) == 16
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
        return found

    assert asyncio.run(run()) == ["127.0.0.2"]


def test_a_name_without_an_answer_in_time_is_a_dns_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> UpstreamError:
        with silent_names(monkeypatch), pytest.raises(UpstreamError) as caught:
            await SystemResolver(timeout_seconds=0.01).resolve("slow.test")
        return caught.value

    error = asyncio.run(run())
    assert (error.code, error.retryable) == ("dns_failure", True)
    assert error.details == {"limit": "dns_seconds", "value": 0.01}


# Lanes of the extraction


class ScriptedWorker:
    """A worker whose pages named "long" take until they are released, or "dead" end it; "mild" ones
    have used more CPU time than a page may where others wait."""

    def __init__(self, nice: int, released: threading.Event) -> None:
        self.nice = nice
        self.asked: list[str] = []
        self.stopped = threading.Event()
        self.spent = 0.0
        self.looks = 0
        self._released = released

    def ask(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        self.asked.append(body.decode())
        if body == b"dead":
            raise WorkerLostError("extract_cpu_seconds")
        self.spent += 1.0 if body.startswith(b"long") else 0.0
        self.spent += 1.5 * CONTEND_SECONDS if body.startswith(b"mild") else 0.0
        if b"long" in body:
            while not self._released.wait(0.01):
                if self.stopped.is_set():
                    raise WorkerLostError
        document = make_document(PAGE, Job("", "text/html", HtmlOptions(mode="fast")), Limits())
        answer = {"document": record_of(document), "peak_bytes": 0}
        return answer, document.content.encode()

    def alive(self) -> bool:
        return not self.stopped.is_set()

    def cpu_seconds(self) -> float:
        self.looks += 1
        return self.spent

    def yield_cpu(self) -> None:
        self.nice = 19

    def stop(self) -> None:
        self.stopped.set()


class Lanes:
    """A pool of scripted workers, one for pages and one for overtime."""

    def __init__(self, pages_a_worker: int = 1, overtime_seconds: float = 0.01) -> None:
        self.made: list[ScriptedWorker] = []
        self.released = threading.Event()
        self.now = 0.0
        self.pool = ExtractPool(
            1,
            Limits(),
            start=self._start,
            clock=lambda: self.now,
            overtime_seconds=overtime_seconds,
            pages_a_worker=pages_a_worker,
        )

    def _start(self, nice: int) -> ScriptedWorker:
        self.made.append(ScriptedWorker(nice, self.released))
        return self.made[-1]

    async def read(self, client: str, body: str, host: str = "a.example") -> str:
        job = Job(f"http://{host}/", "text/html", HtmlOptions())
        try:
            await as_client(client, self.pool.extract(body.encode(), job))
        except SearchFetchError as error:
            return error.code
        return "ok"

    def asked(self) -> Counter[str]:
        return Counter(body for worker in self.made for body in worker.asked)


def lanes_run(body: Callable[[Lanes], Any]) -> Any:
    async def run() -> Any:
        lanes = Lanes()
        try:
            async with asyncio.timeout(RUNAWAY_SECONDS):
                return await body(lanes)
        finally:
            lanes.released.set()
            await lanes.pool.close()

    return asyncio.run(run())


def test_a_long_page_leaves_the_lane_of_the_others_and_ends_at_low_priority() -> None:
    async def body(lanes: Lanes) -> None:
        long = asyncio.create_task(lanes.read("greedy", "long"))
        await until(lambda: any(w.nice == 19 for w in lanes.made))
        assert await lanes.read("modest", "short") == "ok"
        assert not long.done()
        lanes.released.set()
        assert await long == "ok"

    lanes_run(body)


def test_who_had_a_long_page_starts_in_the_lane_for_them_for_a_while() -> None:
    async def body(lanes: Lanes) -> None:
        long = asyncio.create_task(lanes.read("greedy", "long"))
        await until(lambda: any(w.nice == 19 for w in lanes.made))
        more = asyncio.create_task(lanes.read("greedy", "short", "b.example"))
        assert await lanes.read("modest", "short") == "ok"
        assert not more.done()
        lanes.released.set()
        assert await long == await more == "ok"
        lanes.now += 1000
        assert await lanes.read("greedy", "last") == "ok"
        assert next(w for w in lanes.made if "last" in w.asked).nice == PAGES_NICE

    lanes_run(body)


def test_without_a_place_for_long_pages_one_of_who_used_most_ends_and_not_before_others_wait() -> (
    None
):
    async def body(lanes: Lanes) -> None:
        first: dict[str, asyncio.Task[str]] = {}
        for client in ("greedy", "eager"):  # as many as there are places for long pages
            lanes.pool._accounts.add(client, 1.0 if client == "eager" else 30.0)
            first[client] = asyncio.create_task(lanes.read(client, f"long of {client}"))
            await until(lambda: sum(w.nice == 19 for w in lanes.made) == len(first))
        second = asyncio.create_task(lanes.read("other", "long 2"))
        await until(lambda: lanes.asked()["long 2"] == 1)
        for _ in range(30):
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in (*first.values(), second))  # nobody else waits
        assert await lanes.read("modest", "short") == "ok"
        assert await first["greedy"] == "rate_limited"
        lanes.released.set()
        # Until the place of the one that ended is free, the next look may end who comes after it.
        assert {await second, await first["eager"]} <= {"ok", "rate_limited"}

    lanes_run(body)


def test_a_second_long_page_of_a_client_ends_where_there_is_no_place_for_it() -> None:
    async def body(lanes: Lanes) -> None:
        first = asyncio.create_task(lanes.read("eager", "long of eager"))
        await until(lambda: sum(w.nice == 19 for w in lanes.made) == 1)
        own = asyncio.create_task(lanes.read("greedy", "long 1"))
        await until(lambda: sum(w.nice == 19 for w in lanes.made) == 2)
        assert lanes.pool._lane_for(b"long 2", "greedy", "b.example") is lanes.pool._overtime
        assert not first.done()
        lanes.released.set()
        assert await asyncio.gather(first, own) == ["ok", "ok"]

    lanes_run(body)


def test_who_uses_much_comes_after_who_uses_little_and_after_nobody_when_alone() -> None:
    now = [0.0]
    accounts = Accounts(lambda: now[0])
    accounts.add("modest", LITTLE_SECONDS)
    accounts.add("greedy", 10 * LITTLE_SECONDS)
    behind = [accounts.spends_much(c) for c in ("modest", "greedy", "new")]
    now[0] += 10 * HALF_LIFE_SECONDS
    later = accounts.spends_much("greedy")
    accounts.add("greedy", 10 * LITTLE_SECONDS)
    assert (behind, later) == ([False, True, False], False)
    assert not accounts.spends_much("greedy")  # the other has not been there lately
    accounts.add("modest", 2 * LITTLE_SECONDS)  # as on a slow machine, where all pages cost more
    assert [accounts.spends_much(c) for c in ("modest", "greedy")] == [False, True]
    accounts.add("third", 0.4, long=True)
    assert accounts.spends_much("third")


def test_who_is_known_for_short_pages_is_modest_before_others_have_used_much() -> None:
    now = [0.0]
    accounts = Accounts(lambda: now[0])
    for client, seconds in (("short", 0.012), ("middling", 0.1)):
        for _ in range(5):
            accounts.add(client, seconds)
            accounts.ended(client)
    for n in range(30):  # an attack begins
        accounts.add(f"key {n}", 0.04)
    told = {c: accounts.modest(c) for c in ("short", "middling", "key 0", "new")}
    assert told == {"short": True, "middling": False, "key 0": False, "new": False}
    accounts.add("short", 0.4, long=True)
    assert not accounts.modest("short")
    for n in range(30):
        accounts.add(f"key {n}", 0.4, long=True)
    assert [accounts.modest(c) for c in ("middling", "new")] == [True, False]


def test_a_page_that_waited_is_put_where_its_client_belongs_by_then() -> None:
    async def body(lanes: Lanes) -> None:
        slots = lanes.pool._pages.slots
        place = slots.take_now("modest")
        assert place is not None
        page = asyncio.create_task(lanes.read("greedy", "short"))
        await until(lambda: slots.crowded("modest", 1))
        for client, seconds in (("modest", 0.1), ("greedy", 10 * LITTLE_SECONDS)):
            lanes.pool._accounts.add(client, seconds)
        slots.give(place)
        assert await page == "ok"
        assert [w.nice for w in lanes.made] == [19]

    lanes_run(body)


def test_a_page_that_ended_its_worker_is_not_tried_again() -> None:
    async def body(lanes: Lanes) -> None:
        assert await lanes.read("a", "dead") == "decompression_bomb"
        assert lanes.asked()["dead"] == 1
        assert await lanes.read("b", "short") == "ok"

    lanes_run(body)


def test_documents_have_a_lane_of_their_own() -> None:
    async def body(lanes: Lanes) -> None:
        async def document() -> str:
            job = Job("http://a.example/x.pdf", "application/pdf", HtmlOptions())
            await as_client("a", lanes.pool.extract(b"%PDF-long", job))
            return "ok"

        lanes.made.clear()
        reading = asyncio.create_task(document())
        await until(lambda: bool(lanes.asked()))
        assert await lanes.read("b", "short") == "ok"
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    lanes_run(body)


def test_a_page_that_needs_too_much_time_or_memory_names_the_limit() -> None:
    async def run(limits: Limits, body: bytes) -> SearchFetchError:
        pool = ExtractPool(1, limits)
        try:
            with pytest.raises(SearchFetchError) as caught:
                await pool.extract(body, Job("", "text/html", HtmlOptions(mode="full")))
            return caught.value
        finally:
            await pool.close()

    long = b"<p>" + b"word of text and more. " * 80_000
    error = asyncio.run(run(Limits(extract_cpu_seconds=0.02), long))
    assert error.details == {"limit": "extract_cpu_seconds", "value": 0.02}
    error = asyncio.run(run(Limits(extract_memory_bytes=1), long * 4))
    assert error.code in ("decompression_bomb", "extraction_empty")


def test_the_process_that_forks_workers_is_replaced_and_takes_none_with_it() -> None:
    factory = WorkerFactory(Limits())
    header = header_of(Job("", "text/html", HtmlOptions(mode="fast")))
    first = factory.start()
    assert factory._process is not None
    factory._process.kill()
    factory._process.wait()
    second = factory.start()
    answers = [worker.ask(header, PAGE)[1] for worker in (first, second)]
    assert answers[0] == answers[1] != b""
    for worker in (first, second):
        worker.stop()
        with pytest.raises(WorkerLostError):
            worker.ask(header, PAGE)
    factory.close()
    with pytest.raises(LimitError, match="were ended"):
        factory.start()


def test_workers_end_with_their_parent() -> None:
    factory = WorkerFactory(Limits())
    worker = factory.start()
    worker._stdin.close()
    while worker.alive():
        time.sleep(0.01)
    assert worker._exit_code() == 0
    worker.stop()
    factory.close()


# The key before the place


def begun_post(port: int, **headers: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    fields = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    connection.sendall(
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + fields.encode()
        + b"Content-Length: 100\r\n\r\n{"
    )
    return connection


def test_posts_without_a_key_are_refused_before_their_body_and_take_no_place(
    serve: Callable[..., Service],
) -> None:
    service = serve(auth=True, settings=ServiceSettings(max_concurrent=2, body_seconds=60))
    assert service.keys is not None
    secret, _ = service.keys.create("me")
    connections = [begun_post(service.port) for _ in range(8)]
    for connection in connections[:4]:
        assert read_reply(connection).status == 401
    bearer = {"Authorization": f"Bearer {secret}"}
    assert call(service.port, "GET", "/v1/usage", **bearer).status == 200
    assert call(service.port, "POST", "/v1/search", {"query": "voles"}, **bearer).status == 200
    for connection in connections:
        connection.close()


def test_who_goes_on_after_many_refusals_waits_and_nobody_else_does() -> None:
    now, slept = [0.0], list[float]()
    released = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await released.wait()

    async def run() -> None:
        delays = RefusalDelays(clock=lambda: now[0], sleep=sleep)
        for _ in range(FREE_REFUSALS):
            delays.note("eager")
            await delays.wait("eager")
        assert slept == []
        delays.note("eager")
        waiting = [asyncio.create_task(delays.wait("eager")) for _ in range(DELAYED_PER_CLIENT)]
        await until(lambda: len(slept) == DELAYED_PER_CLIENT)
        await delays.wait("eager")  # as many as may wait do
        await delays.wait("modest")
        released.set()
        await asyncio.gather(*waiting)
        now[0] += 60
        await delays.wait("eager")
        assert slept == [DELAY_SECONDS] * DELAYED_PER_CLIENT

    asyncio.run(run())


def test_an_address_that_opens_too_many_connections_waits_its_turn_and_is_then_refused() -> None:
    now = [100.0]
    pace = ConnectionPace(10.0, clock=lambda: now[0])
    waits = [pace.wait("eager") for _ in range(50)]
    assert waits[:20] == [0.0] * 20  # two seconds' worth at once
    assert [w for w in waits[20:41] if w is not None] == pytest.approx([i / 10 for i in range(21)])
    assert waits[41:] == [None] * 9
    assert pace.wait("modest") == 0.0
    now[0] += 1.0
    assert pace.wait("eager") == pytest.approx(1.1)


def test_connections_beyond_the_pace_are_read_later_or_cut(
    serve: Callable[..., Service],
) -> None:
    service = serve(settings=ServiceSettings(connections_per_second=20.0))
    opened = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(90)]
    for connection in opened:
        with contextlib.suppress(OSError):
            connection.sendall(request_bytes("GET", "/healthz"))
    statuses = Counter(read_reply(connection).status for connection in opened)
    assert statuses[200] >= 80  # 40 at once, 40 more within two seconds
    assert statuses[0] + statuses[200] == 90
    for connection in opened:
        connection.close()


def test_a_flood_of_refused_requests_is_delayed_by_the_service(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    async def noted(self: RefusalDelays, client: str) -> None:
        if self._until.get(client):
            waited.append(client)

    monkeypatch.setattr(RefusalDelays, "wait", noted)
    service = serve(auth=True, settings=ServiceSettings(rate_per_second=0.001, rate_burst=1))
    assert service.keys is not None
    secret, key = service.keys.create("me")
    for headers, client in (({}, "127.0.0.1"), ({"Authorization": f"Bearer {secret}"}, key.id)):
        for _ in range(FREE_REFUSALS + 3):
            call(service.port, "GET", "/v1/usage", **headers)
        assert set(waited) == {client}
        waited.clear()


def test_slow_bodies_of_one_key_leave_the_places_of_the_others(
    serve: Callable[..., Service],
) -> None:
    settings = ServiceSettings(max_concurrent=4, max_concurrent_per_key=2, body_seconds=60)
    service = serve(auth=True, settings=settings)
    assert service.keys is not None
    slow, modest = (service.keys.create(name)[0] for name in ("slow", "modest"))
    held = [begun_post(service.port, Authorization=f"Bearer {slow}") for _ in range(2)]
    in_flight = service.app.state.service.metrics.in_flight
    asyncio.run(until(lambda: in_flight._value.get() == 2))
    refused = call(service.port, "GET", "/v1/usage", Authorization=f"Bearer {slow}")
    assert refused.status == 429
    assert refused.json["error"]["details"] == {"limit": "max_concurrent_per_key", "value": 2}
    assert call(service.port, "GET", "/v1/usage", Authorization=f"Bearer {modest}").status == 200
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("places", "greedy", "eager"),
    [(6, 3, 2), (16, 7, 4)],
    ids=["few places", "some kept for first"],
)
def test_many_keys_that_take_all_they_can_leave_a_place_for_another(
    serve: Callable[..., Service], places: int, greedy: int, eager: int
) -> None:
    settings = ServiceSettings(
        max_concurrent=places, max_concurrent_per_key=places, body_seconds=60
    )
    service = serve(auth=True, settings=settings)
    assert service.keys is not None
    in_flight = service.app.state.service.metrics.in_flight
    opened: list[socket.socket] = []
    for name, taken in (("greedy", greedy), ("eager", eager)):
        bearer = {"Authorization": f"Bearer {service.keys.create(name)[0]}"}
        before = in_flight._value.get()
        opened += [begun_post(service.port, **bearer) for _ in range(taken)]
        asyncio.run(until(lambda n=before + taken: in_flight._value.get() == n))
        refused = call(service.port, "GET", "/v1/usage", **bearer)
        assert refused.json["error"]["details"] == {"limit": "max_concurrent", "value": places}
    modest = service.keys.create("modest")[0]
    assert call(service.port, "GET", "/v1/usage", Authorization=f"Bearer {modest}").status == 200
    for connection in opened:
        connection.close()


def test_connections_without_a_request_are_closed_in_time_and_for_others(
    serve: Callable[..., Service],
) -> None:
    service = serve(settings=ServiceSettings(header_seconds=0.2))
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as idle:
        idle.sendall(b"GET /healthz HTTP/1.1\r\n")
        assert _ended(idle)
    service = serve(settings=ServiceSettings(header_seconds=60, max_connections=3))
    idle = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(6)]
    assert _ended(idle[0])
    assert call(service.port, "GET", "/healthz").status == 200
    for connection in idle:
        connection.close()


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


# The home folder and the index


def test_the_home_is_the_owners_alone_even_if_it_was_open(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o755)

    async def run() -> None:
        async with AsyncSearchFetch(Config(home=tmp_path / "home", extract_workers=0)):
            pass

    asyncio.run(run())
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


def test_results_and_the_generation_they_carry_belong_together(tmp_path: Path) -> None:
    writer, reader = TantivyBackend(tmp_path), TantivyBackend(tmp_path)
    assert search(reader, SearchRequest(query="owl")).generation == 0
    for generation in (1, 2, 3):
        page = IndexedPage(
            f"https://a.example/{generation}", "Owl", "The owl hears voles. " * 9, ""
        )
        writer.index([page])
        writer.commit()
        found = search(reader, SearchRequest(query="owl", dedupe=False, max_per_host=9))
        assert (found.generation, len(found.results)) == (generation, generation)
        assert found.warnings == []


def test_a_commit_whose_label_is_not_written_yet_has_the_next_generation(tmp_path: Path) -> None:
    writer, reader = TantivyBackend(tmp_path), TantivyBackend(tmp_path)
    for name in ("a", "b"):
        label = (tmp_path / "generation.json").read_text()
        writer.index([IndexedPage(f"https://{name}.example/", "Owl", "The owl. " * 9, "")])
        writer.commit()
    (tmp_path / "generation.json").write_text(label)  # as it stood during the second commit
    snapshot = reader.snapshot()
    assert (snapshot.generation(), snapshot.size()) == (2, 2)


def test_a_snapshot_stays_what_it_was(tmp_path: Path) -> None:
    backend = TantivyBackend(tmp_path)
    before = backend.snapshot()
    backend.index([IndexedPage("https://a.example/", "Owl", "The owl. " * 9, "")])
    backend.commit()
    assert (before.generation(), before.size()) == (0, 0)
    assert (backend.generation(), backend.size()) == (1, 1)


def test_tickets_are_told_apart_by_identity() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        one, other = (Ticket("a", "h", 1, loop, loop.create_future()) for _ in range(2))
        assert one != other

    asyncio.run(run())
