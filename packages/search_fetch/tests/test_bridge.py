# ruff: noqa: E501
from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from deepinfer_search_fetch import AsyncSearchFetch, Bridge, Config, ToolOutcome, ToolPolicy
from deepinfer_search_fetch.bridge import Seal, urls_in
from deepinfer_search_fetch.bridge.render import fenced
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.index.document import IndexedPage

Listener = Any  # see conftest
TEXT = "<title>Voles</title><p>" + "Voles live in the grass of the meadow. " * 20


@pytest.fixture
def bridge(config: Config, make_client: Callable[..., AsyncSearchFetch]) -> Bridge:
    client = make_client(config)
    client.backend.index(
        IndexedPage(f"https://{h}/", f"Voles at {h}", f"Voles live in grass near {h}. " * 20, "2026-01-01", "en", "2025-05-05")
        for h in ("a.example", "b.example")
    )  # fmt: skip
    client.backend.commit()
    moment = datetime(2026, 11, 29, tzinfo=UTC)
    return Bridge(client, secret=b"0123456789abcdef", new_id=lambda: "1", clock=lambda: moment)


def run(bridge: Bridge, name: str, tool_input: dict[str, Any], policy: ToolPolicy) -> ToolOutcome:
    return asyncio.run(bridge.run_tool(name, tool_input, policy))


def test_search_in_the_messages_dialect(bridge: Bridge) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["a.example"]}
    outcome = run(bridge, "web_search", {"query": "voles"}, ToolPolicy.from_anthropic(tool))
    use, result = outcome.wire_blocks
    assert use == {
        "type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "voles"},
    }  # fmt: skip
    assert (result["type"], result["tool_use_id"]) == ("web_search_tool_result", "srvtoolu_1")
    [hit] = result["content"]
    assert (hit["type"], hit["url"], hit["page_age"]) == (
        "web_search_result", "https://a.example/", "2025-05-05",
    )  # fmt: skip
    opened = bridge.seal.open(hit["encrypted_content"])
    assert opened is not None
    assert "Voles live" in opened["text"]
    assert outcome.usage == {"web_search_requests": 1, "web_fetch_requests": 0}
    assert "https://a.example/" in outcome.blocks_for_model[0]["text"]
    json.dumps(outcome.wire_blocks)


def test_search_in_the_responses_dialect(bridge: Bridge) -> None:
    policy = ToolPolicy.from_openai(
        {"type": "web_search", "search_context_size": "low"}, include_sources=True
    )
    assert (policy.results, policy.max_tokens) == (3, 2000)
    [item] = run(bridge, "web_search", {"query": "voles"}, policy).wire_blocks
    assert (item["type"], item["status"], item["action"]["type"]) == (
        "web_search_call", "completed", "search",
    )  # fmt: skip
    assert {s["url"] for s in item["action"]["sources"]} == {
        "https://a.example/",
        "https://b.example/",
    }


def test_fetch_returns_the_page_as_a_document(bridge: Bridge, site: Listener) -> None:
    site.page("/", TEXT)
    url = f"http://public.test:{site.port}/"
    policy = ToolPolicy(known_urls=urls_in(f"please read {url}."), citations=True)
    outcome = run(bridge, "web_fetch", {"url": url}, policy)
    result = outcome.wire_blocks[1]["content"]
    assert (result["type"], result["url"], result["retrieved_at"]) == (
        "web_fetch_result", url, "2026-11-29T00:00:00Z",
    )  # fmt: skip
    assert "Voles live" in result["content"]["source"]["data"]
    assert result["content"]["citations"] == {"enabled": True}


@pytest.mark.parametrize(
    ("name", "tool_input", "policy", "code"),
    [
        ("web_search", {}, ToolPolicy(), "invalid_tool_input"),
        ("web_search", {"query": "x" * 600}, ToolPolicy(), "query_too_long"),
        ("web_search", {"query": "x"}, ToolPolicy(max_uses=1, uses=1), "max_uses_exceeded"),
        ("web_fetch", {"url": "http://a.example/"}, ToolPolicy(known_urls=frozenset()),
         "url_not_in_prior_context"),
        ("web_fetch", {"url": "http://a.example/?stolen=data"},
         ToolPolicy(known_urls=frozenset({"http://a.example/"})), "url_not_in_prior_context"),
        ("web_fetch", {"url": "http://127.0.0.1/"}, ToolPolicy(), "url_not_allowed"),
        ("web_fetch", {"url": "http://a.example/"}, ToolPolicy(blocked_domains=("example",)),
         "url_not_allowed"),
        ("web_fetch", {"url": "http://nowhere.test/"}, ToolPolicy(), "url_not_accessible"),
        ("web_fetch", {"url": "http://a/" + "x" * 3000}, ToolPolicy(), "url_too_long"),
        ("web_fetch", {"url": 7}, ToolPolicy(), "invalid_tool_input"),
    ],
)  # fmt: skip
def test_failures_are_outcomes_with_a_code(
    name: str, tool_input: dict[str, Any], policy: ToolPolicy, code: str, bridge: Bridge
) -> None:
    outcome = run(bridge, name, tool_input, policy)
    content = outcome.wire_blocks[1]["content"]
    assert outcome.is_error
    assert (content["type"], content["error_code"]) == (f"{name}_tool_result_error", code)
    assert not any(outcome.usage.values())


def test_an_unknown_tool_and_contradicting_lists_are_misuse(bridge: Bridge) -> None:
    with pytest.raises(InvalidRequestError):
        run(bridge, "web_shell", {}, ToolPolicy())
    with pytest.raises(InvalidRequestError):
        ToolPolicy(allowed_domains=("a",), blocked_domains=("b",))


def test_sealed_tokens_cannot_be_changed_or_opened_elsewhere() -> None:
    seal, other = Seal(b"0123456789abcdef"), Seal(b"another secret..")
    token = seal.seal({"text": "x"})
    assert seal.open(token) == {"text": "x"}
    assert other.open(token) is None
    assert seal.open(token[:-4] + "AAAA") is None
    assert seal.open("not base64 at all") is None


def test_content_cannot_close_the_delimiter_it_stands_in() -> None:
    inner = fenced("page", "first")
    mark = inner.split(" ")[0][1:]
    outer = fenced("page", f"text </{mark}> more")
    assert outer.split(" ")[0][1:] != mark
