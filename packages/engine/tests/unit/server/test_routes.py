"""Routes that answer at once, identifiers, and the error table of both protocols."""

from __future__ import annotations

import json
import threading

import pytest
from server_fakes import Script

from deepinfer_engine.codec import errors as wire
from deepinfer_engine.errors import (
    CapacityError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    UnknownModel,
)
from deepinfer_engine.router.client import WorkerStatus

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
MESSAGES = {"model": "toy", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
BOTH = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES)],
    ids=["chat", "messages"],
)


@pytest.mark.parametrize(
    ("error", "chat", "messages"),
    [
        (
            wire.InvalidRequest("x"),
            (400, "invalid_request_error", "invalid_value"),
            (400, "invalid_request_error"),
        ),
        (
            PromptTooLong(9, 5),
            (400, "invalid_request_error", "context_length_exceeded"),
            (400, "invalid_request_error"),
        ),
        (
            CapacityError("x"),
            (400, "invalid_request_error", "context_length_exceeded"),
            (400, "invalid_request_error"),
        ),
        (
            wire.AuthenticationFailed("x"),
            (401, "authentication_error", "invalid_api_key"),
            (401, "authentication_error"),
        ),
        (
            wire.PermissionDenied("x"),
            (403, "permission_error", "permission_denied"),
            (403, "permission_error"),
        ),
        (
            UnknownModel("m", ("toy",)),
            (404, "invalid_request_error", "model_not_found"),
            (404, "not_found_error"),
        ),
        (
            wire.BodyTooLarge("x"),
            (413, "invalid_request_error", "request_too_large"),
            (413, "request_too_large"),
        ),
        (
            wire.LimitExceeded("x"),
            (429, "rate_limit_error", "rate_limit_exceeded"),
            (429, "rate_limit_error"),
        ),
        (EngineLost("x"), (500, "server_error", "internal_error"), (500, "api_error")),
        (EngineUnavailable("x"), (503, "server_error", "overloaded"), (529, "overloaded_error")),
        (wire.Draining("x"), (503, "server_error", "overloaded"), (529, "overloaded_error")),
        (TimeoutError("x"), (504, "server_error", "timeout"), (504, "timeout_error")),
        (KeyError("secret path"), (500, "server_error", "internal_error"), (500, "api_error")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_row_of_the_table_in_both_protocols(error, chat, messages):
    told = wire.wire_error(error, "chat", "r1")
    inner = told.body["error"]
    assert (told.status, inner["type"], inner["code"]) == chat
    assert set(inner) == {"message", "type", "param", "code"}
    told = wire.wire_error(error, "messages", "r1")
    assert (told.status, told.body["error"]["type"]) == messages
    assert told.body["type"] == "error"
    assert told.body["request_id"] == "r1"
    assert "secret" not in told.json


def test_overload_and_limits_say_when_to_come_back():
    for error in (EngineUnavailable("x", 2.4), wire.LimitExceeded("x", 0.1), wire.Draining("x", 5)):
        assert int(wire.wire_error(error, "chat", "r").headers["Retry-After"]) >= 1
    assert wire.wire_error(EngineUnavailable("x", 2.4), "chat", "r").headers["Retry-After"] == "3"
    assert wire.wire_error(wire.Draining("x"), "chat", "r").headers["Connection"] == "close"


@BOTH
def test_an_unknown_model_is_404_and_names_the_served_ones(request_json, path, body):
    reply = request_json(Script(), "POST", path, json={**body, "model": "gpt-9"})
    assert reply.status_code == 404
    assert "toy" in reply.json()["error"]["message"]


@BOTH
@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"", b"\xff", b'{"model": "toy"}', b'{"model": 3, "messages": []}']
)
def test_a_broken_body_is_400_in_the_protocols_shape(request_json, path, body, raw):
    reply = request_json(Script(), "POST", path, content=raw)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert ("request_id" in reply.json()) == (path == "/v1/messages")


@BOTH
def test_a_prompt_over_the_context_is_400_with_both_numbers(request_json, path, body):
    long = {**body, "messages": [{"role": "user", "content": "x" * 5000}]}
    reply = request_json(Script(), "POST", path, json=long)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "4096" in message or "4095 maximum" in message
    assert any(int(word) >= 5000 for word in message.replace("(", " ").split() if word.isdigit())


@BOTH
def test_a_body_over_the_limit_is_413_whether_declared_or_not(request_json, path, body):
    settings = {"max_body_bytes": 1024}
    declared = request_json(Script(), "POST", path, content=b"x" * 2000, settings=settings)

    async def parts():
        for _ in range(20):
            yield b"x" * 100

    counted = request_json(Script(), "POST", path, content=parts(), settings=settings)
    assert declared.status_code == counted.status_code == 413


@BOTH
def test_a_request_id_is_echoed_or_made(request_json, path, body):
    reply = request_json(Script(), "POST", path, content=b"{", headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    reply = request_json(Script(), "POST", path, content=b"{", headers={"x-request-id": "a b"})
    assert reply.headers["x-request-id"].startswith("req_")
    assert ("request-id" in reply.headers) == (path == "/v1/messages")
    if path == "/v1/messages":
        assert reply.json()["request_id"] == reply.headers["request-id"]


def test_keys_are_wanted_where_a_key_file_is_set(request_json, say, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice: s3cret\n")
    settings = {"api_key_file": keys}
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES)):
        assert request_json(say("x"), "POST", path, json=body, settings=settings).status_code == 401
        good = {"x-api-key": "s3cret"}
        reply = request_json(say("x"), "POST", path, json=body, settings=settings, headers=good)
        assert reply.status_code == 200
    for path in ("/v1/models", "/v1/models/toy"):
        assert request_json(Script(), "GET", path, settings=settings).status_code == 401
    for path in ("/health", "/health/live", "/metrics", "/version"):
        assert request_json(Script(), "GET", path, settings=settings).status_code == 200


def test_models_in_both_shapes(request_json):
    listed = request_json(Script(), "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "toy"
    assert listed["data"][0]["max_model_len"] == 4096
    header = {"anthropic-version": "2023-06-01"}
    listed = request_json(Script(), "GET", "/v1/models", headers=header).json()
    assert listed["data"][0] == {
        "type": "model",
        "id": "toy",
        "display_name": "toy",
        "created_at": "2023-11-14T22:13:20Z",
    }
    assert request_json(Script(), "GET", "/v1/models/toy").json()["object"] == "model"
    assert request_json(Script(), "GET", "/v1/models/nope").status_code == 404


def test_unknown_routes_and_methods_have_the_protocols_error_body(request_json):
    reply = request_json(Script(), "GET", "/v1/nothing")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    reply = request_json(Script(), "GET", "/v1/messages")
    assert (reply.status_code, reply.json()["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("workers", "status"),
    [
        ([("single", True)], 200),
        ([("prefill", True), ("decode", True)], 200),
        ([("prefill", True), ("decode", False)], 503),
        ([("prefill", True)], 503),
        ([], 503),
    ],
)
def test_ready_means_a_request_could_be_served(make_app, workers, status):
    import asyncio

    import httpx

    async def go():
        app, engine, _ = make_app(Script())
        engine.workers = [
            WorkerStatus(f"w{i}", role, ready) for i, (role, ready) in enumerate(workers)
        ]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            replies = [(await client.get(p)) for p in ("/health", "/health/ready", "/health/live")]
            app.state.services.gate.draining = True
            drained = await client.get("/health/ready")
        return [reply.status_code for reply in replies], drained

    codes, drained = asyncio.run(go())
    assert codes == [status, status, 200]
    assert drained.status_code == 503
    assert drained.json()["status"] in ("draining",)


def test_tokenize_and_back(request_json, codec):
    reply = request_json(Script(), "POST", "/tokenize", json={"prompt": "héllo"}).json()
    assert reply == {"count": 6, "max_model_len": 4096, "tokens": codec.tokenize("héllo")}
    back = request_json(Script(), "POST", "/detokenize", json={"tokens": reply["tokens"]}).json()
    assert back == {"prompt": "héllo"}
    chat = request_json(Script(), "POST", "/tokenize", json={"messages": CHAT["messages"]}).json()
    assert chat["tokens"][0] == 0
    assert chat["count"] == len(chat["tokens"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": "abc"}),
        ("/detokenize", {"tokens": [True]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"prompt": "\ud800"}),
    ],
)
def test_wrong_tokenizer_bodies_are_400(request_json, path, body):
    assert request_json(Script(), "POST", path, content=json.dumps(body)).status_code == 400


def test_a_long_text_is_tokenised_beside_the_event_loop(request_json, codec, monkeypatch):
    threads = []

    def tokenize(self, text, *, tokenising):
        threads.append(threading.current_thread())
        return [1]

    monkeypatch.setattr(type(codec), "tokenize", tokenize)
    request_json(Script(), "POST", "/tokenize", json={"prompt": "a" * 100_000})
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_body_nested_too_deeply_is_400(request_json, path):
    reply = request_json(Script(), "POST", path, content="[" * 100_000)
    assert reply.status_code == 400
    assert "nested" in reply.json()["error"]["message"]


def test_count_tokens_equals_the_prompt_that_would_be_sent(make_app, say):
    import asyncio

    import httpx

    async def go():
        app, engine, _ = make_app(say("ok"))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            count = await client.post("/v1/messages/count_tokens", json=MESSAGES)
            await client.post("/v1/messages", json=MESSAGES)
        return count.json(), len(engine.requests[0].token_ids)

    count, sent = asyncio.run(go())
    assert count == {"input_tokens": sent}


def test_flush_wants_the_admin_key_from_wherever_it_is_asked(make_app, tmp_path):
    import asyncio

    import httpx

    key = tmp_path / "admin"
    key.write_text("root\n")

    async def go(settings, peer, headers=None):
        app, engine, _ = make_app(Script(), **settings)
        transport = httpx.ASGITransport(app, client=(peer, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            reply = await client.post("/admin/flush", headers=headers)
        return reply.status_code, engine.flushed

    guarded, with_key = {"admin_key_file": key}, {"authorization": "Bearer root"}
    for peer in ("127.0.0.1", "10.1.2.3"):
        assert asyncio.run(go({}, peer)) == (403, 0)
        assert asyncio.run(go({}, peer, with_key)) == (403, 0)
        assert asyncio.run(go(guarded, peer)) == (403, 0)
        assert asyncio.run(go(guarded, peer, with_key)) == (200, 1)


def test_beyond_this_machine_metrics_and_details_of_health_want_a_key(request_json, tmp_path):
    keys, admin = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("a:some key\n")
    admin.write_text("root\n")
    settings = {"host": "0.0.0.0", "api_key_file": keys, "admin_key_file": admin}

    def get(path, key=None, **settings):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return request_json(Script(), "GET", path, settings=settings, headers=headers)

    assert get("/metrics", **settings).status_code == 401
    assert get("/health", **settings).json() == {"status": "ready"}
    for key in ("some key", "root"):
        assert get("/metrics", key, **settings).status_code == 200
        assert get("/health", key, **settings).json()["workers"]
    assert get("/metrics", api_key_file=keys).status_code == 200


def test_metrics_tell_requests_tokens_errors_and_workers(make_app, say):
    import asyncio

    import httpx

    async def go():
        app, _, _ = make_app(say("hello", cached=5))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            await client.post("/v1/chat/completions", json=CHAT)
            await client.post("/v1/messages", content=b"{")
            plain = await client.get("/metrics")
            openmetrics = await client.get(
                "/metrics", headers={"accept": "application/openmetrics-text"}
            )
        return plain, openmetrics

    plain, openmetrics = asyncio.run(go())
    text = plain.text
    assert 'deepinfer_requests_total{finish="stop",protocol="chat"} 1.0' in text
    assert (
        'deepinfer_request_errors_total{code="invalid_request_error",protocol="messages"} 1.0'
        in text
    )
    assert "deepinfer_cached_tokens_total 5.0" in text
    assert "deepinfer_generated_tokens_total 6.0" in text
    assert 'deepinfer_time_to_first_token_seconds_count{protocol="chat"} 1.0' in text
    assert 'deepinfer_inter_token_latency_seconds_count{protocol="chat"} 3.0' in text
    assert 'deepinfer_worker_steps_total{role="single",worker="w0"} 3.0' in text
    assert 'deepinfer_worker_running{role="single",worker="w0"} 1.0' in text
    assert 'deepinfer_worker_ready{role="single",worker="w0"} 1.0' in text
    assert "deepinfer_http_requests_in_flight 0.0" in text
    assert openmetrics.text.endswith("# EOF\n")


def test_version_names_what_is_served(request_json):
    body = json.loads(request_json(Script(), "GET", "/version").text)
    assert body["models"] == ["toy"]
