# ruff: noqa: E501
"""Cache, robots, politeness, paging, workers: the pipeline around extraction."""

from __future__ import annotations

import asyncio
import math
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    ContentError,
    FetchRequest,
    FetchResponse,
    InvalidRequestError,
    LimitError,
    RefusedError,
    SearchFetch,
    SearchFetchError,
    SearchRequest,
    UpstreamError,
)
from deepinfer_search_fetch.extract.tokens import count_tokens, paginate
from deepinfer_search_fetch.net.politeness import HostSlots
from deepinfer_search_fetch.net.robots import parse_robots

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
TEXT = "<p>" + "Voles live in the grass of the meadow. " * 20


def fetch(
    client: AsyncSearchFetch, site: Listener, path: str = "/", **fields: Any
) -> FetchResponse:
    request = FetchRequest(url=f"http://public.test:{site.port}{path}", **fields)
    return asyncio.run(client.fetch(request))


def test_a_second_fetch_is_answered_from_the_cache(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    client = make_client(config)
    first, second = fetch(client, site), fetch(client, site)
    assert (first.cache.hit, second.cache.hit) == (False, True)
    assert first.content == second.content
    assert first.id == second.id
    assert len(site.requests) == 1


def test_max_age_zero_revalidates_and_a_304_keeps_the_page(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT, headers=('ETag: "v1"',))
    client = make_client(config)
    fetch(client, site)
    site.page("/", "", status="304 Not Modified", content_type=None)
    again = fetch(client, site, max_age=0)
    assert again.cache.revalidated
    assert "Voles" in again.content
    assert b'if-none-match: "v1"' in site.requests[-1].lower()


@pytest.mark.parametrize("header", ["Cache-Control: no-store", "Set-Cookie: a=b", "Vary: *"])
def test_private_pages_are_not_stored(
    header: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT, headers=(header,))
    client = make_client(config)
    fetch(client, site)
    assert not fetch(client, site).cache.hit


def test_a_stale_page_is_served_when_the_site_fails(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT, headers=("Cache-Control: max-age=0",))
    client = make_client(config)
    fetch(client, site)
    site.behaviour = lambda connection, _: connection.sendall(b"garbage\r\n\r\n")
    again = fetch(client, site)
    assert "stale" in again.extraction.warnings
    assert "Voles" in again.content


@pytest.mark.parametrize("damage", ["truncate", "delete", "flip"])
def test_a_damaged_cache_blob_is_fetched_again(
    damage: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    client = make_client(config)
    fetch(client, site)
    blob = next(p for p in (config.home / "cache" / "blobs").rglob("*") if p.is_file())
    data = blob.read_bytes()
    if damage == "delete":
        blob.unlink()
    else:
        blob.write_bytes(data[:-5] if damage == "truncate" else data[:-5] + b"xxxxx")
    again = fetch(client, site)
    assert not again.cache.hit
    assert "Voles" in again.content


def test_the_cache_stays_within_its_bytes(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    for i in range(8):
        site.page(f"/{i}", f"<p>{os.urandom(2000).hex()} {TEXT}")
    client = make_client(config.model_copy(update={"cache_bytes": 12_000}))
    for i in range(8):
        fetch(client, site, f"/{i}")
    blobs = [p for p in (config.home / "cache" / "blobs").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in blobs) <= 12_000
    assert fetch(client, site, "/7").cache.hit
    assert not fetch(client, site, "/0").cache.hit


def test_identical_fetches_at_once_make_one_request(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    client = make_client(config)
    request = FetchRequest(url=f"http://public.test:{site.port}/")

    async def run() -> list[FetchResponse]:
        return await asyncio.gather(*(client.fetch(request) for _ in range(5)))

    assert len({r.content for r in asyncio.run(run())}) == 1
    assert len(site.requests) == 1


ROBOTS = """
User-agent: *
Disallow: /private
Allow: /private/open$

User-agent: deepinferfetch # ours
Disallow: /*.pdf$
Disallow: /a
Allow: /a/b
Crawl-delay: 2
"""


@pytest.mark.parametrize(
    ("agent", "target", "allowed"),
    [
        ("Other", "/private/x", False),
        ("Other", "/private/open", True),
        ("Other", "/private/open?x", False),
        ("DeepInferFetch", "/private/x", True),
        ("DeepInferFetch", "/x.pdf", False),
        ("DeepInferFetch", "/x.pdf?y", True),
        ("DeepInferFetch", "/a/x", False),
        ("DeepInferFetch", "/a/b/c", True),
        ("DeepInferFetch", "/%61/x", False),
        ("DeepInferFetch", "/robots.txt", True),
    ],
)
def test_robots_rules_follow_the_longest_match(agent: str, target: str, allowed: bool) -> None:
    rules = parse_robots(ROBOTS, agent)
    assert rules.allows(target) is allowed
    assert rules.crawl_delay == (2.0 if agent == "DeepInferFetch" else None)


@pytest.mark.parametrize(
    ("status", "body", "allowed"),
    [
        ("200 OK", "User-agent: *\nDisallow: /x", True),
        ("200 OK", "User-agent: *\nDisallow: /", False),
        ("404 Not Found", "", True),
        ("403 Forbidden", "", True),
        ("500 Oops", "", False),
    ],
)
def test_robots_status_decides(
    status: str, body: str, allowed: bool, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/robots.txt", body, status=status, content_type="text/plain")
    site.page("/", TEXT)
    client = make_client(config.model_copy(update={"robots": "respect"}))
    if allowed:
        assert fetch(client, site).robots.allowed
    else:
        with pytest.raises(RefusedError) as caught:
            fetch(client, site)
        assert caught.value.code == "robots_disallowed"


def test_requests_to_one_domain_are_spaced() -> None:
    now = [100.0]
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    async def run() -> None:
        slots = HostSlots(2.0, burst=2, clock=lambda: now[0], sleep=sleep)
        for _ in range(4):
            async with slots.slot("www.example.com"):
                pass
        async with slots.slot("other.example"):
            pass
        slots.postpone("example.com", 30)
        async with slots.slot("cdn.example.com"):
            pass

    asyncio.run(run())
    assert waits == pytest.approx([0.5, 0.5, 30.0])


def test_a_full_queue_says_busy() -> None:
    async def run() -> None:
        slots = HostSlots(1000.0, burst=10, connections=1, queue=0)
        async with slots.slot("a.example"):
            with pytest.raises(LimitError) as caught:
                async with slots.slot("a.example"):
                    pass
        assert caught.value.code == "host_busy"
        async with slots.slot("a.example"):
            pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "code", "http_status"),
    [("404 No", "upstream_http", 404), ("410 Gone", "upstream_http", 404),
     ("500 Oops", "upstream_http", 502)],
)  # fmt: skip
def test_error_pages_are_errors(
    status: str,
    code: str,
    http_status: int,
    config: Config,
    site: Listener,
    make_client: MakeClient,
) -> None:
    site.page("/", TEXT, status=status)
    with pytest.raises(UpstreamError) as caught:
        fetch(make_client(config), site)
    assert (caught.value.code, caught.value.http_status) == (code, http_status)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (
            "<title>Just a moment...</title><p>Checking your browser before you continue",
            "challenge_page",
        ),
        ("<html><body></body></html>", "extraction_empty"),
    ],
)
def test_a_page_without_content_is_not_a_success(
    body: str, code: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", body)
    with pytest.raises(ContentError) as caught:
        fetch(make_client(config), site)
    assert caught.value.code == code


def test_pages_of_a_long_document_add_up_to_it(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", "".join(f"<h2>Part {i}</h2>{TEXT} Number {i}." for i in range(12)))
    client = make_client(config)
    whole = fetch(client, site, mode="full")
    parts, offset = [], 0
    while offset is not None:
        part = fetch(client, site, mode="full", max_tokens=200, offset=offset)
        parts.append(part.content)
        assert part.tokens.total == whole.tokens.total
        offset = part.tokens.next_offset
    assert len(parts) > 3
    assert "".join(parts) == whole.content
    assert whole.tokens.next_offset is None


@pytest.mark.parametrize("fmt", ["text", "html", "outline", "links", "raw_text"])
def test_other_formats(fmt: str, config: Config, site: Listener, make_client: MakeClient) -> None:
    site.page("/", f"<h2>Prey</h2>{TEXT}<a href=/more>more</a><script>x</script>")
    response = fetch(make_client(config), site, format=fmt, mode="full", query="meadow grass")
    expected = {
        "text": "Prey\n\nVoles live",
        "html": "<h2>Prey</h2>",
        "outline": "- Prey",
        "links": f"[more](http://public.test:{site.port}/more)",
        "raw_text": "<script>x</script>",
    }[fmt]
    assert expected in response.content
    assert response.highlights
    assert "meadow" in response.highlights[0].text


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["Plain words here. And more of them! ", "世界你好。再见。", "```py\na = 1\n\nb = 2\n```",
             "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |", "- x\n- y", "w" * 2000, "# H"]
        ),
        max_size=8,
    ),
    st.integers(1, 60),
)  # fmt: skip
def test_paging_reassembles_any_document(blocks: list[str], size: int) -> None:
    content = "\n\n".join(blocks) + "\n" if blocks else ""
    bodies, offset, returned = [], 0, 0
    while offset is not None:
        part = paginate(content, offset, size)
        bodies.append(part.body)
        returned += part.returned
        assert part.text.count("```") % 2 == 0
        assert part.next_offset is None or part.next_offset > offset
        offset = part.next_offset
    assert "".join(bodies) == content
    assert returned == part.total


