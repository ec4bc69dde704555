# ruff: noqa: E501
"""Numbers and letters that no honest page, server or caller writes, where a number is expected."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import pytest

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    FetchRequest,
    FetchResponse,
    InvalidRequestError,
    SearchFetchError,
    SearchRequest,
    urls,
)
from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search.engine import search

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
LONG = "9" * 5000  # more digits than int() takes from a string
WORDS = "<title>Voles</title><p>" + "Voles live in the grass of the meadow. " * 20 + "</p>"


def get(client: AsyncSearchFetch, url: str, **fields: Any) -> FetchResponse:
    return asyncio.run(client.fetch(FetchRequest(url=url, render="never", **fields)))


@pytest.mark.parametrize(
    "text", [f"http://a.example:{LONG}/", "http://a.example:00/", "http://%41\ud800.example/"]
)
def test_a_port_or_host_beyond_reading_is_an_invalid_url(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        urls.parse(text)
    assert caught.value.code == "invalid_url"
    assert urls.parse("http://a.example:00080/").port == 80


def test_queries_in_other_charsets_stay_apart() -> None:
    """中 and 国 in GBK: neither is UTF-8, and the two are different pages."""
    first, second = (
        urls.canonical(urls.parse(f"http://a.example/?q={q}")) for q in ("%D6%D0", "%B9%FA")
    )
    assert first == "http://a.example/?q=%D6%D0"
    assert second == "http://a.example/?q=%B9%FA"
    assert urls.canonical(urls.parse("http://a.example/?q=中&b=1")) == (
        "http://a.example/?b=1&q=%E4%B8%AD"
    )


def test_a_batch_does_not_answer_one_query_with_the_page_of_another(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    for query, word in (("%D6%D0", "middle"), ("%B9%FA", "country")):
        site.page(f"/?q={query}", f"<p>{f'The {word} has voles in the grass. ' * 20}</p>")
    client = make_client(config)
    base = f"http://public.test:{site.port}/?q="
    requests = [FetchRequest(url=base + q, render="never") for q in ("%D6%D0", "%B9%FA")]

    async def run() -> dict[int, str]:
        return {
            i.index: i.response.content async for i in client.fetch_many(requests) if i.response
        }

    contents = asyncio.run(run())
    assert "middle" in contents[0]
    assert "country" in contents[1]


@pytest.mark.parametrize(
    "header",
    [
        "Cache-Control: max-age=\u00b2",
        f"Cache-Control: max-age={LONG}",
        "Expires: Mon, 01 Jan 2026 00:00:00 +9999999999999999",
        'ETag: "\u00e9\u00ff"',
        "Last-Modified: \u00e9",
    ],
)
def test_odd_cache_headers_never_fail_a_page(
    header: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", WORDS)
    head, _, body = site.pages["/"].partition(b"\r\n\r\n")
    site.pages["/"] = head + b"\r\n" + header.encode("latin-1") + b"\r\n\r\n" + body
    client = make_client(config)
    for _ in range(2):  # the second time with what the first answer gave for validation
        assert "Voles" in get(client, f"http://public.test:{site.port}/", max_age=0).content
    if header.startswith("ETag"):
        assert b'if-none-match: "\xe9\xff"' in site.requests[-1].replace(
            b"If-None-Match", b"if-none-match"
        )


@pytest.mark.parametrize("wait", ["\u00b2", LONG, "-5", "soon"])
def test_odd_retry_after_is_still_the_servers_error(
    wait: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.pages["/"] = (
        b"HTTP/1.1 429 Slow down\r\nContent-Length: 0\r\nRetry-After: " + wait.encode("latin-1")
    ) + b"\r\n\r\n"
    with pytest.raises(SearchFetchError) as caught:
        get(make_client(config), f"http://public.test:{site.port}/")
    assert caught.value.code == "upstream_http"


def test_blanks_around_a_language_and_any_age_are_accepted(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", WORDS)
    client = make_client(config)
    url = f"http://public.test:{site.port}/"
    assert get(client, url, accept_language=" en ", max_age=10**400).content
    assert b"Accept-Language: en\r\n" in site.requests[-1]
    assert get(client, url, accept_language="  ").content
    assert b"Accept-Language" not in site.requests[-1]


@pytest.mark.parametrize(
    "markup",
    [
        f'<p>See <a href="http://a.example:{LONG}/">this link</a> in the text.</p>',
        f'<base href="http://a.example:{LONG}/">',
        f'<link rel=canonical href="http://a.example:{LONG}/">',
        f"<table><tr><td colspan={LONG}>a<td>b<tr><td rowspan={LONG}>c<td>d</table>",
        f"<ol start={LONG}><li value=\u00b2>one<li>two</ol>",
    ],
)
@pytest.mark.parametrize("mode", ["article", "full", "fast"])
def test_one_odd_attribute_does_not_cost_the_page(markup: str, mode: Any) -> None:
    page = extract((markup + WORDS).encode(), "http://b.example/", mode=mode)
    assert "Voles live in the grass" in page.content


def test_half_surrogates_and_controls_of_json_do_not_reach_the_texts() -> None:
    data = json.dumps({"@type": "Article", "headline": "\ud800 Owl \x1b[31m", "author": "\ud83d"})
    page = extract(f'{WORDS}<script type="application/ld+json">{data}</script>'.encode())
    assert page.title == "Owl [31m"
    assert page.author is None
    document = extract(b'{"title": "\\ud800 x", "a": "\\udfff"}', content_type="application/json")
    assert '"a": "\\udfff"' in document.content
    (document.content + (document.title or "")).encode()


@pytest.mark.parametrize("number", ["\u00b2", LONG, "-1", "x"])
def test_odd_numbers_in_office_documents_are_ignored(number: str) -> None:
    word = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    cell = f'<w:tc><w:tcPr><w:gridSpan w:val="{number}"/></w:tcPr><w:p><w:r><w:t>vole</w:t></w:r></w:p></w:tc>'
    outline = f'<w:p><w:pPr><w:outlineLvl w:val="{number}"/></w:pPr><w:r><w:t>owl</w:t></w:r></w:p>'
    body = f"<w:document {word}><w:body>{outline}<w:tbl><w:tr>{cell}{cell}</w:tr></w:tbl></w:body></w:document>"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        archive.writestr("word/document.xml", body)
    content = extract(out.getvalue(), "http://a.example/x.docx").content
    assert "owl" in content
    assert content.count("vole") == 2


@pytest.mark.parametrize("query", ["*", "?!", "\U0001f469\u200d\U0001f469", "\u200b", '"', "- -"])
def test_a_query_of_signs_finds_nothing_and_is_free(query: str, tmp_path: Any) -> None:
    (tmp_path / "a.html").write_text(WORDS)
    backend = TantivyBackend(tmp_path / "index")

    async def fill() -> None:
        config = Config(home=tmp_path, extract_workers=0)
        async with AsyncSearchFetch(config, backend=backend) as client:
            assert (await client.ingest(tmp_path / "a.html")).indexed == 1

    asyncio.run(fill())
    assert search(backend, SearchRequest(query="voles")).usage.billable
    answer = search(backend, SearchRequest(query=query))
    assert answer.results == []
    assert not answer.usage.billable


def test_usage_since_before_the_first_second_is_usage_since_the_beginning(
    serve: Callable[..., Any],
) -> None:
    from service_harness import call

    service = serve()
    reply = call(service.port, "GET", "/v1/usage?from=0001-01-01")
    assert reply.status == 200
    assert reply.json["since"] == "1970-01-01T00:00:00.000Z"


@pytest.mark.parametrize(
    ("host", "answers", "code"),
    [
        ("private.test", ["10.0.0.1"], "blocked_address"),
        ("mixed.test", ["127.0.0.2", "10.0.0.1"], "blocked_address"),
        ("nowhere.test", [], "dns_failure"),
        ("closed.test", ["127.0.0.2"], "connect_failure"),
    ],
)
def test_a_host_out_of_reach_is_not_blamed_on_its_robots_txt(
    host: str, answers: list[str], code: str, config: Config, make_client: MakeClient
) -> None:
    strict = config.model_copy(update={"robots": "respect"})
    client = make_client(strict, {host: [answers]})
    port = 8443 if code == "connect_failure" else 80
    for _ in range(2):  # nothing about it is remembered as a rule
        with pytest.raises(SearchFetchError) as caught:
            get(client, f"http://{host}:{port}/")
        assert caught.value.code == code


def test_a_rule_for_one_path_in_gbk_does_not_hold_for_another() -> None:
    from deepinfer_search_fetch.net.robots import parse_robots

    rules = parse_robots("User-agent: *\nDisallow: /%D6%D0\nDisallow: /\u00e9")
    assert not rules.allows("/%D6%D0")
    assert rules.allows("/%B9%FA")
    assert not rules.allows("/%C3%A9")


@pytest.mark.parametrize("concurrency", [0, -1])
def test_a_batch_without_a_single_worker_is_refused_and_does_not_hang(
    concurrency: int, config: Config, make_client: MakeClient
) -> None:
    client = make_client(config)

    async def run() -> None:
        requests = [FetchRequest(url="http://127.0.0.1/")]
        async with asyncio.timeout(60):
            async for _ in client.fetch_many(requests, concurrency=concurrency):
                pass

    with pytest.raises(InvalidRequestError, match="concurrency"):
        asyncio.run(run())


@pytest.mark.parametrize("source", ["", "  "])
def test_an_empty_source_is_not_the_current_folder(
    source: str, config: Config, make_client: MakeClient
) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        asyncio.run(make_client(config).ingest(source))
