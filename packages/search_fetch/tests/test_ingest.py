from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from deepinfer_search_fetch import AsyncSearchFetch, Config, FetchRequest, SearchRequest
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.index.authority import AuthorityTable
from deepinfer_search_fetch.index.ingest import Ingester, Source
from deepinfer_search_fetch.index.linkgraph import LinkGraph
from deepinfer_search_fetch.index.links import PageLink
from deepinfer_search_fetch.index.sources.crawl import Crawl, CrawlOptions
from deepinfer_search_fetch.index.sources.frontier import Frontier, Target
from deepinfer_search_fetch.index.sources.xml import Entry, parse_feed, parse_sitemap
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.urls import parse

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]


def page(title: str, *links: str, head: str = "", text: str = "") -> str:
    anchors = "".join(f'<p>See <a href="{link}">{link} page</a> for more.</p>' for link in links)
    body = text or f"{title} live in ponds and ditches all over the country. " * 12
    return (
        f"<html><head><title>{title}</title>{head}</head><body><article><h1>{title}</h1>"
        f"<p>{body}</p>{anchors}</article></body></html>"
    )


def found(client: AsyncSearchFetch, query: str) -> list[str]:
    response = asyncio.run(client.search(SearchRequest(query=query, max_per_host=50)))
    return [r.url.rpartition("/")[2] for r in response.results]


