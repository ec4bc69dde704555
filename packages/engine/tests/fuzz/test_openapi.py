"""What schemathesis makes of our OpenAPI document: no 5xx, no answer that breaks its schema."""

from __future__ import annotations

import os

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, settings
from server_fakes import FakeEngine, Script, byte_codec

from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

schemathesis = pytest.importorskip("schemathesis", reason="`nox -s api-fuzz` installs it")
openapi_checks = pytest.importorskip("schemathesis.specs.openapi.checks")

# What they say of a status, a content type or a body must hold. Others of the library's checks ask
# for what OpenAPI cannot tell here: which models are served, and that unknown fields are named.
CHECKS = [
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]


def answer(request):
    return Script([[70, 71, 72]] * 4, reason="length", logprobs=True)


app = create_app(
    FakeEngine(answer),
    byte_codec(("toy",)),
    Settings(allowed_hosts=("testserver",), responses_store="memory"),
)
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.exclude(path_regex="^/admin/").parametrize()
@settings(
    max_examples=int(os.environ.get("API_FUZZ_EXAMPLES", "40")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_no_request_makes_the_server_fail(case):
    """Bodies as generated, and the same for the model that is served, which are answered."""
    check(case)
    if isinstance(case.body, dict) and case.body.get("model") != "toy" and "model" in case.body:
        case.body = {**case.body, "model": "toy"}
        check(case)


def check(case):
    response = case.call()
    # What is not built in is 501, and overload is said: neither is a failure.
    assert response.status_code < 500 or response.status_code in (501, 503), response.text
    case.validate_response(response, checks=CHECKS)


def test_every_route_that_takes_a_body_says_what_it_looks_like():
    with TestClient(app, base_url="http://localhost") as client:
        document = client.get("/openapi.json").json()
    posts = {
        path: methods["post"]
        for path, methods in document["paths"].items()
        if "post" in methods and not path.startswith("/admin") and "{" not in path
    }
    assert len(posts) >= 8
    for path, operation in posts.items():
        body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert body.rpartition("/")[2] in document["components"]["schemas"], path
