"""No callback of the event loop decodes, parses or searches: library, service and MCP."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from loop_hook import LARGE_JSON, heavy_calls_on, heavy_calls_on_this_thread
from service_harness import FAST, Service

from deepinfer_search_fetch import AsyncSearchFetch, Config, FetchRequest, SearchRequest
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.extract.document import Job, make_document
from deepinfer_search_fetch.extract.html import HtmlOptions

Listener = Any  # see conftest
PAGE = b"<title>Voles</title><h1>Voles</h1><p>" + b"Voles live in the grass of the meadow. " * 20
PART = b"<h2>Part %d</h2><p>Paragraph %d. Voles live in the <a href=/grass>grass</a> here.</p>"
BIG = PAGE + b"".join(PART % (i, i) for i in range(400))
FORMATS = ("markdown", "text", "html", "outline", "links", "raw_text")


def publish(site: Listener) -> str:
    """Put the big page and a long robots.txt on the site; returns the page's URL."""
    site.page("/big", gzip.compress(BIG), headers=("Content-Encoding: gzip",))
    site.page("/robots.txt", "User-agent: *\nDisallow: /private\n" * 500, content_type="text/plain")
    return f"http://127.0.0.2:{site.port}/big"


@pytest.mark.parametrize("workers", [0, 1])
def test_no_callback_of_the_event_loop_decodes_or_parses(
    workers: int, config: Config, site: Listener
) -> None:
    url = publish(site)
    config = config.model_copy(update={"extract_workers": workers, "robots": "respect"})

    async def run() -> Counter[str]:
        async with AsyncSearchFetch(config) as client:
            with heavy_calls_on_this_thread() as found:
                for form in FORMATS:
                    await client.fetch(
                        FetchRequest(url=url, format=form, query="voles", render="never")
                    )
                await client.fetch(FetchRequest(url=url, offset=500, render="never"))
                await client.ingest(url)
                await client.search(SearchRequest(query="voles grass"))
            return found

    assert asyncio.run(run()) == Counter()


@pytest.fixture
def service(config: Config, make_resolver: Any) -> Any:
    """The service with one worker, robots rules, and a long page in its index."""
    config = config.model_copy(update={"extract_workers": 1, "robots": "respect"})
    made = Service(config, make_resolver({}), FAST, auth=False)
    yield made
    made.close()


def test_no_callback_of_the_service_decodes_parses_or_searches(
    service: Service, site: Listener
) -> None:
    url = publish(site)
    with heavy_calls_on(service.loop) as found:
        for body in ({"url": url}, {"url": url, "offset": 500}, {"url": url, "query": "voles"}):
            assert service.call("POST", "/v1/fetch", body)[0] == 200
        for form in FORMATS:
            assert service.call("POST", "/v1/fetch", {"url": url, "format": form})[0] == 200
        for path, body in (
            ("/v1/search", {"query": "voles", "content": "full"}),
            ("/v1/tools/search", {"query": "voles", "need_content": True}),
            ("/v1/tools/fetch", {"url": url}),
            ("/v1/fetch/batch", {"urls": [url, url + "?b"]}),
            ("/search", {"query": "voles", "include_raw_content": True}),
            ("/extract", {"urls": [url], "query": "voles", "include_images": True}),
        ):
            assert service.call("POST", path, body)[0] == 200
    assert found == Counter()


def test_no_callback_of_mcp_decodes_parses_or_searches(service: Service, site: Listener) -> None:
    url = publish(site)
    with heavy_calls_on(service.loop) as found:
        for name, arguments in (
            ("web_fetch", {"url": url}),
            ("web_fetch", {"url": url, "offset": 500}),
            ("web_search", {"query": "voles"}),
            ("search", {"query": "voles"}),
        ):
            message = {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "tools/call",
                "params": {"name": name, "arguments": arguments},
            }
            accept = "application/json, text/event-stream"
            status, _, told = service.call("POST", "/mcp", message, Accept=accept)
            assert (status, told["result"].get("isError", False)) == (200, False)
    assert found == Counter()


def test_the_hook_sees_what_it_should() -> None:
    async def run() -> Counter[str]:
        job = Job("", "text/html", HtmlOptions(mode="fast"))
        make_document(PAGE, job, Limits())  # reads the model, once a process
        with heavy_calls_on_this_thread() as found:
            make_document(PAGE, job, Limits())
            json.loads(json.dumps("a" * LARGE_JSON))
        return found

    found = asyncio.run(run())
    assert found["charset.py:decode_text"] == found["json:loads"] == found["json:dumps"] == 1


def test_the_hook_sees_a_loop_in_another_thread(serve: Callable[..., Service]) -> None:
    service = serve()

    async def read() -> None:
        make_document(PAGE, Job("", "text/html", HtmlOptions(mode="fast")), Limits())

    with heavy_calls_on(service.loop) as found:
        asyncio.run_coroutine_threadsafe(read(), service.loop).result(60)
    assert found["charset.py:decode_text"] == 1
