"""What a web page can do to a server on its visitor's machine."""

from __future__ import annotations

import pytest
from server_fakes import Script

CHAT = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


@pytest.fixture
def post(request_json, say):
    def send(path=PATH, settings=None, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        return request_json(say("ok"), "POST", path, json=CHAT, headers=headers, settings=settings)

    return send


def test_a_page_of_another_origin_is_refused_also_with_a_simple_request(post):
    reply = post(origin="https://evil.example", content_type="text/plain")
    assert reply.status_code == 403
    assert "cors_origins" in reply.json()["error"]["message"]
    assert reply.headers["x-request-id"]


def test_a_rebound_name_is_refused_whatever_its_origin_says(post):
    for headers in (
        {"host": "evil.example"},
        {"host": "evil.example", "origin": "http://evil.example"},
        {"host": "evil.example:8000", "origin": "http://localhost:8000"},
    ):
        reply = post(**headers)
        assert reply.status_code == 403, headers
        assert "allowed_hosts" in reply.json()["error"]["message"]


def test_a_page_cannot_use_admin_routes(post):
    for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {}):
        assert post("/admin/flush", **headers).status_code == 403


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:80", "[::1]:8000", "10.2.3.4",
     "a.localhost", "box.example", "BOX.example:443", "box.example."],
)  # fmt: skip
def test_addresses_and_names_of_the_list_are_served(post, host):
    assert post(host=host, settings={"allowed_hosts": ("box.example",)}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil",
     "evil.example/localhost", "localhost:8000:9", "127.0.0.1:x", "xlocalhost", "127.1.evil"],
)  # fmt: skip
def test_other_names_and_malformed_ones_are_not(post, host):
    assert post(host=host).status_code == 403


@pytest.mark.parametrize("origin", ["null", "https://evil.example", "file://", "http://localhost"])
def test_an_origin_is_of_the_same_host_and_port_or_on_the_list(post, origin):
    assert post(host="localhost:8000", origin=origin).status_code == 403
    assert post(host="localhost:8000", origin="http://localhost:8000").status_code == 200
    listed = {"cors_origins": ("https://ui.example",)}
    assert post(origin=origin, settings=listed).status_code in (200, 403)
    reply = post(origin="https://ui.example", settings=listed)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://ui.example"


def test_a_page_s_request_without_an_origin_is_refused_by_what_the_browser_says_of_it(post):
    assert post(sec_fetch_site="cross-site").status_code == 403
    assert post(sec_fetch_site="same-site").status_code == 403
    assert post(sec_fetch_site="none").status_code == 200


def test_a_preflight_is_answered_for_listed_origins_alone(request_json):
    def preflight(origin):
        headers = {"origin": origin, "access-control-request-method": "POST",
                   "access-control-request-headers": "content-type"}  # fmt: skip
        settings = {"cors_origins": ("https://ui.example",)}
        return request_json(Script(), "OPTIONS", PATH, headers=headers, settings=settings)

    allowed = preflight("https://ui.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://ui.example"
    refused = preflight("https://evil.example")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


def test_two_host_headers_are_refused(make_app):
    import asyncio

    import httpx

    async def go():
        app, _, _ = make_app(Script())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as client:
            headers = [("host", "localhost"), ("host", "evil.example")]
            return await client.get("http://localhost/health", headers=headers)

    assert asyncio.run(go()).status_code == 400
