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
checks = pytest.importorskip("schemathesis.checks")

app = create_app(
    FakeEngine(lambda request: Script([[70, 71, 72]] * 4, reason="length")),
    byte_codec(("toy",)),
    Settings(allowed_hosts=("testserver",)),
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
    response = case.call()
    assert response.status_code < 500 or response.status_code in (501, 503), response.text
    if "json" in response.headers.get("content-type", [""])[0] and response.status_code != 200:
        assert "error" in response.json() or "status" in response.json()


def test_every_route_that_takes_a_body_says_what_it_looks_like():
    with TestClient(app, base_url="http://localhost") as client:
        document = client.get("/openapi.json").json()
    posts = {
        path: methods["post"]
        for path, methods in document["paths"].items()
        if "post" in methods and not path.startswith("/admin") and "{" not in path
    }
    assert len(posts) >= 7
    for path, operation in posts.items():
        body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert body.rpartition("/")[2] in document["components"]["schemas"], path