def test_a_crawl_follows_links_within_its_limits_and_the_guard(
    config: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    private = f"http://127.0.0.1:{target.port}/secret"
    site.page("/", page("Newts", "/a", "/b", private, "http://other.test/", "/pic.jpg"))
    site.page("/a", page("Frogs", "/deep"))
    site.page("/b", page("Toads", "/"))
    site.page("/deep", page("Salamanders", "/deeper"))
    site.page("/deeper", page("Axolotls"))
    config = config.model_copy(update={"ports": (*config.ports, target.port)})
    client = make_client(config)
    seed = f"http://public.test:{site.port}/"
    options = CrawlOptions(depth=2, scope="any")
    report = asyncio.run(client.ingest(seed, "crawl", crawl=options))
    assert report.indexed == 4
    assert report.failed == {"blocked_address": 1, "dns_failure": 1}
    assert "/deeper" not in site.paths()
    assert "/pic.jpg" not in site.paths()
    inside = asyncio.run(client.ingest(seed, "crawl", crawl=CrawlOptions(depth=1)))
    assert (inside.seen, inside.unchanged) == (3, 3)


def test_a_crawl_keeps_its_budgets(config: Config, site: Listener, make_client: MakeClient) -> None:
    site.page("/", page("Newts", *(f"/{i}" for i in range(20))))
    for i in range(20):
        site.page(f"/{i}", page(f"Newt number {i}"))
    seed = f"http://public.test:{site.port}/"
    client = make_client(config)
    report = asyncio.run(client.ingest(seed, "crawl", crawl=CrawlOptions(per_domain=5)))
    assert report.seen == 5
    report = asyncio.run(client.ingest(seed, "crawl", crawl=CrawlOptions(max_pages=3)))
    assert report.seen == 3


def test_a_crawl_obeys_robots_nofollow_and_noindex(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    config = config.model_copy(update={"robots": "respect"})
    site.page("/robots.txt", "User-agent: *\nDisallow: /private\n", content_type="text/plain")
    hidden = '<meta name="robots" content="noindex">'
    site.page(
        "/",
        page("Newts", "/private/x", "/hidden").replace(
            "</article>", '<a rel="nofollow" href="/paid">paid</a></article>'
        ),
    )
    site.page("/hidden", page("Hidden", "/behind", head=hidden))
    site.page("/behind", page("Behind"))
    client = make_client(config)
    report = asyncio.run(client.ingest(f"http://public.test:{site.port}/", "crawl"))
    assert report.skipped == {"noindex": 1, "robots_disallowed": 1}
    assert report.indexed == 2
    assert "/paid" not in site.paths()
    assert "/private/x" not in site.paths()


def test_a_page_that_turns_noindex_leaves_the_index(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    client = make_client(config.model_copy(update={"cache_bytes": 0}))
    url = f"http://public.test:{site.port}/x"
    site.page("/x", page("Newts"))
    asyncio.run(client.ingest(url))
    assert found(client, "newts") == ["x"]
    site.page("/x", page("Newts"), headers=("X-Robots-Tag: noindex",))
    report = asyncio.run(client.ingest(url))
    assert report.skipped == {"noindex": 1}
    assert found(client, "newts") == []


def test_links_give_pages_words_they_do_not_hold(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    link = '<p>We recommend <a href="/x">amphibian handbook</a> to everybody.</p>'
    site.page("/", page("Start").replace("</article>", link + "</article>"))
    site.page("/x", page("Newts"))
    client = make_client(config)
    asyncio.run(client.ingest(f"http://public.test:{site.port}/", "crawl"))
    assert "x" in found(client, "amphibian handbook")
    assert found(client, "intitle:newts handbook") == ["x"]


def test_a_killed_crawl_goes_on_where_it_was(tmp_path: Path, site: Listener) -> None:
    """kill -9 in the middle: every page ends up indexed, and few are asked for twice."""
    n = 60
    for i in range(n):
        site.page(f"/{i}", page(f"Newt number {i}", f"/{2 * i + 1}", f"/{2 * i + 2}"))
    hang = threading.Event()
    serve_page = site.pages.copy()

    def behaviour(connection: Any, data: bytes) -> None:
        path = data.split(b" ", 2)[1].decode()
        if path == "/40" and not hang.is_set():
            process.send_signal(signal.SIGKILL)
            hang.set()
            return
        missing = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        connection.sendall(serve_page.get(path, missing))

    site.behaviour = behaviour
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from deepinfer_search_fetch import AsyncSearchFetch, Config\n"
        "from deepinfer_search_fetch.index.sources.crawl import CrawlOptions\n"
        "port, home = int(sys.argv[1]), Path(sys.argv[2])\n"
        "config = Config(home=home, allow_cidrs=('127.0.0.2/32',), ports=(port,),"
        " extract_workers=0, host_requests_per_second=1000.0, host_burst=1000,"
        " robots='ignore', cache_bytes=0)\n"
        "client = AsyncSearchFetch(config)\n"
        "report = asyncio.run(client.ingest(f'http://127.0.0.2:{port}/0', 'crawl',"
        " crawl=CrawlOptions(depth=9)))\n"
        "print(report.model_dump_json())\n"
    )
    command = [sys.executable, "-c", script, str(site.port), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ))
    assert process.wait(60) == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()
    assert hang.is_set()
    before = len(site.paths())
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    report = json.loads(done.stdout)
    backend = TantivyBackend(tmp_path / "index")
    assert backend.size() == n
    again = len(site.paths()) - before
    links = 2 * n + 1
    assert before + again > links  # what was in work was read again
    assert again <= links - 25  # and what the last checkpoint holds was not
    assert report["unchanged"] + report["indexed"] + sum(report["failed"].values()) == again
    assert not list((tmp_path / "crawls").glob("*.sqlite3"))


def test_the_frontier_goes_by_depth_then_authority(tmp_path: Path) -> None:
    frontier = Frontier(tmp_path / "f.sqlite3", per_node=2)
    frontier.settle(
        [],
        [
            Target("http://a/1", "a", 1, 0.2),
            Target("http://b/1", "b", 1, 0.9),
            Target("http://c/0", "c", 0, 0.1),
            Target("http://a/2", "a", 1, 0.8),
            Target("http://a/3", "a", 1, 0.8),
        ],
    )
    order = []
    while (target := frontier.next([], [])) is not None:
        order.append(target.url)
        frontier.settle([target.url], [])
    assert order == ["http://c/0", "http://b/1", "http://a/2", "http://a/1"]
    assert frontier.next([], []) is None
    frontier.settle([], [Target("http://d/1", "d", 1, 0.5)])
    assert frontier.next([], ["d"]) is None
    frontier.close()


def test_a_crawl_that_is_cancelled_keeps_its_frontier(tmp_path: Path) -> None:
    async def run() -> None:
        started = asyncio.Event()

        async def visit(url: str) -> tuple[PageLink, ...]:
            started.set()
            await asyncio.Event().wait()
            return ()

        crawl = Crawl(
            tmp_path, "http://a.example/", CrawlOptions(), AuthorityTable(), visit, lambda: None
        )
        task = asyncio.create_task(crawl.run())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert list(tmp_path.glob("*.sqlite3"))


@pytest.mark.parametrize("field", ["max_pages", "per_domain", "concurrency", "depth"])
def test_limits_of_a_crawl_are_checked(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        CrawlOptions(**{field: -1})


def warc(*records: tuple[dict[str, str], bytes]) -> bytes:
    out = b""
    for i, (headers, block) in enumerate(records):
        lines = {
            "WARC-Record-ID": f"<urn:uuid:00000000-0000-0000-0000-{i:012d}>",
            "WARC-Date": "2026-03-01T10:00:00Z",
            "Content-Length": str(len(block)),
            **headers,
        }
        out += b"WARC/1.1\r\n" + b"".join(f"{k}: {v}\r\n".encode() for k, v in lines.items())
        out += b"\r\n" + block + b"\r\n\r\n"
    return out


def response(url: str, body: str, status: int = 200, extra: str = "", **headers: str) -> Any:
    block = (
        f"HTTP/1.1 {status} X\r\nContent-Type: text/html; charset=utf-8\r\n{extra}"
        f"Content-Length: {len(body.encode())}\r\n\r\n{body}"
    ).encode()
    kind = {
        "WARC-Type": "response",
        "WARC-Target-URI": url,
        "Content-Type": "application/http; msgtype=response",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    return kind, block


def archive() -> bytes:
    return warc(
        response("https://a.example/newts?utm_source=x", page("Newts", "https://b.example/")),
        response("https://a.example/gone", "no", status=404),
        response("https://a.example/cut", page("Cut"), WARC_Truncated="length"),
        response("https://a.example/no", page("No"), extra="X-Robots-Tag: noindex\r\n"),
        response("ftp://a.example/x", page("Ftp")),
        ({"WARC-Type": "request", "WARC-Target-URI": "https://a.example/"}, b"GET / HTTP/1.1\r\n"),
        (
            {"WARC-Type": "resource", "WARC-Target-URI": "https://a.example/t.txt",
             "Content-Type": "text/plain"},
            b"Toads are resources too. " * 8,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("packing", ["plain", "gzip", "zstd"])
def test_web_archives_are_read_packed_or_not(packing: str, tmp_path: Path) -> None:
    raw = archive()
    packed = {
        "plain": lambda: raw,
        "gzip": lambda: gzip.compress(raw),
        "zstd": lambda: zstandard.compress(raw),
    }[packing]()
    file = tmp_path / "x.warc"
    file.write_bytes(packed)
    backend = TantivyBackend(None)
    report = asyncio.run(Ingester(backend, home=tmp_path).run(Source("warc", str(file))))
    assert report.indexed == 2
    assert report.skipped == {"http_404": 1, "noindex": 1, "truncated": 1}
    assert report.failed == {"invalid_url": 1}
    assert {p.url for p in backend.pages(10)} == {
        "https://a.example/newts",
        "https://a.example/t.txt",
    }
    assert {p.fetched_at for p in backend.pages(10)} == {"2026-03-01T10:00:00Z"}
    with LinkGraph(tmp_path / "links.sqlite3") as graph:
        assert [(e.source, e.target) for e in graph.edges()] == [("a.example", "b.example")]
    again = asyncio.run(Ingester(backend, home=tmp_path).run(Source("warc", str(file))))
    assert (again.indexed, again.unchanged) == (0, 2)


def test_a_web_archive_that_is_cut_off_gives_what_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.warc.gz"
    stream = io.BytesIO()
    for _ in range(2):
        stream.write(gzip.compress(archive()))
    file.write_bytes(stream.getvalue()[: -len(stream.getvalue()) // 3])
    backend = TantivyBackend(None)
    report = asyncio.run(Ingester(backend).run(Source("warc", str(file))))
    assert report.indexed == 2
    assert report.failed["damaged_archive"] == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"\x1f\x8b broken", b"no archive at all\n" * 9, gzip.compress(b"WARC/1.1\r\n" * 9)[:25]],
    ids=["empty", "broken gzip", "text", "cut off"],
)
def test_an_archive_without_a_record_is_a_failure_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "crawl.warc.gz"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"crawl\.warc\.gz"):
        asyncio.run(Ingester(TantivyBackend(None)).run(Source("warc", str(file))))


def test_an_archive_of_other_records_alone_is_whole_and_empty(tmp_path: Path) -> None:
    file = tmp_path / "x.warc.gz"
    file.write_bytes(gzip.compress(warc(({"WARC-Type": "warcinfo"}, b"software: none"))))
    report = asyncio.run(Ingester(TantivyBackend(None)).run(Source("warc", str(file))))
    assert (report.seen, report.failed) == (0, {})


def test_feeds_lead_to_pages_and_lend_them_their_date(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    base = f"http://public.test:{site.port}"
    site.page("/newts", page("Newts"))
    feed = (
        "<rss><channel><title>Pond</title>"
        f"<item><title>Newts</title><link>{base}/newts</link>"
        "<pubDate>Tue, 03 Mar 2026 08:00:00 +0100</pubDate></item>"
        "<item><title>None</title></item></channel></rss>"
    )
    site.page("/feed", feed, content_type="application/rss+xml")
    client = make_client(config)
    report = asyncio.run(client.ingest(f"{base}/feed", "feed"))
    assert report.indexed == 1
    [result] = asyncio.run(client.search(SearchRequest(query="newts"))).results
    assert result.published == "2026-03-03T07:00:00Z"
    with pytest.raises(InvalidRequestError, match="not an RSS"):
        asyncio.run(client.ingest(f"{base}/newts", "feed"))


def test_atom_links_resolve_against_the_feed() -> None:
    atom = (
        b'<feed xmlns="http://www.w3.org/2005/Atom"><entry><title>A</title>'
        b'<link rel="self" href="/s"/><link href="/a"/>'
        b"<updated>2026-01-02T03:04:05Z</updated></entry></feed>"
    )
    [entry] = parse_feed(atom, parse("https://x.example/feeds/all"))
    assert entry == Entry("https://x.example/a", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z")


def test_sitemaps_skip_what_the_index_has_read_since(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    base = f"http://public.test:{site.port}"
    client = make_client(config)

    def publish(day: str, text: str) -> None:
        entry = f"<url><loc>{base}/newts</loc><lastmod>{day}</lastmod></url>"
        body = gzip.compress(f"<urlset>{entry}</urlset>".encode())
        site.page("/map.xml.gz", body, content_type="application/gzip",
                  headers=("Cache-Control: no-store",))  # fmt: skip
        site.page("/newts", page("Newts", text=text))

    publish("2020-01-01", "Newts live in ponds. " * 12)
    assert asyncio.run(client.ingest(f"{base}/map.xml.gz")).indexed == 1
    again = asyncio.run(client.ingest(f"{base}/map.xml.gz"))
    assert again.skipped == {"not_modified": 1}
    assert site.paths().count("/newts") == 1
    publish("2099-01-01", "Newts moved to a lake. " * 12)
    assert asyncio.run(client.ingest(f"{base}/map.xml.gz")).updated == 1
    assert site.paths().count("/newts") == 2


def test_a_sitemap_may_be_a_list_of_lines() -> None:
    nested, pages = parse_sitemap(b"https://a.example/1\n\nhttps://a.example/2\r\n")
    assert nested == []
    assert [entry.url for entry in pages] == ["https://a.example/1", "https://a.example/2"]


def test_fetched_pages_enter_the_index_where_the_operator_wants_it(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    url = f"http://public.test:{site.port}/newts"
    site.page("/newts", page("Newts"))
    plain = make_client(config)
    asyncio.run(plain.fetch(FetchRequest(url=url, render="never")))
    assert plain.backend.size() == 0
    keen = make_client(config.model_copy(update={"index_fetched": True}))
    asyncio.run(keen.fetch(FetchRequest(url=url, render="never", store=False)))
    assert keen.backend.size() == 0
    # A window of the page was asked for; the whole page is indexed.
    asyncio.run(keen.fetch(FetchRequest(url=url, render="never", max_tokens=5)))
    assert found(keen, "newts country") == ["newts"]


def test_a_canonical_link_to_another_site_is_not_believed(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    client = make_client(config)
    head = '<link rel="canonical" href="https://bank.example/login">'
    site.page("/x", page("Newts", head=head))
    asyncio.run(client.ingest(f"http://public.test:{site.port}/x"))
    assert [p.url for p in client.backend.pages(9)] == [f"http://public.test:{site.port}/x"]


def test_progress_counts_up(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"{i}.md").write_text(f"# Newts {i}\n\nNewts live in ponds.\n")
    seen: list[tuple[int, int]] = []
    ingester = Ingester(TantivyBackend(None), progress=lambda a, b: seen.append((a, b)))
    asyncio.run(ingester.run(Source("file", str(tmp_path))))
    assert [a for a, _ in seen] == [1, 2, 3]