@given(st.text(alphabet="ab9_ .,-é漢字か가\u00a0\x1c\n", max_size=40))
def test_the_token_estimate_is_what_its_definition_says(text: str) -> None:
    words = re.findall("[A-Za-z0-9_]+", text)
    rest = re.sub("[A-Za-z0-9_]+", "", text)
    cjk = sum(c in "漢字か가" for c in rest)
    others = sum(not c.isspace() for c in rest) - cjk
    expected = sum(math.ceil(len(w) / 4) for w in words) + cjk + math.ceil(others / 2)
    assert count_tokens(text) == expected


def test_token_estimate_is_the_documented_one() -> None:
    assert count_tokens("four") == 1
    assert count_tokens("fives") == 2
    assert count_tokens("世界") == 2
    assert count_tokens("a,") == 2
    assert count_tokens("") == 0


def test_a_worker_that_was_killed_between_pages_costs_nothing(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    client = make_client(config.model_copy(update={"extract_workers": 1}))
    url = f"http://public.test:{site.port}/"

    async def run() -> tuple[FetchResponse, FetchResponse]:
        first = await client.fetch(FetchRequest(url=url, render="never"))
        [worker] = client.fetcher.pool._pages.idle
        os.kill(worker.pid, 9)
        while worker.alive():
            await asyncio.sleep(0.01)
        second = await client.fetch(FetchRequest(url=url, render="never", mode="full"))
        await client.close()
        return first, second

    first, second = asyncio.run(run())
    assert first.content == second.content


def test_a_worker_that_grew_is_replaced(
    config: Config, site: Listener, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_search_fetch.extract import pool

    site.page("/", TEXT)
    client = make_client(config.model_copy(update={"extract_workers": 1}))
    url = f"http://public.test:{site.port}/"

    async def both() -> list[bool]:
        kept = []
        for peak, mode in ((2**40, "article"), (2**40, "full"), (1, "fast")):
            monkeypatch.setattr(pool, "PEAK_BYTES", peak)
            before = set(client.fetcher.pool._alive)
            await client.fetch(FetchRequest(url=url, render="never", mode=mode))
            kept.append(before <= client.fetcher.pool._alive)
        await client.close()
        return kept

    assert asyncio.run(both()) == [True, True, False]


def test_the_sync_client_refuses_to_run_inside_a_loop(tmp_path: Path) -> None:
    client = SearchFetch(Config(home=tmp_path))

    async def run() -> None:
        with pytest.raises(SearchFetchError, match="AsyncSearchFetch"):
            client.fetch(FetchRequest(url="http://a.example/"))

    asyncio.run(run())
    client.close()


def test_batch_items_arrive_with_their_index(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/1", TEXT)
    client = make_client(config)
    base = f"http://public.test:{site.port}"
    requests = [FetchRequest(url=f"{base}/1"), FetchRequest(url=f"{base}/none")]

    async def run() -> dict[int, bool]:
        return {i.index: i.ok async for i in client.fetch_many(requests)}

    assert asyncio.run(run()) == {0: True, 1: False}


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_client_says_so(
    used: bool, tmp_path: Path, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    request = FetchRequest(url=f"http://public.test:{site.port}/")

    async def run() -> list[str]:
        client = make_client(config)
        if used:
            await client.fetch(request)
        await client.close()
        await client.close()
        (item,) = [i async for i in client.fetch_many([request])]
        assert item.error is not None
        told = [str(item.error["message"])]
        for work in (
            client.fetch(request),
            client.search(SearchRequest(query="voles")),
            client.ingest(tmp_path),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                await work
            told.append(caught.value.message)
        return told

    assert set(asyncio.run(run())) == {"this client is closed; make a new one"}


def test_a_closed_synchronous_client_says_so(tmp_path: Path) -> None:
    client = SearchFetch(Config(home=tmp_path))
    client.close()
    client.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        client.fetch(FetchRequest(url="http://public.test/"))


def test_a_fetch_under_way_when_the_client_closes_ends_as_closed(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    async def run() -> None:
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        leave = threading.Event()

        def slow(connection: socket.socket, _: bytes) -> None:
            loop.call_soon_threadsafe(arrived.set)
            leave.wait(30)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        site.behaviour = slow
        client = make_client(config)
        task = asyncio.create_task(
            client.fetch(FetchRequest(url=f"http://public.test:{site.port}/"))
        )
        await arrived.wait()
        await client.close()
        leave.set()
        with pytest.raises(InvalidRequestError, match="closed"):
            await task

    asyncio.run(run())
