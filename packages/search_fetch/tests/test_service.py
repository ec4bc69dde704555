# ruff: noqa: E501
from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch import AsyncSearchFetch, Config
from deepinfer_search_fetch.errors import InvalidRequestError, LimitError, RefusedError
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.service.app import create_app
from deepinfer_search_fetch.service.auth import KeyStore
from deepinfer_search_fetch.service.metering import Charge, Ledger, Price
from deepinfer_search_fetch.service.ratelimit import RateLimiter

Listener = Any  # see conftest
TEXT = "<title>Voles</title><p>" + "Voles live in the grass of the meadow. " * 20


class Server:
    """The service on a loopback port, and a plain HTTP client for it."""

    def __init__(self, app: Any) -> None:
        sockets = socket.create_server(("127.0.0.1", 0))
        self.port = sockets.getsockname()[1]
        settings_ = uvicorn.Config(app, log_level="error", lifespan="on", ws="none")
        self.server = uvicorn.Server(settings_)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [sockets]})
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive(), "the service did not start"
            time.sleep(0.01)

    def call(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], Any]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            client = h11.Connection(h11.CLIENT)
            data = (
                b""
                if body is None
                else body
                if isinstance(body, bytes)
                else json.dumps(body).encode()
            )
            lines = [("Host", "localhost"), ("Content-Length", str(len(data))),
                     ("Content-Type", "application/json"), ("Connection", "close"),
                     *((k.replace("_", "-"), v) for k, v in headers.items())]  # fmt: skip
            connection.sendall(client.send(h11.Request(method=method, target=path, headers=lines)))
            connection.sendall(client.send(h11.Data(data=data)) + client.send(h11.EndOfMessage()))
            status, found, parts = 0, {}, []
            while True:
                event = client.next_event()
                if event is h11.NEED_DATA:
                    client.receive_data(connection.recv(65536))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                    found = {k.decode(): v.decode() for k, v in event.headers}
                elif isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                else:
                    break
        text = b"".join(parts)
        is_json = "json" in found.get("content-type", "") and "ndjson" not in found["content-type"]
        return status, found, json.loads(text) if is_json else text.decode()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


class Service:
    def __init__(self, config: Config, resolver: Any, *, auth: bool, limiter: RateLimiter) -> None:
        config.home.mkdir(parents=True, exist_ok=True)
        self.keys = KeyStore(config.home / "keys.sqlite3") if auth else None
        self.ledger = Ledger(config.home / "ledger.sqlite3")
        self.client = AsyncSearchFetch(config, resolver=resolver)
        self.client.backend.index(
            [IndexedPage("https://a.example/", "Voles", "Voles live in grass. " * 20, "2026-01-01")]
        )
        self.client.backend.commit()
        self.http = Server(create_app(self.client, self.ledger, self.keys, limiter))
        self.call = self.http.call

    def rows(self) -> list[dict[str, Any]]:
        return self.ledger.usage()

    def close(self) -> None:
        self.http.stop()
        self.ledger.close()
        if self.keys:
            self.keys.close()


@pytest.fixture
def serve(config: Config, make_resolver: Any) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(*, auth: bool = False, limiter: RateLimiter | None = None) -> Service:
        resolver = make_resolver({"public.test": [["127.0.0.2"]]})
        service = Service(config, resolver, auth=auth, limiter=limiter or RateLimiter(1e6, 10**6))
        made.append(service)
        return service

    yield make
    for service in made:
        service.close()


