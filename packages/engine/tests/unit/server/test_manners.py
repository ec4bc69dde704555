"""HEAD, OPTIONS, encodings, documentation, and paths of the public APIs that are not here."""

from __future__ import annotations

import logging

import pytest
from server_fakes import Script


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/docs"])
def test_head_is_get_without_a_body(request_json, path):
    got = request_json(Script(), "GET", path)
    head = request_json(Script(), "HEAD", path)
    assert head.status_code == got.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/v1/chat/completions", "OPTIONS, POST"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/", "GET, HEAD, OPTIONS"),
    ],
)
def test_options_tells_the_methods(request_json, path, allow):
    reply = request_json(Script(), "OPTIONS", path)
    assert (reply.status_code, reply.headers["allow"]) == (204, allow)


def test_a_wrong_method_tells_the_right_ones(request_json):
    reply = request_json(Script(), "GET", "/v1/chat/completions")
    assert reply.status_code == 405
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/v1/embeddings", "embedding"),
        ("/v1/audio/speech", "speaks"),
        ("/v1/responses/compact", "rewrite"),
        ("/v1/messages/batches", "generate"),
        ("/v1/nothing", "there is no POST"),
    ],
)
def test_what_is_not_here_says_what_to_do(request_json, path, word):
    reply = request_json(Script(), "POST", path, json={})
    assert reply.status_code == 404
    assert word in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_compressed_body_is_415(request_json, path):
    headers = {"content-encoding": "gzip"}
    reply = request_json(Script(), "POST", path, content=b"\x1f\x8b", headers=headers)
    assert reply.status_code == 415
    assert "content-encoding" in reply.json()["error"]["message"]


def test_models_with_a_slash_is_the_list(request_json):
    assert request_json(Script(), "GET", "/v1/models/").json()["data"][0]["id"] == "toy"


def test_the_docs_name_every_route_and_load_nothing(request_json):
    page = request_json(Script(), "GET", "/docs").text
    assert "/v1/chat/completions" in page
    assert "/v1/completions" in page
    assert "<script" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_responses_count_tokens_and_refuse_to_cancel(request_json, say):
    body = {"model": "toy", "input": "hello there"}
    count = request_json(Script(), "POST", "/v1/responses/input_tokens", json=body).json()
    assert count["object"] == "response.input_tokens"
    answer = request_json(say("</think>x"), "POST", "/v1/responses", json=body).json()
    assert count["input_tokens"] == answer["usage"]["input_tokens"]
    cancelled = request_json(Script(), "POST", "/v1/responses/resp_1/cancel")
    assert cancelled.status_code == 400
    assert "close its connection" in cancelled.json()["error"]["message"]


def test_gauges_are_not_named_like_counters(request_json):
    for line in request_json(Script(), "GET", "/metrics").text.splitlines():
        if line.startswith("# TYPE ") and line.endswith(" gauge"):
            assert not line.split()[2].endswith("_total"), line


@pytest.mark.parametrize(
    ("path", "level", "shown"),
    [
        ("/v1/models?key=secret", logging.INFO, "/v1/models 200 abc-1"),
        ("/nothing%0Ahere", logging.INFO, "/nothing%0Ahere 404 abc-1"),
        ("/health", logging.DEBUG, "/health 200 abc-1"),
    ],
)
def test_every_request_is_a_line_of_the_log_with_its_id(request_json, caplog, path, level, shown):
    with caplog.at_level(logging.DEBUG, "deepinfer_engine.server.request_id"):
        request_json(Script(), "GET", path, headers={"x-request-id": "abc-1"})
    [record] = [r for r in caplog.records if r.name == "deepinfer_engine.server.request_id"]
    assert (record.levelno, record.getMessage()) == (level, f"GET {shown}")
