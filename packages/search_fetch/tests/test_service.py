from __future__ import annotations

import gc
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from service_harness import FAST, Service, read_reply, request_bytes

from deepinfer_search_fetch import Config
from deepinfer_search_fetch.errors import InvalidRequestError, RefusedError
from deepinfer_search_fetch.service import run
from deepinfer_search_fetch.service.auth import KeyStore
from deepinfer_search_fetch.service.ratelimit import RateLimiter
from deepinfer_search_fetch.service.settings import ServiceSettings

Listener = Any  # see conftest
TEXT = "<title>Voles</title><p>" + "Voles live in the grass of the meadow. " * 20


def test_fetch_and_search_answer_with_the_common_headers(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    url = f"http://public.test:{site.port}/"
    status, headers, page = service.call("POST", "/v1/fetch", {"url": url})
    assert (status, page["title"], page["usage"]["billable"]) == (200, "Voles", True)
    assert headers["cache-control"] == "no-store"
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert headers["x-request-id"]
    assert service.call("GET", f"/v1/fetch?url={url}&mode=fast")[2]["title"] == "Voles"
    status, _, found = service.call("POST", "/v1/search", {"query": "voles"}, X_Request_Id="mine-1")
    assert (status, len(found["results"])) == (200, 1)
    assert _["x-request-id"].startswith("mine-1-")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/fetch", {"url": "http://127.0.0.1/"}, 403, "blocked_address"),
        ("POST", "/v1/fetch", {"url": "http://a@b.example/"}, 400, "invalid_url"),
        ("POST", "/v1/fetch", {"url": "file:///etc/passwd"}, 403, "blocked_scheme"),
        ("POST", "/v1/fetch", {"url": "http://a.example/", "headers": {}}, 422, "invalid_argument"),
        ("POST", "/v1/fetch", {"url": "http://nowhere.example/"}, 502, "dns_failure"),
        ("POST", "/v1/fetch", b"{", 422, "invalid_argument"),
        ("POST", "/v1/fetch", b"\xff\xfe", 422, "invalid_argument"),
        ("POST", "/v1/fetch", None, 422, "invalid_argument"),
        ("GET", "/v1/fetch", None, 422, "invalid_argument"),
        ("POST", "/v1/fetch/batch", {"requests": []}, 422, "invalid_argument"),
        ("POST", "/v1/search", {"query": " "}, 422, "invalid_argument"),
        ("POST", "/v1/search", {"query": "x", "count": 51}, 422, "invalid_argument"),
        ("POST", "/v1/search", {"query": "x" * 2**20}, 413, "response_too_large"),
        ("GET", "/v1/usage?from=yesterday", None, 422, "invalid_argument"),
        ("GET", "/v1/usage?group_by=colour", None, 422, "invalid_argument"),
        ("GET", "/nope", None, 404, "not_found"),
        ("PUT", "/v1/fetch", None, 405, "invalid_argument"),
        ("DELETE", "/v1/usage", None, 405, "invalid_argument"),
    ],
)  # fmt: skip
def test_every_error_has_the_same_body(
    method: str, path: str, body: Any, status: int, code: str, serve: Callable[..., Service]
) -> None:
    found, headers, answer = serve().call(method, path, body)
    assert (found, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"code", "message", "type", "retryable", "request_id", "details"}
    assert answer["error"]["request_id"] == headers["x-request-id"]
    assert headers["content-type"] == "application/json; charset=utf-8"
    assert ("allow" in headers) == (status == 405)


@pytest.mark.parametrize(
    "sent",
    [
        b"NOT HTTP AT ALL\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header line\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00 a TLS greeting\r\n\r\n",
        b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3, 4\r\n\r\nabc",
    ],
)
def test_what_is_no_http_gets_the_same_error_body(
    sent: bytes, serve: Callable[..., Service]
) -> None:
    service = serve()
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(sent)
        reply = read_reply(connection)
    assert (reply.status, reply.whole) == (400, True)
    assert reply.headers["content-type"] == "application/json; charset=utf-8"
    assert reply.headers["cache-control"] == "no-store"
    error = reply.json["error"]
    assert set(error) == {"code", "message", "type", "retryable", "request_id", "details"}
    assert error["code"] == "invalid_argument"
    assert error["request_id"] == reply.headers["x-request-id"]
    assert service.call("GET", "/healthz")[0] == 200


