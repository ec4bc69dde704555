"""Cost in the usage of every protocol, and exactly one row for each answer that went out whole."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sqlite3

import httpx
import pytest
from server_fakes import FakeClock, FakeEngine, Script, byte_codec

from deepinfer_engine.errors import ConfigError, EngineLost
from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.ledger import read_usage
from deepinfer_engine.server.prices import PICOS
from deepinfer_engine.settings import Settings

ASK = [{"role": "user", "content": "hi"}]
OFF = {"thinking": {"type": "disabled"}}
PEAK = dt.datetime(2026, 11, 30, 2, tzinfo=dt.UTC).timestamp()
ROUTES = {
    "/v1/chat/completions": {"messages": ASK, **OFF},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 99},
}


class Served:
    """An app with prices and a ledger, over an engine that says what a script tells it."""

    def __init__(self, tmp_path, script, **settings):
        self.path = tmp_path / "ledger.db"
        keys = tmp_path / "keys"
        keys.write_text("ana:the-key-of-ana-01234\nben:the-key-of-ben-01234\n")
        admin = tmp_path / "admin"
        admin.write_text("the-key-of-the-admin\n")
        settings = {
            "prices": "published", "priced_as": "deepseek-flash", "ledger": self.path,
            "api_key_file": keys, "admin_key_file": admin, **settings,
        }  # fmt: skip
        self.engine, self.clock = FakeEngine(script), FakeClock()
        self.app = create_app(
            self.engine, byte_codec(), Settings(**settings), clock=self.clock, wall=lambda: PEAK
        )

    def ask(self, *requests, key="ana"):
        """One after the other; the ledger is closed behind them."""
        headers = {"authorization": f"Bearer the-key-of-{key}-01234"}

        async def go():
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost", headers=headers
            ) as client:
                replies = [await client.request(*r[:2], **r[2]) for r in requests]
            self.app.state.services.close()
            return replies

        return asyncio.run(go())

    def rows(self):
        with sqlite3.connect(self.path) as db:
            db.row_factory = sqlite3.Row
            return [dict(row) for row in db.execute("SELECT * FROM answers")]


@pytest.fixture
def speak():
    ids = byte_codec().tokenize("hello there")
    return Script([ids[i : i + 2] for i in range(0, len(ids), 2)] + [[1]], cached=1)


def post(path, **body):
    return ("POST", path, {"json": {"model": "toy", **ROUTES[path], **body}})


def events(reply):
    lines = [x for x in reply.text.splitlines() if x.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def usage_of(path, value):
    return (
        value["response"]["usage"]
        if path == "/v1/responses" and "response" in value
        else value["usage"]
    )


def counts(path, usage):
    """Prompt, cached and output tokens as the client reads them."""
    if path == "/v1/messages":
        hit = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + hit, hit, usage["output_tokens"]
    if path == "/v1/responses":
        return (
            usage["input_tokens"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens"],
        )
    return (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_usage_tells_the_cost_and_the_ledger_holds_the_same(tmp_path, speak, path, stream):
    more = {"stream": stream}
    if stream and path in ("/v1/chat/completions", "/v1/completions"):
        more["stream_options"] = {"include_usage": True}
    served = Served(tmp_path, speak)
    (reply,) = served.ask(post(path, **more))
    assert reply.status_code == 200, reply.text
    if stream:
        told = [value for value in events(reply) if "cost" in json.dumps(value)]
        assert len(told) == 1
        usage = usage_of(path, told[0])
    else:
        usage = usage_of(path, reply.json())
    (row,) = served.rows()
    prompt, cached, output = counts(path, usage)
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (
        prompt, cached, output,
    )  # fmt: skip
    assert cached == 1
    assert prompt > 1
    picos = cached * 6_000 + (prompt - cached) * 300_000 + output * 1_200_000
    assert row["cost_picos"] == picos
    assert usage["cost"] == f"{picos / PICOS:.12f}".rstrip("0")
    assert usage["cost_currency"] == "USD"
    assert (row["key"], row["period"], row["state"], row["model"]) == ("ana", "peak", 1, "toy")
    ids = {v["id"] for v in ([reply.json()] if not stream else events(reply)) if "id" in v}
    assert path in ("/v1/responses", "/v1/messages") or ids == {row["id"]}


def test_a_stream_that_tells_no_usage_is_counted_by_the_engine(tmp_path, speak):
    served = Served(tmp_path, speak)
    served.ask(post("/v1/chat/completions", stream=True))
    (row,) = served.rows()
    assert row["output_tokens"] == len(b"hello there") + 1
    assert row["prompt_tokens"] == len(served.engine.requests[0].token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_to_a_prompt_pay_for_it_once(tmp_path, speak, stream):
    served = Served(tmp_path, speak)
    (reply,) = served.ask(
        post("/v1/chat/completions", n=3, stream=stream, stream_options={"include_usage": True})
        if stream
        else post("/v1/chat/completions", n=3)
    )
    (row,) = served.rows()
    assert row["prompt_tokens"] == len(served.engine.requests[0].token_ids)
    assert row["output_tokens"] == 3 * (len(b"hello there") + 1)
    assert '"cost":' in reply.text


def test_what_fails_or_is_refused_has_no_row(tmp_path):
    ids = byte_codec().tokenize("hello")
    served = Served(tmp_path, Script([ids, ids], raise_at=(1, EngineLost("gone"))))
    replies = served.ask(
        post("/v1/chat/completions"),
        post("/v1/chat/completions", stream=True),
        post("/v1/chat/completions", temperature="hot"),
        ("GET", "/v1/models", {}),
    )
    assert [r.status_code for r in replies] == [500, 200, 400, 200]
    assert "gone" in replies[1].text
    assert served.rows() == []


def test_an_answer_whose_row_cannot_be_written_does_not_end(tmp_path, speak):
    served = Served(tmp_path, speak)
    ledger = served.app.state.services.billing.ledger
    ledger._db.execute("DROP TABLE answers")
    replies = served.ask(post("/v1/chat/completions"), post("/v1/chat/completions", stream=True))
    assert replies[0].status_code == 503
    assert "cannot be recorded" in replies[0].json()["error"]["message"]
    assert "cannot be recorded" in replies[1].text
    assert "[DONE]" not in replies[1].text
    assert ledger.failures == 2


def test_a_key_sees_its_own_usage_and_the_admin_all(tmp_path, speak):
    served = Served(tmp_path, speak)
    ben = {"authorization": "Bearer the-key-of-ben-01234"}
    admin = {"authorization": "Bearer the-key-of-the-admin"}
    chat = post("/v1/chat/completions")
    replies = served.ask(
        chat,
        chat,
        (*chat[:2], {**chat[2], "headers": ben}),
        ("GET", "/v1/usage", {}),
        ("GET", "/v1/usage?by=key,day", {"headers": ben}),
        ("GET", "/v1/usage", {"headers": admin}),
        ("GET", "/v1/usage?until=2026-11-30T02:00Z", {"headers": admin}),
        ("GET", "/v1/usage?by=secret", {}),
        ("GET", "/v1/usage?since=soon", {}),
        ("GET", "/v1/usage", {"headers": {"authorization": "Bearer nobody"}}),
    )
    own, bens, everybody, before, *wrong = (reply for reply in replies[3:])
    assert [(r["key"], r["answers"]) for r in own.json()["data"]] == [("ana", 2)]
    assert [(r["key"], r["day"]) for r in bens.json()["data"]] == [("ben", "2026-11-30")]
    assert [(r["key"], r["answers"]) for r in everybody.json()["data"]] == [("ana", 2), ("ben", 1)]
    assert before.json()["data"] == []
    assert [reply.status_code for reply in wrong] == [400, 400, 401]
    total = sum(row["cost_picos"] for row in served.rows())
    assert total == sum(row.cost_picos for row in read_usage(served.path))


def test_without_prices_and_ledger_nothing_is_told(tmp_path, speak):
    served = Served(tmp_path, speak, prices=None, priced_as=None, ledger=None)
    chat, usage = served.ask(post("/v1/chat/completions"), ("GET", "/v1/usage", {}))
    assert "cost" not in chat.text
    assert usage.status_code == 404
    assert "--ledger" in usage.json()["error"]["message"]
    with pytest.raises(ConfigError, match="--prices"):
        Served(tmp_path, speak, prices=None, ledger=None)
    with pytest.raises(ConfigError, match="'toy' is not in the table"):
        Served(tmp_path, speak, priced_as=None)


@pytest.mark.parametrize("has_it", [False, True])
def test_a_client_that_leaves_has_a_row_if_it_has_the_whole_answer(tmp_path, speak, has_it):
    """The connection breaks with the last part, when the row is written already, or behind it."""
    served = Served(tmp_path, speak)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"authorization", b"Bearer the-key-of-ana-01234")],
        "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "root_path": "",
    }  # fmt: skip
    body = json.dumps({"model": "toy", "stream": True, **ROUTES["/v1/chat/completions"]}).encode()
    seen = []

    async def go():
        leaves = asyncio.Event()

        async def receive():
            if not seen:
                seen.append("body")
                return {"type": "http.request", "body": body, "more_body": False}
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if b"[DONE]" in message.get("body", b""):
                seen.append(len(served.rows()))
                if not has_it:
                    raise OSError("broken pipe")
                leaves.set()
                await asyncio.sleep(0)

        await served.app(scope, receive, send)
        served.app.state.services.close()

    asyncio.run(go())
    assert seen == ["body", 1]
    assert [row["state"] for row in served.rows()] == [1] * has_it
    metrics = served.app.state.services.metrics
    told = {"deepinfer_requests_total": float(has_it), "deepinfer_aborts_total": float(not has_it)}
    for name, value in told.items():
        samples = [s for m in metrics.registry.collect() for s in m.samples if s.name == name]
        assert sum(s.value for s in samples) == value, name