def test_fetch_and_search_answer_and_are_metered_once(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    url = f"http://public.test:{site.port}/"
    status, headers, page = service.call("POST", "/v1/fetch", {"url": url})
    assert (status, page["title"], page["usage"]["billable"]) == (200, "Voles", True)
    assert headers["cache-control"] == "no-store"
    assert headers["x-request-id"]
    status, _, found = service.call("POST", "/v1/search", {"query": "voles"})
    assert (status, len(found["results"])) == (200, 1)
    status, _, nothing = service.call("POST", "/v1/search", {"query": "zzzzqq"})
    assert (status, nothing["results"], nothing["usage"]["billable"]) == (200, [], False)
    service.call("POST", "/v1/fetch", {"url": url + "missing"})
    assert [(r["endpoint"], r["quantity"], r["price_micros"]) for r in service.rows()] == [
        ("fetch", 1, 5000),
        ("search", 1, 5000),
    ]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/fetch", {"url": "http://127.0.0.1/"}, 403, "blocked_address"),
        ("POST", "/v1/fetch", {"url": "http://a@b.example/"}, 400, "invalid_url"),
        ("POST", "/v1/fetch", {"url": "file:///etc/passwd"}, 403, "blocked_scheme"),
        ("POST", "/v1/fetch", {"url": "http://a.example/", "headers": {}}, 422, "invalid_argument"),
        ("POST", "/v1/fetch", {"url": "http://nowhere.example/"}, 502, "dns_failure"),
        ("POST", "/v1/fetch", {"url": "http://a.example/", "render": "always"}, 501, "feature_unavailable"),
        ("POST", "/v1/fetch", b"{", 422, "invalid_argument"),
        ("POST", "/v1/search", {"query": " "}, 422, "invalid_argument"),
        ("POST", "/v1/search", {"query": "x", "count": 51}, 422, "invalid_argument"),
        ("POST", "/v1/tools/search", {"query": "x" * 129}, 400, "invalid_argument"),
        ("POST", "/v1/tools/search", {"query": "x", "localization": "en-US"}, 400, "invalid_argument"),
        ("GET", "/nope", None, 404, "not_found"),
        ("PUT", "/v1/fetch", None, 405, "invalid_argument"),
    ],
)  # fmt: skip
def test_every_error_has_the_same_body(
    method: str, path: str, body: Any, status: int, code: str, serve: Callable[..., Service]
) -> None:
    found, headers, answer = serve().call(method, path, body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"code", "message", "type", "retryable", "request_id", "details"}
    assert answer["error"]["request_id"] == headers["x-request-id"]