def test_errors_name_the_field_that_is_wrong(serve: Callable[..., Service]) -> None:
    service = serve()
    for method, path, body, field in (
        ("POST", "/v1/search", {"query": 5}, "query"),
        ("POST", "/v1/tools/search", {"query": 5}, "query"),
        ("GET", "/v1/fetch?url=http://a.example/&mode=best", None, "mode"),
        ("POST", "/v1/fetch/batch", {"requests": [{"url": ""}]}, "requests.0.url"),
    ):
        error = service.call(method, path, body)[2]["error"]
        assert error["details"]["problems"][0]["field"] == field
        assert error["message"].startswith(f"{field}: ")


def test_a_body_without_a_declared_length_is_cut_off_at_the_limit(
    serve: Callable[..., Service],
) -> None:
    service = serve(settings=FAST.model_copy(update={"max_body_bytes": 2000}))
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        head = request_bytes("POST", "/v1/search", Transfer_Encoding="chunked")
        connection.sendall(head.removesuffix(b"0\r\n\r\n"))
        for _ in range(3):
            connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        reply = read_reply(connection)
    assert (reply.status, reply.json["error"]["code"]) == (413, "response_too_large")


def test_a_body_that_never_ends_is_given_up(serve: Callable[..., Service]) -> None:
    service = serve(settings=FAST.model_copy(update={"body_seconds": 0.2}))
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(request_bytes("POST", "/v1/search", b" " * 50)[:-1])
        reply = read_reply(connection)
    assert (reply.status, reply.json["error"]["code"]) == (408, "timeout")


