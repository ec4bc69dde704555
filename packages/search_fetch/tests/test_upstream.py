from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from deepinfer_search_fetch import SearchRequest, SearchResponse
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search.engine import SearchParts, search
from deepinfer_search_fetch.search.upstream import (
    Answer,
    Brave,
    Breaker,
    RawHit,
    SearxNG,
    UpstreamEngine,
    Upstreams,
)

NOW = 1_790_000_000.0
SECRET = "BSA-very-secret"


class FakeEngine:
    """A search engine on loopback with a scripted answer; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, list[str]], dict[str, str]]] = []
        self.status = 200
        self.body: bytes = b"{}"
        self.hold: Event | None = None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                fake.asked.append((parts.path, parse_qs(parts.query), dict(self.headers)))
                if fake.hold is not None:
                    fake.hold.wait(5)
                self.send_response(fake.status)
                if fake.status == 302:
                    self.send_header("Location", "http://127.0.0.1:9/steal")
                self.send_header("Content-Length", str(len(fake.body)))
                self.end_headers()
                self.wfile.write(fake.body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        if self.hold is not None:
            self.hold.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


def searxng_answer(*rows: dict[str, Any], unresponsive: Any = ()) -> bytes:
    return json.dumps({"results": rows, "unresponsive_engines": unresponsive}).encode()


def row(url: str, title: str, content: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "title": title, "content": content, "score": 99.0, **more}


@pytest.fixture
def backend() -> TantivyBackend:
    backend = TantivyBackend(None)
    text = "Newts live in ponds and hunt insects at night. " * 8
    backend.index([IndexedPage("https://a.example/newts", "Newts", text, "2026-09-01")])
    backend.commit()
    return backend


def run(
    backend: TantivyBackend, engines: dict[str, UpstreamEngine] | Upstreams, **fields: Any
) -> SearchResponse:
    upstreams = engines if isinstance(engines, Upstreams) else Upstreams(engines)
    fields.setdefault("sources", ["index", *(f"upstream:{n}" for n in upstreams.names)])
    request = SearchRequest(query=fields.pop("query", "newts ponds"), **fields)
    return search(backend, request, parts=SearchParts(upstreams=upstreams), clock=lambda: NOW)


def test_searxng_results_join_and_are_scored_by_us(
    engine: FakeEngine, backend: TantivyBackend
) -> None:
    engine.body = searxng_answer(
        row("https://b.example/?utm_source=s", "<b>Newts</b>", "Newts and ponds of Kent.",
            publishedDate="2026-08-01T00:00:00"),
        row("https://c.example/", "Cars", "Engines and tyres."),
        row("https://a.example/newts", "Newts", "the page the index has"),
        {"title": "no url"}, "nonsense",
        unresponsive=[["google", "CAPTCHA"]],
    )  # fmt: skip
    response = run(backend, {"sx": SearxNG(engine.url)}, language="en-GB", freshness=None)
    by_url = {r.url: r for r in response.results}
    assert by_url["https://b.example/"].source == "sx"
    assert by_url["https://b.example/"].title == "Newts"
    assert by_url["https://b.example/"].published == "2026-08-01T00:00:00"
    assert by_url["https://a.example/newts"].source == "index"
    assert by_url["https://b.example/"].relevance > by_url["https://c.example/"].relevance
    assert response.unresponsive_engines == ["sx/google"]
    assert response.warnings == []
    path, query, _ = engine.asked[0]
    assert path == "/search"
    assert query["q"] == ["newts ponds"]
    assert query["format"] == ["json"]
    assert query["language"] == ["en"]


def test_brave_gets_its_key_and_nobody_else_does(
    engine: FakeEngine, backend: TantivyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    results = [{"url": "https://b.example/", "title": "Newts", "description": "Ponds <strong>x"}]
    engine.body = json.dumps({"web": {"results": results}}).encode()
    brave = Brave(SECRET, url=f"{engine.url}/res/v1/web/search")
    response = run(backend, {"brave": brave}, freshness="week", sources=["upstream:brave"],
                   query="newts " + "word " * 80)  # fmt: skip
    path, query, headers = engine.asked[0]
    assert path == "/res/v1/web/search"
    assert headers["X-Subscription-Token"] == SECRET
    assert query["freshness"] == ["pw"]
    assert len(query["q"][0].split()) == 50
    engine.status = 302  # a redirect must not carry the key away
    failed = run(backend, {"brave": brave}, sources=["upstream:brave"])
    assert failed.warnings == ["upstream_failed:brave:upstream_http"]
    text = f"{response.model_dump_json()} {failed.model_dump_json()} {brave!r} {caplog.text}"
    assert SECRET not in text


def test_an_upstream_result_must_meet_the_requests_filters(
    engine: FakeEngine, backend: TantivyBackend
) -> None:
    engine.body = searxng_answer(
        row("https://b.example/1", "Newts", "ponds", publishedDate="2026-09-20"),
        row("https://b.example/2", "Newts", "ponds", publishedDate="2020-01-01"),
        row("https://b.example/3", "Newts", "ponds"),
        row("https://c.example/4", "Newts", "ponds", publishedDate="2026-09-20"),
        row("javascript:alert(1)", "Newts", "ponds", publishedDate="2026-09-20"),
    )
    response = run(
        backend, {"sx": SearxNG(engine.url)}, freshness="week", exclude_domains=["c.example"]
    )
    assert [r.url for r in response.results] == ["https://b.example/1"]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (403, b"", "upstream_http"),
        (500, b"", "upstream_http"),
        (200, b"<html>", "upstream_http"),
        (200, b"[1]", "upstream_http"),
        (200, b"[" * 100_000, "upstream_http"),
        (200, b" " * (2 * 1024 * 1024 + 1), "timeout"),
    ],
)
def test_a_failing_engine_is_a_warning(
    status: int, body: bytes, reason: str, engine: FakeEngine, backend: TantivyBackend
) -> None:
    engine.status, engine.body = status, body
    response = run(backend, {"sx": SearxNG(engine.url)})
    assert [r.source for r in response.results] == ["index"]
    assert response.warnings == [f"upstream_failed:sx:{reason}"]
    assert response.unresponsive_engines == ["sx"]


def test_an_engine_that_hangs_is_given_up(engine: FakeEngine, backend: TantivyBackend) -> None:
    engine.hold = Event()
    response = run(backend, {"sx": SearxNG(engine.url, timeout=0.2)})
    assert response.warnings == ["upstream_failed:sx:timeout"]
    nobody = run(backend, {"sx": SearxNG("http://127.0.0.1:9")})
    assert nobody.warnings == ["upstream_failed:sx:connect_failure"]


def test_an_engine_that_keeps_failing_rests(engine: FakeEngine, backend: TantivyBackend) -> None:
    now = [0.0]
    engine.status = 500
    upstreams = Upstreams({"sx": SearxNG(engine.url)}, clock=lambda: now[0])
    for _ in range(5):
        run(backend, upstreams)
    assert len(engine.asked) == 5
    assert run(backend, upstreams).warnings == ["upstream_resting:sx"]
    assert len(engine.asked) == 5
    now[0] = 61.0
    engine.status, engine.body = 200, searxng_answer()
    assert run(backend, upstreams).warnings == []
    assert len(engine.asked) == 6


def test_a_breaker_counts_failures_in_a_row() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    for ok in (False, False, False, False, True, False, False, False, False):
        breaker.report(ok=ok)
    assert breaker.allows()
    breaker.report(ok=False)
    assert not breaker.allows()
    now[0] = 60.0
    assert breaker.allows()


def test_an_unknown_source_is_the_callers_fault(backend: TantivyBackend) -> None:
    with pytest.raises(InvalidRequestError, match="'upstream:google' is not configured"):
        run(backend, {}, sources=["upstream:google"])


def test_any_engine_may_be_plugged_in(backend: TantivyBackend) -> None:
    class Own:
        def search(self, query: str, n: int, language: Any, freshness: Any) -> Answer:
            return Answer([RawHit("https://own.example/", f"{query}!", "newts in ponds")])

    make: Callable[[], UpstreamEngine] = Own
    response = run(backend, {"own": make()}, sources=["upstream:own"])
    assert [r.source for r in response.results] == ["own"]
    assert response.usage.billable