def test_drop_in_routes_have_the_public_fields(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    _, _, found = service.call("POST", "/v1/tools/search", {"query": "voles", "model": "ignored"})
    assert set(found["results"][0]) == {
        "title", "url", "snippet", "summary", "content", "rerank_score", "authority", "date",
        "site_name", "site_icon",
    }  # fmt: skip
    assert found["results"][0]["content"] == ""
    assert 0 <= found["results"][0]["rerank_score"] <= 3
    _, _, page = service.call(
        "POST", "/v1/tools/fetch", {"url": f"http://public.test:{site.port}/"}
    )
    assert set(page) == {"title", "content"}
    assert {r["endpoint"] for r in service.rows()} == {"fetch", "search"}


def test_keys_scopes_and_quota_are_enforced(serve: Callable[..., Service]) -> None:
    service = serve(auth=True)
    body = {"query": "voles"}
    assert service.call("POST", "/v1/search", body)[0] == 401
    assert service.call("POST", "/v1/search", body, Authorization="Bearer sk-wrong")[0] == 401
    assert service.keys is not None
    fetch_only, _ = service.keys.create("f", ["fetch"])
    assert service.call("POST", "/v1/search", body, x_api_key=fetch_only)[0] == 403
    secret, key = service.keys.create("s", ["search"], monthly_quota=1)
    assert service.call("POST", "/v1/search", body, Authorization=f"Bearer {secret}")[0] == 200
    assert service.call("POST", "/v1/search", body, x_api_key=secret)[0] == 402
    assert service.keys.revoke(key.id)
    assert service.call("POST", "/v1/search", body, x_api_key=secret)[0] == 401


def test_stored_keys_cannot_be_read_back(tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.sqlite3")
    secret, key = keys.create("one")
    assert keys.find(secret) == key
    assert secret.encode() not in b"".join(p.read_bytes() for p in tmp_path.iterdir())
    with pytest.raises(InvalidRequestError):
        keys.create("two", ["everything"])
    with pytest.raises(RefusedError):
        keys.find(secret[:-1] + "A" if secret[-1] != "A" else secret[:-1] + "B")
    keys.close()


def test_the_rate_limit_answers_429_with_retry_after(serve: Callable[..., Service]) -> None:
    service = serve(limiter=RateLimiter(0.001, 2))
    answers = [service.call("POST", "/v1/search", {"query": "voles"}) for _ in range(3)]
    assert [a[0] for a in answers] == [200, 200, 429]
    assert answers[0][1]["x-ratelimit-remaining"] == "1"
    assert int(answers[2][1]["retry-after"]) > 0
    assert sum(r["quantity"] for r in service.rows()) == 2


@given(st.lists(st.floats(0, 5), max_size=40))
def test_a_bucket_never_gives_more_than_rate_and_burst(gaps: list[float]) -> None:
    now, granted = 0.0, 0
    limiter = RateLimiter(2.0, 5, clock=lambda: now)
    for gap in gaps:
        now += gap
        try:
            limiter.take("k")
            granted += 1
        except LimitError:
            pass
    assert granted <= 5 + 2.0 * now + 1e-6


def test_idempotent_retries_are_replayed_and_charged_once(serve: Callable[..., Service]) -> None:
    service = serve()
    first = service.call("POST", "/v1/search", {"query": "voles"}, Idempotency_Key="k1")
    again = service.call("POST", "/v1/search", {"query": "voles"}, Idempotency_Key="k1")
    assert first[2] == again[2]
    other = service.call("POST", "/v1/search", {"query": "grass"}, Idempotency_Key="k1")
    assert (other[0], other[2]["error"]["code"]) == (409, "conflict")
    assert sum(r["quantity"] for r in service.rows()) == 1


def test_later_pages_of_a_paid_document_are_free(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page(
        "/",
        "<title>V</title>" + "".join(f"<p>{i} Voles live in grass. {'x ' * 40}" for i in range(40)),
    )
    service = serve()
    request = {"url": f"http://public.test:{site.port}/", "max_tokens": 100, "mode": "full"}
    _, _, first = service.call("POST", "/v1/fetch", request)
    offset = first["tokens"]["next_offset"]
    _, _, second = service.call("POST", "/v1/fetch", {**request, "offset": offset})
    assert not second["usage"]["billable"]
    assert sum(r["quantity"] for r in service.rows()) == 1


def test_a_batch_keeps_order_and_charges_each_page_once(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    url = f"http://public.test:{site.port}/"
    service = serve()
    body = {"requests": [{"url": url}, {"url": "http://127.0.0.1/"}, {"url": url}]}
    _, _, answer = service.call("POST", "/v1/fetch/batch", body)
    assert [(r["index"], r["ok"]) for r in answer["results"]] == [(0, True), (1, False), (2, True)]
    assert sum(r["quantity"] for r in service.rows()) == 1
    _, headers, lines = service.call("POST", "/v1/fetch/batch", body, Accept="application/x-ndjson")
    assert headers["content-type"].startswith("application/x-ndjson")
    assert {json.loads(line)["index"] for line in lines.splitlines()} == {0, 1, 2}


def test_an_answer_that_could_not_be_sent_is_not_charged(config: Config) -> None:
    config.home.mkdir(parents=True)
    ledger = Ledger(config.home / "ledger.sqlite3")
    client = AsyncSearchFetch(config)
    client.backend.index([IndexedPage("https://a.example/", "Voles", "Voles " * 50, "2026-01-01")])
    client.backend.commit()
    app = create_app(client, ledger, None)
    body = b'{"query": "voles"}'
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "path": "/v1/search", "raw_path": b"/v1/search", "query_string": b"", "scheme": "http",
        "headers": [(b"content-type", b"application/json")], "server": ("localhost", 80),
        "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip

    async def run(fail: bool) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            if fail and message["type"] == "http.response.body":
                raise OSError("client went away")

        try:
            await app(dict(scope), receive, send)
        except BaseException:
            if not fail:
                raise

    asyncio.run(run(fail=True))
    assert ledger.usage() == []
    asyncio.run(run(fail=False))
    assert sum(int(r["quantity"]) for r in ledger.usage()) == 1
    ledger.close()
    asyncio.run(client.close())


def test_a_killed_process_leaves_exactly_the_rows_it_reported(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from deepinfer_search_fetch.service.metering import Charge, Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "n = 0\n"
        "while True:\n"
        "    ledger.record(Charge(f'r{n}', 'k', 'fetch', 1, False, 1, 1, ''))\n"
        "    n += 1\n"
        "    sys.stdout.write(f'{n}\\n'); sys.stdout.flush()\n"
    )
    file = tmp_path / "ledger.sqlite3"
    process = subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    reported = 0
    while reported < 30:
        reported = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    process.stdout.close()
    process.wait()
    reported = int(rest[-1]) if rest else reported
    ledger = Ledger(file)
    total = sum(int(r["quantity"]) for r in ledger.usage())
    assert total in (reported, reported + 1)
    assert sqlite3.connect(file).execute("PRAGMA integrity_check").fetchone() == ("ok",)
    ledger.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["a", "b"])), max_size=20))
