"""The OpenAPI document tells what the routes answer, and they answer so."""

from __future__ import annotations

import asyncio
import json

import httpx
import jsonschema_rs
import pytest
from server_fakes import FakeEngine, Script, byte_codec

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

ASK = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
REQUESTS = [
    ("post", "/v1/chat/completions", {"messages": ASK}),
    ("post", "/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 2}),
    ("post", "/v1/chat/completions", {"messages": ASK, "n": 2}),
    (
        "post",
        "/v1/chat/completions",
        {"messages": ASK, "tools": [{"type": "function", "function": TOOL}]},
    ),
    ("post", "/v1/completions", {"prompt": "hi", "logprobs": 1}),
    ("post", "/v1/responses", {"input": "hi"}),
    ("post", "/v1/responses/input_tokens", {"input": "hi"}),
    ("post", "/v1/messages", {"messages": ASK, "max_tokens": 9}),
    ("post", "/v1/messages/count_tokens", {"messages": ASK}),
    ("post", "/tokenize", {"prompt": "hi"}),
    ("post", "/detokenize", {"tokens": [70]}),
    ("get", "/v1/models", None),
    ("get", "/v1/models/{name}", None),
    ("get", "/health", None),
    ("get", "/health/ready", None),
    ("get", "/health/live", None),
    ("get", "/version", None),
    ("get", "/v1/usage", None),
    ("get", "/status", None),
    ("post", "/admin/flush", None),
]


@pytest.fixture
def app(tmp_path):
    admin = tmp_path / "admin"
    admin.write_text("the-key-of-the-admin\n")
    script = Script([[70, 71, 72]] * 4, reason="length", logprobs=True)
    settings = Settings(admin_key_file=admin, ledger=tmp_path / "ledger.db")
    app = create_app(FakeEngine(script), byte_codec(), settings)
    yield app
    app.state.services.close()


def documented(app, path, method, status):
    """(schema of the body by content type, with the definitions that it refers to)."""
    document = app.openapi()
    responses = document["paths"][path][method]["responses"]
    told = responses.get(str(status)) or responses[f"{status // 100}XX"]
    return {
        kind: {**content["schema"], "components": document["components"]}
        for kind, content in told["content"].items()
    }


def ask(app, method, path, body, **headers):
    async def go():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            url = path.replace("{name}", "toy")
            return await client.request(method, url, json=body, headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
@pytest.mark.parametrize("messages", [False, True])
def test_answers_and_refusals_are_as_documented(app, method, path, body, messages):
    more = {"anthropic-version": "2023-06-01"} if messages else {}
    reply = ask(
        app, method, path, body and {"model": "toy", **body}, **more,
        authorization="Bearer the-key-of-the-admin",
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    schema = documented(app, path, method, 200)["application/json"]
    assert schema.get("required") or schema.get("anyOf"), "the document says nothing"
    jsonschema_rs.validate(schema, reply.json())
    if method == "post" and body is not None:
        refused = ask(app, method, path, {"model": 1}, **more)
        assert 400 <= refused.status_code < 500
        schema = documented(app, path, method, refused.status_code)["application/json"]
        jsonschema_rs.validate(schema, refused.json())


def test_a_stream_and_metrics_have_content_types_of_their_own(app):
    body = {"model": "toy", "messages": ASK, "stream": True}
    reply = ask(app, "post", "/v1/chat/completions", body)
    kind = reply.headers["content-type"].partition(";")[0]
    assert kind in documented(app, "/v1/chat/completions", "post", 200)
    chunks = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    assert json.loads(chunks[0].removeprefix("data: "))["object"] == "chat.completion.chunk"
    event = {"event": "message", "data": chunks[0].removeprefix("data: ")}
    schema = documented(app, "/v1/chat/completions", "post", 200)[kind]
    jsonschema_rs.validate(schema, event)
    kind = ask(app, "get", "/metrics", None).headers["content-type"].partition(";")[0]
    assert kind in documented(app, "/metrics", "get", 200)


def test_every_documented_operation_says_what_it_answers(app):
    silent = ["/v1/responses/{response_id}/cancel"]  # it only ever refuses
    for path, operations in app.openapi()["paths"].items():
        for method, operation in operations.items():
            found = operation["responses"].get("200", {}).get("content", {})
            assert path in silent or all(one["schema"] for one in found.values()), (path, method)
            assert path in silent or found, (path, method)