def test_a_bug_becomes_a_500_that_tells_nothing(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = serve()

    async def broken(_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(service.client, "search", broken)
    for path in ("/v1/search", "/v1/tools/search"):
        status, headers, answer = service.call("POST", path, {"query": "voles"})
        assert (status, answer["error"]["code"]) == (500, "internal")
        assert "secret detail" not in json.dumps(answer)
        assert headers["x-request-id"] in caplog.text
    assert service.billed() == {}


def test_keys_scopes_and_quota_are_enforced(serve: Callable[..., Service]) -> None:
    service = serve(auth=True)
    body = {"query": "voles"}
    status, headers, _ = service.call("POST", "/v1/search", body)
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert service.call("POST", "/v1/search", body, Authorization="Bearer sk-wrong")[0] == 401
    assert service.keys is not None
    fetch_only, _ = service.keys.create("f", ["fetch"])
    assert service.call("POST", "/v1/search", body, x_api_key=fetch_only)[0] == 403
    assert service.call("GET", "/v1/usage", x_api_key=fetch_only)[0] == 200
    assert service.call("GET", "/v1/usage")[0] == 401
    secret, key = service.keys.create("s", ["search"], monthly_quota=1)
    assert service.call("POST", "/v1/search", body, Authorization=f"Bearer {secret}")[0] == 200
    assert service.call("POST", "/v1/search", body, x_api_key=secret)[0] == 402
    again = {"x_api_key": secret, "Idempotency_Key": "n"}
    assert service.call("POST", "/v1/search", body, **again)[0] == 402
    assert service.keys.revoke(key.id)
    assert service.call("POST", "/v1/search", body, x_api_key=secret)[0] == 401


def test_the_answer_that_used_the_quota_up_can_be_asked_for_again(
    serve: Callable[..., Service],
) -> None:
    service = serve(auth=True)
    assert service.keys is not None
    secret, _ = service.keys.create("s", ["search"], monthly_quota=1)
    headers = {"x_api_key": secret, "Idempotency_Key": "once"}
    first = service.call("POST", "/v1/search", {"query": "voles"}, **headers)
    again = service.call("POST", "/v1/search", {"query": "voles"}, **headers)
    assert (first[0], again[0], again[2]) == (200, 200, first[2])
    assert again[1]["idempotency-replayed"] == "true"
    assert service.billed() == {"search": 1}


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


def test_without_keys_only_loopback_names_and_origins_are_served(
    serve: Callable[..., Service],
) -> None:
    service, body = serve(), {"query": "voles"}
    assert service.call("POST", "/v1/search", body, Host="rebind.example")[0] == 403
    assert service.call("POST", "/v1/search", body, Origin="https://evil.example")[0] == 403
    assert service.call("POST", "/v1/search", body, Origin="null")[0] == 403
    assert service.call("POST", "/v1/search", body, Origin="http://localhost:3000")[0] == 200
    assert service.call("POST", "/v1/search", body, Host="[::1]:80")[0] == 200


def test_the_rate_limit_answers_429_and_tells_where_a_key_stands(
    serve: Callable[..., Service],
) -> None:
    service = serve(settings=ServiceSettings(rate_per_second=0.001, rate_burst=2))
    answers = [service.call("POST", "/v1/search", {"query": "voles"}) for _ in range(3)]
    assert [a[0] for a in answers] == [200, 200, 429]
    assert [a[1]["x-ratelimit-remaining"] for a in answers] == ["1", "0", "0"]
    assert {a[1]["x-ratelimit-limit"] for a in answers} == {"2"}
    assert int(answers[2][1]["retry-after"]) > 0
    assert int(answers[2][1]["x-ratelimit-reset"]) >= int(answers[2][1]["retry-after"])
    assert service.billed() == {"search": 2}


@given(st.lists(st.floats(0, 5), max_size=40))
def test_a_bucket_never_gives_more_than_rate_and_burst(gaps: list[float]) -> None:
    now, granted = 0.0, 0
    limiter = RateLimiter(2.0, 5, clock=lambda: now)
    for gap in gaps:
        now += gap
        standing = limiter.take("k")
        granted += not standing.retry_after
        assert 0 <= standing.remaining <= 5
    assert granted <= 5 + 2.0 * now + 1e-6


def test_requests_over_the_global_limit_are_told_to_wait(
    serve: Callable[..., Service], site: Listener
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: socket.socket, _: bytes) -> None:
        entered.set()
        assert leave.wait(20)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<p>done")

    site.behaviour = slow
    service = serve(settings=FAST.model_copy(update={"max_concurrent": 1}))
    url = f"http://public.test:{site.port}/"
    waiting = threading.Thread(target=service.call, args=("POST", "/v1/fetch", {"url": url}))
    waiting.start()
    assert entered.wait(20)
    status, headers, answer = service.call("POST", "/v1/search", {"query": "voles"})
    health = service.call("GET", "/healthz")[0]
    leave.set()
    waiting.join()
    assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "rate_limited", "1")
    assert health == 200
    assert service.call("POST", "/v1/search", {"query": "voles"})[0] == 200


def test_metrics_name_routes_failures_rows_and_latencies(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    url = f"http://public.test:{site.port}/"
    for body in ({"url": url}, {"url": url}, {"url": "http://127.0.0.1/"}):
        service.call("POST", "/v1/fetch", body)
    service.call("POST", "/v1/search", {"query": "voles"})
    service.call("GET", "/nope/secret-path")
    text = service.call("GET", "/metrics")[2]
    for line in (
        'search_fetch_responses_total{route="/v1/fetch",status="200"} 2.0',
        'search_fetch_responses_total{route="unknown",status="404"} 1.0',
        'search_fetch_fetches_total{result="ok"} 2.0',
        'search_fetch_fetches_total{result="blocked_address"} 1.0',
        'search_fetch_cache_total{result="hit"} 1.0',
        'search_fetch_ledger_rows_total{endpoint="fetch"} 2.0',
        "search_fetch_search_seconds_count 1.0",
        "search_fetch_index_documents 1.0",
    ):
        assert line in text
    assert "secret-path" not in text


def test_logs_hold_neither_keys_nor_queries_nor_content(
    serve: Callable[..., Service], site: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    site.page("/private-path", TEXT)
    caplog.set_level(logging.DEBUG)
    service = serve(auth=True)
    assert service.keys is not None
    secret, key = service.keys.create("me")
    url = f"http://public.test:{site.port}/private-path"
    service.call("POST", "/v1/search", {"query": "voles unusualword"}, x_api_key=secret)
    service.call("POST", "/v1/fetch", {"url": url}, Authorization=f"Bearer {secret}")
    lines = caplog.text
    assert key.id in lines
    for hidden in (secret, "unusualword", "private-path", "meadow"):
        assert hidden not in lines


def test_the_drop_in_routes_have_the_public_fields_limits_and_statuses(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    search = lambda **b: service.call("POST", "/v1/tools/search", b)  # noqa: E731
    fetch = lambda **b: service.call("POST", "/v1/tools/fetch", b)  # noqa: E731
    _, _, found = search(query="voles", model="ignored", ori_question=None, localization="1.2.3.4")
    assert set(found) == {"results"}
    [hit] = found["results"]
    assert set(hit) == {
        "title", "url", "snippet", "summary", "content", "rerank_score", "authority", "date",
        "site_name", "site_icon",
    }  # fmt: skip
    assert hit["content"] == ""
    assert 0 <= hit["rerank_score"] <= 3
    assert isinstance(hit["authority"], int)
    assert -1 <= hit["authority"] <= 4
    assert len(hit["snippet"]) <= 200
    assert "Voles" in search(query="voles", need_content=True)[2]["results"][0]["content"]
    assert search(query="x" * 128)[0] == 200
    for bad in (
        {"query": "x" * 129}, {"query": " "}, {"query": ""}, {}, {"query": "x", "count": 0},
        {"query": "x", "count": 51}, {"query": "x", "localization": "en-US"},
        {"query": "x", "ori_question": "y" * 129},
    ):  # fmt: skip
        status, _, answer = search(**bad)
        assert (status, answer["error"]["code"]) == (400, "invalid_argument")
    url = f"http://public.test:{site.port}/"
    assert set(fetch(url=url, extra=1)[2]) == {"title", "content"}
    for bad_url, wanted in (
        ("http://user:pw@public.test/", 400), ("ftp://public.test/", 404), ("", 400),
        ("x" * 8193, 400), (url + "missing", 404), ("http://127.0.0.1/", 404),
        ("http://nowhere.example/", 404),
    ):  # fmt: skip
        assert fetch(url=bad_url)[0] == wanted
    assert service.billed() == {"search": 2, "fetch": 1}


def test_what_is_too_fast_is_refused_before_its_body_is_read(serve: Callable[..., Service]) -> None:
    service = serve(auth=True, settings=ServiceSettings(rate_per_second=0.001, rate_burst=1))
    assert service.keys is not None
    secret, _ = service.keys.create("me")
    bearer = {"Authorization": f"Bearer {secret}"}
    status, headers, _ = service.call("GET", "/no/such/route", **bearer)
    assert (status, headers["x-ratelimit-remaining"]) == (404, "0")
    unfinished = request_bytes("POST", "/v1/search", b"{" * 100, **bearer)[:-99]
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(unfinished)
        reply = read_reply(connection)
    assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limited")


def test_what_stands_at_the_start_is_no_work_for_later_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, left = list[int](), list[int]()

    async def serve_nothing(server: uvicorn.Server) -> None:
        assert server.started
        frozen.append(gc.get_freeze_count())
        left.append(len(gc.get_objects()))
        server.should_exit = True

    monkeypatch.setattr(uvicorn.Server, "main_loop", serve_nothing)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    before = gc.get_freeze_count(), sys.getswitchinterval()
    try:
        config = Config(home=tmp_path / "home")
        run.run_service(config, ServiceSettings(), "127.0.0.1", 0, with_keys=False)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before[1])
    assert frozen[0] > before[0] + 1000
    assert left[0] < 5000, "what the application made when it started"


def test_what_is_written_to_a_connection_is_sent_at_once() -> None:
    """Else a body waits 40 ms for the acknowledgement of its headers."""
    with (
        run.bind("127.0.0.1", 0) as listening,
        socket.create_connection(listening.getsockname(), timeout=30),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