def test_usage_equals_the_rows_however_often_a_charge_is_retried(
    charges: list[tuple[int, str]],
) -> None:
    ledger = Ledger(Path(":memory:"))
    seen: set[tuple[int, str]] = set()
    for number, key in charges:
        new = ledger.record(Charge(f"{key}{number}", key, "search", 1, False, 0, 0, ""))
        assert new is ((number, key) not in seen)
        seen.add((number, key))
    assert sum(int(r["quantity"]) for r in ledger.usage()) == len(set(charges))
    ledger.close()


def test_prices_hold_from_their_day_on_and_a_free_period_is_recorded_at_zero(
    tmp_path: Path,
) -> None:
    prices = (Price("2026-01-01", 5000), Price("2026-10-01", 0), Price("2026-11-01", 7000))
    moments = {"2026-09-30": 5000, "2026-10-17": 0, "2026-11-02": 7000, "2025-01-01": 0}
    from datetime import UTC, datetime

    for day, price in moments.items():
        now = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
        ledger = Ledger(tmp_path / f"{day}.sqlite3", prices, clock=lambda now=now: now)
        ledger.record(Charge("r", "k", "fetch", 1, False, 0, 0, ""))
        assert ledger.usage()[0]["price_micros"] == price
        assert ledger.usage()[0]["quantity"] == 1
        ledger.close()


def test_without_keys_only_loopback_host_names_are_served(serve: Callable[..., Service]) -> None:
    service = serve()
    with socket.create_connection(("127.0.0.1", service.http.port), timeout=10) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: evil.test\r\nConnection: close\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 403")


def test_fetch_by_query_string_takes_the_same_fields(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    url = f"http://public.test:{site.port}/"
    status, _, page = service.call("GET", f"/v1/fetch?url={url}&max_tokens=50&format=text")
    assert (status, page["format"]) == (200, "text")
    assert service.call("GET", f"/v1/fetch?url={url}&nonsense=1")[0] == 422


def test_health_metrics_and_the_try_page(serve: Callable[..., Service]) -> None:
    service = serve()
    assert service.call("GET", "/healthz")[2]["status"] == "ok"
    assert service.call("GET", "/readyz")[2]["documents"] == 1
    assert "search_fetch_index_documents 1" in service.call("GET", "/metrics")[2]
    assert "<form" in service.call("GET", "/")[2]
    assert "/v1/fetch" in service.call("GET", "/openapi.json")[2]["paths"]
