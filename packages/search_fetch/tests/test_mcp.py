"""MCP over Streamable HTTP and stdio, with the official client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import mcp
import pytest
from forked_command import cli
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types.version import KNOWN_PROTOCOL_VERSIONS
from service_harness import FAST, Service

from deepinfer_search_fetch.service.settings import ServiceSettings

Listener = Any  # see conftest
TEXT = "<title>Newts</title><p>" + "Newts live in ponds and eat small insects. " * 20
TOOLS = {"web_search", "web_fetch", "search", "fetch"}


@asynccontextmanager
async def session(
    service: Service, secret: str | None = None, **more: Any
) -> AsyncGenerator[mcp.Client]:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
        transport = streamable_http_client(f"http://127.0.0.1:{service.port}/mcp", http_client=http)
        async with mcp.Client(transport, **more) as client:
            yield client


async def check_tools(client: mcp.Client, url: str) -> None:
    """List the tools, call each, hold each answer to its own schema."""
    tools = {t.name: t for t in (await client.list_tools()).tools}
    assert set(tools) == TOOLS
    answers: dict[str, Any] = {}
    for name, arguments in (
        ("web_fetch", {"url": url}),
        ("web_search", {"query": "voles", "count": 3}),
        ("search", {"query": "voles"}),
    ):
        answers[name] = await client.call_tool(name, arguments)
    [hit] = answers["search"].structured_content["results"]
    answers["fetch"] = await client.call_tool("fetch", {"id": hit["id"]})
    for name, answer in answers.items():
        assert not answer.is_error, answer
        assert tools[name].annotations is not None
        assert tools[name].annotations.read_only_hint
        assert tools[name].annotations.open_world_hint
        assert "ctx" not in tools[name].input_schema["properties"]
        jsonschema.validate(answer.structured_content, tools[name].output_schema)
        assert tools[name].input_schema["additionalProperties"] is False
        for field in tools[name].input_schema["properties"].values():
            assert field["description"]
    assert answers["web_fetch"].content[0].text.startswith(f"# Newts\n{url}\n\n")
    assert answers["web_search"].content[0].text.startswith("1. [Voles](")
    assert "Newts live" in answers["web_fetch"].structured_content["content"]
    assert "Voles live" in answers["fetch"].structured_content["text"]
    refused = await client.call_tool("web_fetch", {"url": "http://127.0.0.1/"})
    assert refused.is_error
    assert "blocked_address" in refused.content[0].text
    assert (await client.call_tool("web_search", {"query": " "})).is_error
    for wrong in ({"query": "voles", "cuont": 3}, {"query": "voles", "count": 51}):
        told = await client.call_tool("web_search", wrong)
        assert told.is_error
        assert ("cuont" if "cuont" in wrong else "count") in told.content[0].text
    assert (await client.call_tool("fetch", {"id": "none"})).is_error


@pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])
def test_every_tool_answers_over_http_and_is_charged_once(
    mode: str, serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/newts", TEXT)
    service = serve(auth=True)
    assert service.keys is not None
    secret, key = service.keys.create("me")

    async def main() -> str:
        async with session(service, secret, mode=mode) as client:
            await check_tools(client, f"http://public.test:{site.port}/newts")
            return str(client.protocol_version)

    version = asyncio.run(main())
    assert version in KNOWN_PROTOCOL_VERSIONS
    assert version == ("2025-11-25" if mode == "legacy" else mode)
    assert service.billed() == {"fetch": 1, "search": 2}
    assert {r["key_id"] for r in service.ledger.usage()} == {key.id}
    text = service.call("GET", "/metrics")[2]
    assert 'search_fetch_mcp_calls_total{result="ok",tool="web_fetch"} 1.0' in text
    assert 'search_fetch_mcp_calls_total{result="blocked_address",tool="web_fetch"} 1.0' in text


def test_keys_scopes_and_quotas_hold_for_tools(
    serve: Callable[..., Service], site: Listener
) -> None:
    service = serve(auth=True)
    assert service.keys is not None
    limited, _ = service.keys.create("limited", ["search"], monthly_quota=1)

    async def main() -> None:
        async with session(service, limited) as client:
            assert not (await client.call_tool("web_search", {"query": "voles"})).is_error
            used_up = await client.call_tool("web_search", {"query": "voles"})
            assert "insufficient_quota" in used_up.content[0].text
            forbidden = await client.call_tool("web_fetch", {"url": "http://public.test/"})
            assert "forbidden" in forbidden.content[0].text

    asyncio.run(main())
    assert service.billed() == {"search": 1}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    status, _, answer = service.call("POST", "/mcp", message)
    assert (status, answer["error"]["code"]) == (401, "unauthorized")


def test_messages_take_rate_tokens(serve: Callable[..., Service]) -> None:
    service = serve(settings=ServiceSettings(rate_per_second=0.001, rate_burst=1))
    message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    accept = "application/json, text/event-stream"
    assert service.call("POST", "/mcp", message, Accept=accept)[0] != 429
    assert service.call("POST", "/mcp", message, Accept=accept)[0] == 429


def test_hosts_and_origins_nobody_named_are_refused(serve: Callable[..., Service]) -> None:
    service = serve(
        auth=True, settings=FAST.model_copy(update={"public_hosts": ("search.example",)})
    )
    assert service.keys is not None
    secret, _ = service.keys.create("me")
    message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}

    def ask(**headers: str) -> int:
        accept = "application/json, text/event-stream"
        return service.call("POST", "/mcp", message, x_api_key=secret, Accept=accept, **headers)[0]

    assert ask(Host="rebind.example") == 403
    assert ask(Origin="https://evil.example") == 403
    assert ask(Origin="null") == 403
    assert ask(Host="search.example", Origin="https://search.example") == 200


def test_other_methods_than_post_are_told_so(serve: Callable[..., Service]) -> None:
    service = serve()
    for method in ("GET", "DELETE"):
        status, headers, answer = service.call(method, "/mcp", Accept="text/event-stream")
        assert (status, headers["allow"]) == (405, "POST")
        assert answer["error"]["code"] == "invalid_argument"


def test_stdio_serves_the_same_tools(tmp_path: Path, site: Listener) -> None:
    site.page("/newts", TEXT)
    (tmp_path / "page.html").write_text("<title>Voles</title><p>" + "Voles live in grass. " * 20)
    url = f"http://127.0.0.2:{site.port}/newts"

    async def main() -> None:
        done = cli("ingest", str(tmp_path / "page.html"), home=tmp_path / "home")
        assert done.returncode == 0, done.stderr
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "deepinfer_search_fetch.cli", "mcp", "--home", str(tmp_path / "home"),
                  "--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port)],
        )  # fmt: skip
        async with mcp.Client(stdio_client(server)) as client:
            await check_tools(client, url)

    asyncio.run(main())
