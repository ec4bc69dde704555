from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_harness import FAST, Service, read_reply, request_bytes

from deepinfer_search_fetch.errors import InvalidRequestError, LimitError
from deepinfer_search_fetch.service import answers
from deepinfer_search_fetch.service.metering import GROUPS, Charge, Ledger
from deepinfer_search_fetch.service.settings import Price, ServiceSettings

Listener = Any  # see conftest
TEXT = "<title>Voles</title><p>" + "Voles live in the grass of the meadow. " * 20
VOLES = {"query": "voles"}


def day(text: str) -> float:
    return datetime.fromisoformat(text + "T00:00:00+00:00").timestamp()


def charge(request_id: str, endpoint: Any = "fetch", key: str = "k", **more: Any) -> Charge:
    values = {"quantity": 1, "cache_hit": False, "bytes": 10, "ms": 1, "subject": "", **more}
    return Charge(request_id, key, endpoint, **values)


def test_one_row_per_success_and_none_for_anything_else(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    url = f"http://public.test:{site.port}/"
    service.call("POST", "/v1/fetch", {"url": url})
    service.call("POST", "/v1/search", VOLES)
    nothing = service.call("POST", "/v1/search", {"query": "zzzzqq"})[2]
    assert (nothing["results"], nothing["usage"]["billable"]) == ([], False)
    service.call("POST", "/v1/fetch", {"url": url + "missing"})
    service.call("POST", "/v1/search", {"query": ""})
    assert [(r["endpoint"], r["quantity"], r["price_micros"]) for r in service.ledger.usage()] == [
        ("fetch", 1, 5000),
        ("search", 1, 5000),
    ]
    [row] = service.ledger.read("SELECT * FROM ledger WHERE endpoint = 'fetch'")
    assert 200 in row
    assert service.ledger.read("SELECT COUNT(*) FROM ledger WHERE on_its_way") == [(0,)]


def test_the_price_of_the_day_is_recorded_and_free_periods_cost_zero(tmp_path: Path) -> None:
    prices = (
        Price(effective="2026-02-01", micros_per_call=5_000),  # type: ignore[arg-type]
        Price(effective="2026-03-01", micros_per_call=0),  # type: ignore[arg-type]
        Price(effective="2026-03-08T12:00:00Z", micros_per_call=7_000),  # type: ignore[arg-type]
        Price(effective="2026-04-01", micros_per_call=1, endpoint="search"),  # type: ignore[arg-type]
    )
    now = [0.0]
    ledger = Ledger(tmp_path / "l.sqlite3", prices, clock=lambda: now[0])
    for n, (moment, endpoint) in enumerate(
        [
            ("2026-01-31", "fetch"),
            ("2026-02-01", "fetch"),
            ("2026-03-05", "fetch"),
            ("2026-03-09", "fetch"),
            ("2026-04-02", "search"),
            ("2026-04-02", "fetch"),
        ]
    ):
        now[0] = day(moment)
        assert ledger.record(charge(f"r{n}", endpoint, quantity=2))
        assert not ledger.record(charge(f"r{n}", endpoint))
    sums = {(r["day"], r["endpoint"]): r["price_micros"] for r in
            ledger.usage(group_by=("day", "endpoint"))}  # fmt: skip
    assert list(sums.values()) == [0, 10_000, 0, 14_000, 14_000, 2]
    ledger.close()


def test_a_settings_file_sets_prices_and_names_its_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text(
        "rate_burst = 5\n[[prices]]\neffective = 2026-01-01\nmicros_per_call = 5000\n"
        '[[prices]]\neffective = "2026-12-01"\nmicros_per_call = 0\ncurrency = "USD"\n'.replace(
            "2026-01-01", '"2026-01-01"'
        )
    )
    chosen = ServiceSettings.from_file(file)
    assert [p.micros_per_call for p in chosen.prices] == [5000, 0]
    assert chosen.prices[1].currency == "USD"
    for text, word in (
        ("rate_burst = 0", "rate_burst"),
        ("colour = 1", "colour"),
        ("[[prices]]\neffective = '2026-01-01'\nmicros_per_call = 0.5", "micros_per_call"),
        ("[[prices]]\neffective = '2026-01-01T00:00:00'\nmicros_per_call = 1", "effective"),
        ("[[prices]]\neffective='2026-01-02'\nmicros_per_call=1\n" * 2, "rising"),
        ("not toml", "service.toml"),
    ):
        file.write_text(text)
        with pytest.raises(InvalidRequestError, match=word):
            ServiceSettings.from_file(file)


operations = st.lists(
    st.tuples(
        st.sampled_from(["deliver", "leave", "crash", "again"]),
        st.sampled_from(["search", "fetch"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 3),
        st.integers(0, 40),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None)
@given(work=operations)
def test_sums_equal_the_delivered_answers_exactly(
    work: list[tuple[str, str, str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("ledger") / "l.sqlite3"
    prices = (Price(effective="1970-01-10", micros_per_call=3),)  # type: ignore[arg-type]
    now = [0.0]
    ledger = Ledger(file, prices, clock=lambda: now[0])
    delivered: list[tuple[float, Charge]] = []
    for n, (what, endpoint, key, quantity, days) in enumerate(work):
        now[0] = days * 86_400.0 + n
        due = charge(f"r{n}", endpoint, key, quantity=quantity)
        if what == "again" and delivered:
            ledger.record(delivered[-1][1])
        elif what == "deliver":
            ledger.finish(ledger.begin([due]))
            delivered.append((now[0], due))
        elif what == "leave":
            ledger.void(ledger.begin([due]))
        elif what == "crash":
            ledger.begin([due])
            ledger.close()
            ledger = Ledger(file, prices, clock=lambda: now[0])
            ledger.recover()
    rows = {"quantity": sum(c.quantity for _, c in delivered), "rows": len(delivered)}
    money = sum(3 * c.quantity for t, c in delivered if t >= 9 * 86_400)
    for groups in ((), ("key",), ("endpoint", "day"), GROUPS):
        found = ledger.usage(group_by=groups)
        assert sum(int(r["quantity"]) for r in found) == rows["quantity"]
        assert sum(int(r["rows"]) for r in found) == rows["rows"]
        assert sum(int(r["price_micros"]) for r in found) == money
    for key in ("a", "b"):
        mine = sum(
            c.quantity
            for t, c in delivered
            if c.key_id == key
            and datetime.fromtimestamp(t, UTC).month == datetime.fromtimestamp(now[0], UTC).month
        )
        assert ledger.month_quantity(key) == mine
    ledger.close()


def test_a_ledger_of_another_format_is_refused_and_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "l.sqlite3"
    ledger = Ledger(file)
    ledger.write(("PRAGMA user_version=99", ()))
    ledger.close()
    with pytest.raises(InvalidRequestError, match="format 99"):
        Ledger(file)


def test_quotas_cannot_be_passed_by_requests_at_the_same_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l.sqlite3")
    ledger.reserve("k", 1, 2)
    ledger.reserve("k", 1, 2)
    with pytest.raises(LimitError):
        ledger.reserve("k", 1, 2)
    ledger.release("k", 1)
    ledger.reserve("k", 1, 2)
    ledger.close()


def test_idempotent_retries_are_replayed_and_charged_once(serve: Callable[..., Service]) -> None:
    service = serve()
    first = service.call("POST", "/v1/search", VOLES, Idempotency_Key="k1")
    again = service.call("POST", "/v1/search", VOLES, Idempotency_Key="k1")
    assert first[2] == again[2]
    assert again[1]["idempotency-replayed"] == "true"
    other = service.call("POST", "/v1/search", {"query": "grass"}, Idempotency_Key="k1")
    assert (other[0], other[2]["error"]["code"]) == (409, "conflict")
    assert service.call("POST", "/v1/search", VOLES, Idempotency_Key="x" * 256)[0] == 422
    assert service.billed() == {"search": 1}


def test_retries_that_overlap_wait_and_are_charged_once(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve()
    body = {"url": f"http://public.test:{site.port}/"}
    with ThreadPoolExecutor(6) as pool:
        calls = [
            pool.submit(service.call, "POST", "/v1/fetch", body, Idempotency_Key="same")
            for _ in range(6)
        ]
        answers = {json.dumps(c.result()[2], sort_keys=True) for c in calls}
    assert len(answers) == 1
    assert service.billed() == {"fetch": 1}


def test_a_failed_call_is_not_replayed(serve: Callable[..., Service], site: Listener) -> None:
    service = serve()
    body = {"url": f"http://public.test:{site.port}/later", "max_age": 0}
    site.page("/later", "", status="503 Busy")
    assert service.call("POST", "/v1/fetch", body, Idempotency_Key="k")[0] == 502
    site.page("/later", TEXT)
    assert service.call("POST", "/v1/fetch", body, Idempotency_Key="k")[0] == 200
    assert service.billed() == {"fetch": 1}


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
    assert service.billed() == {"fetch": 1}
    later = service.ledger.clock() + 601
    service.ledger.clock = lambda: later
    _, _, third = service.call("POST", "/v1/fetch", {**request, "offset": offset})
    assert third["usage"]["billable"]
    assert service.billed() == {"fetch": 2}


@pytest.mark.parametrize(("billed", "total"), [(True, 2), (False, 1)])
def test_cache_hits_are_billable_where_the_operator_says_so(
    billed: bool, total: int, serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    service = serve(settings=FAST.model_copy(update={"bill_cache_hits": billed}))
    for _ in range(2):
        service.call("POST", "/v1/fetch", {"url": f"http://public.test:{site.port}/"})
    assert service.billed() == {"fetch": total}


def test_a_batch_keeps_order_and_charges_each_page_once(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", TEXT)
    url = f"http://public.test:{site.port}/"
    service = serve()
    body = {"requests": [{"url": url}, {"url": "http://127.0.0.1/"}, {"url": url}]}
    _, _, answer = service.call("POST", "/v1/fetch/batch", body, Idempotency_Key="b")
    assert [(r["index"], r["ok"]) for r in answer["results"]] == [(0, True), (1, False), (2, True)]
    assert sum(r["response"]["usage"]["quantity"] for r in answer["results"] if r["ok"]) == 1
    assert service.billed() == {"fetch": 1}
    assert service.call("POST", "/v1/fetch/batch", body, Idempotency_Key="b")[2] == answer
    assert service.billed() == {"fetch": 1}
    _, headers, lines = service.call("POST", "/v1/fetch/batch", body, Accept="application/x-ndjson")
    assert headers["content-type"].startswith("application/x-ndjson")
    assert {json.loads(line)["index"] for line in lines.splitlines()} == {0, 1, 2}
    assert service.billed() == {"fetch": 2}


def test_a_client_that_left_before_its_answer_is_not_charged(
    serve: Callable[..., Service], site: Listener
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: socket.socket, _: bytes) -> None:
        entered.set()
        assert leave.wait(20)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + TEXT.encode())

    site.behaviour = slow
    service = serve()
    body = {"url": f"http://public.test:{site.port}/"}
    with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
        connection.sendall(request_bytes("POST", "/v1/fetch", body))
        assert entered.wait(20)
    leave.set()
    site.behaviour = None
    for _ in range(2000):  # the answer that nobody reads is made in the server's own time
        if b" 499" in (text := service.call("GET", "/metrics")[2].encode()) or b'"499"' in text:
            break
    assert 'search_fetch_responses_total{route="/v1/fetch",status="499"} 1.0' in text.decode()
    assert service.billed() == {}


def test_a_client_that_leaves_within_a_large_answer_is_not_charged(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/", "<title>V</title>" + "<p>" + "Voles live in grass. " * 3_000 + "</p>")
    service = serve()
    big = {"requests": [{"url": f"http://public.test:{site.port}/?{i}", "max_tokens": 200_000}
                        for i in range(50)]}  # fmt: skip
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", service.port))
        connection.sendall(request_bytes("POST", "/v1/fetch/batch", big))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    service.close()
    reopened = Ledger(service.client.config.home / "ledger.sqlite3")
    assert reopened.usage() == []
    reopened.close()
    service.ledger = Ledger(service.client.config.home / "ledger.sqlite3")


def test_usage_tells_a_key_its_own_sums_and_the_admin_everything(
    serve: Callable[..., Service],
) -> None:
    service = serve(auth=True)
    assert service.keys is not None
    mine, key = service.keys.create("mine")
    other, _ = service.keys.create("other")
    admin, _ = service.keys.create("admin", ["admin"])
    for secret in (mine, mine, other):
        service.call("POST", "/v1/search", VOLES, x_api_key=secret)
    own = service.call("GET", "/v1/usage", x_api_key=mine)[2]
    assert [(r["key_id"], r["quantity"]) for r in own["usage"]] == [(key.id, 2)]
    everything = service.call("GET", "/v1/usage?group_by=endpoint,day", x_api_key=admin)[2]
    [total] = everything["totals"]
    assert (total["quantity"], total["price_micros"], total["currency"]) == (3, 15_000, "CNY")
    assert sum(r["quantity"] for r in everything["usage"]) == 3
    assert set(everything["usage"][0]) >= {"endpoint", "day", "rows", "cache_hits", "bytes"}
    past = service.call("GET", "/v1/usage?from=2020-01-01&to=2021-01-01T00:00:00Z", x_api_key=mine)
    assert past[2]["usage"] == []
    assert (past[2]["since"], past[2]["until"]) == (
        "2020-01-01T00:00:00.000Z",
        "2021-01-01T00:00:00.000Z",
    )


def test_a_reply_read_to_its_end_has_its_row(serve: Callable[..., Service]) -> None:
    service = serve()
    for n in range(1, 30):
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(request_bytes("POST", "/v1/search", VOLES))
            assert read_reply(connection).whole
        assert service.billed() == {"search": n}


def test_an_answer_that_fails_after_its_price_is_known_costs_nothing(
    serve: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve(auth=True)
    assert service.keys is not None
    secret, _ = service.keys.create("me")

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(answers, "Response", broken)
    status, _, answer = service.call(
        "POST", "/v1/search", {"query": "voles"}, Authorization=f"Bearer {secret}"
    )
    assert (status, answer["error"]["code"]) == (500, "internal")
    assert service.billed() == {}
