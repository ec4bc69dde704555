"""What users of other search and fetch services expect to find here too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from service_harness import FAST, Service

from deepinfer_search_fetch import AsyncSearchFetch, Config, FetchRequest, SearchRequest, urls
from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.extract import extract
from deepinfer_search_fetch.extract.html import HtmlOptions
from deepinfer_search_fetch.extract.tokens import paginate
from deepinfer_search_fetch.models import BatchRequest
from deepinfer_search_fetch.net.chain import CookieJar
from deepinfer_search_fetch.net.transport import Response

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
TEXT = (
    "<title>Newts</title><link rel='shortcut icon' href=/icon.png><nav><img src=/logo.png></nav>"
    "<main><h1>Newts</h1><p>" + "Newts live in ponds and eat small insects. " * 12
    + "<p><img src=/newt.jpg alt='A newt'> A picture of one in the pond beside the old mill.</p>"
    + "<p>See <a href=/frogs>frogs</a> too, which live in the same ponds all summer.</p></main>"
)  # fmt: skip


def fetch(client: AsyncSearchFetch, **request: Any) -> Any:
    return asyncio.run(client.fetch(FetchRequest(render="never", **request)))


# Routes at the root


def test_search_at_the_root_has_the_shape_that_frameworks_know(
    serve: Callable[..., Service],
) -> None:
    service = serve()
    body = {
        "query": "voles", "max_results": 3, "search_depth": "advanced", "include_answer": True,
        "include_raw_content": True, "include_favicon": True, "include_domains": ["https://a.example/"],
    }  # fmt: skip
    status, _, answer = service.call("POST", "/search", body)
    assert status == 200
    assert set(answer) == {
        "query", "follow_up_questions", "answer", "images", "results", "response_time",
        "request_id",
    }  # fmt: skip
    [row] = answer["results"]
    assert row["url"] == "https://a.example/"
    assert "Voles live" in row["content"]
    assert "Voles live" in row["raw_content"]
    assert 0 <= row["score"] <= 1
    assert row["favicon"] is None
    assert service.billed() == {"search": 1}
    assert (
        service.call("POST", "/search", {"query": "voles", "exclude_domains": ["*.a.example"]})[2][
            "results"
        ]
        == []
    )


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_results": 21}, "max_results"),
        ({"start_date": "2026-02-30"}, "start_date"),
        ({"start_date": "2026-03-01", "end_date": "2026-02-01"}, "freshness"),
        ({"include_domains": ["https://a.example/path"]}, "include_domains"),
        ({"time_range": "decade"}, "time_range"),
    ],
)
def test_a_bad_field_at_the_root_is_named(
    wrong: dict[str, Any], field: str, serve: Callable[..., Service]
) -> None:
    status, _, answer = serve().call("POST", "/search", {"query": "voles", **wrong})
    assert status == 422
    assert field in answer["error"]["message"]


def test_extract_at_the_root_reads_many_pages_and_tells_which_failed(
    serve: Callable[..., Service], site: Listener
) -> None:
    site.page("/newts", TEXT)
    service = serve()
    base = f"http://public.test:{site.port}"
    body = {"urls": [f"{base}/newts", f"{base}/gone"], "include_images": True,
            "include_favicon": True}  # fmt: skip
    status, _, answer = service.call("POST", "/extract", body)
    assert status == 200
    [page] = answer["results"]
    assert page["url"] == f"{base}/newts"
    assert "Newts live in ponds" in page["raw_content"]
    assert page["images"] == [f"{base}/newt.jpg"]
    assert page["favicon"] == f"{base}/icon.png"
    [failed] = answer["failed_results"]
    assert failed["url"] == f"{base}/gone"
    assert "404" in failed["error"]
    assert service.billed() == {"fetch": 1}
    one = service.call("POST", "/extract", {"urls": f"{base}/newts", "format": "text"})[2]
    assert one["results"][0]["raw_content"].startswith("Newts")
    status, _, answer = service.call("POST", "/extract", {"urls": ["http://a.example/"] * 21})
    assert answer["error"]["details"] == {"limit": "urls", "value": 20}


def test_a_batch_takes_plain_urls_and_waits_for_a_busy_host(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    for i in range(12):
        site.page(f"/{i}", TEXT)
    config = config.model_copy(update={"host_queue": 0, "host_connections": 1})
    client = make_client(config)
    batch = BatchRequest(urls=[f"http://public.test:{site.port}/{i}" for i in range(12)])

    async def run() -> list[bool]:
        return [i.ok async for i in client.fetch_many(batch.requests, concurrency=8)]

    assert asyncio.run(run()) == [True] * 12
    for wrong in ({}, {"urls": ["http://a.example/"], "requests": [{"url": "http://a.example/"}]}):
        with pytest.raises(ValidationError, match="either requests or urls"):
            BatchRequest(**wrong)


# Fields


@pytest.mark.parametrize(
    "written",
    ["a.example", "*.a.example", ".a.example", "https://a.example/", "http://a.example",
     "A.EXAMPLE.", "a.example:443"],
)  # fmt: skip
def test_a_domain_may_be_written_as_people_write_it(written: str) -> None:
    assert SearchRequest(query="x", include_domains=[written]).include_domains == ["a.example"]
    assert FetchRequest(url="x", blocked_domains=[written]).blocked_domains == ["a.example"]


@pytest.mark.parametrize("written", ["", "a example", "https://a.example/path", "a*.example", "@a"])
def test_what_is_no_domain_is_refused(written: str) -> None:
    with pytest.raises(ValidationError):
        SearchRequest(query="x", include_domains=[written])


@pytest.mark.parametrize("period", ["2026-02-30..2026-03-01", "2026-03-02..2026-03-01"])
def test_a_period_must_exist_and_end_after_it_begins(period: str) -> None:
    with pytest.raises(ValidationError):
        SearchRequest(query="x", freshness=period)


def test_links_pictures_and_the_icon_of_a_page(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/newts", TEXT)
    base = f"http://public.test:{site.port}"
    page = fetch(make_client(config), url=f"{base}/newts", return_links=True, return_images=True)
    assert page.favicon == f"{base}/icon.png"
    assert [link.url for link in page.links] == [f"{base}/frogs"]
    assert [(i.url, i.alt) for i in page.images] == [(f"{base}/newt.jpg", "A newt")]


def test_a_page_of_a_long_list_is_never_a_few_tokens() -> None:
    content = "# Birds\n\n" + "\n".join(f"- bird number {i} of the list" for i in range(900)) + "\n"
    offset, sizes = 0, []
    while True:
        page = paginate(content, offset, 500)
        sizes.append(page.returned)
        if page.next_offset is None:
            break
        offset = page.next_offset
    assert min(sizes[:-1]) >= 250
    assert max(sizes) <= 500


# Browsers and pages


def test_pages_of_other_origins_may_call_where_the_operator_says_so(
    serve: Callable[..., Service],
) -> None:
    settings = FAST.model_copy(update={"cors_origins": ("https://app.example",)})
    service = serve(auth=True, settings=settings)
    ask = {"Origin": "https://app.example", "Access_Control_Request_Method": "POST"}
    status, headers, _ = service.call("OPTIONS", "/v1/search", **ask)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    ask["Origin"] = "https://other.example"
    assert "access-control-allow-origin" not in service.call("OPTIONS", "/v1/search", **ask)[1]


def test_the_contract_can_be_read_without_a_key_or_a_script(serve: Callable[..., Service]) -> None:
    status, headers, text = serve(auth=True).call("GET", "/docs")
    assert status == 200
    assert "script" not in headers["content-security-policy"]
    assert "POST /v1/fetch" in text
    assert "max_tokens" in text


def test_cookies_of_a_chain_go_back_to_who_set_them_and_nowhere_else() -> None:
    jar = CookieJar()

    def take(url: str, *cookies: str) -> None:
        headers = tuple(("set-cookie", c) for c in cookies)
        jar.take(Response(urls.parse(url), 302, headers, b"", 0))

    def sent(url: str) -> str:
        return dict(jar.headers(urls.parse(url))).get("Cookie", "")

    take("http://a.site.com/", "s=1", "w=2; Domain=.site.com", "p=3; Path=/deep",
         "t=4; Secure", "x=5; Domain=com", "y=6; Domain=other.com", "bad name=7",
         "inject=a\r\nb")  # fmt: skip
    assert sent("http://a.site.com/") == "s=1; w=2"
    assert sent("http://b.site.com/") == "w=2"
    assert sent("http://a.site.com/deep/er") == "s=1; w=2; p=3"
    assert "t=4" in sent("https://a.site.com/")
    assert sent("http://other.com/") == ""
    take("http://a.site.com/", "s=; Max-Age=0")
    assert sent("http://a.site.com/") == "w=2"


def test_a_wall_that_wants_its_cookie_back_gets_it_within_one_chain(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", "", status="302 Found", headers=("Location: /in", "Set-Cookie: seen=1; Path=/"))
    site.page("/in", TEXT)
    client = make_client(config)
    fetch(client, url=f"http://public.test:{site.port}/")
    fetch(client, url=f"http://public.test:{site.port}/in", max_age=0)
    assert [b"Cookie: seen=1" in r for r in site.requests] == [False, True, False]


@pytest.mark.parametrize("encoding", ["utf-8", "none", "binary", "identity", "", "unknown, gzip"])
def test_a_content_encoding_that_is_none_is_ignored(
    encoding: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    import gzip

    body = gzip.compress(TEXT.encode()) if "gzip" in encoding else TEXT
    site.page("/", body, headers=(f"Content-Encoding: {encoding}",), content_type=None)
    page = fetch(make_client(config), url=f"http://public.test:{site.port}/")
    assert "Newts live in ponds" in page.content


@pytest.mark.parametrize(
    ("status", "body"),
    [
        ("403 Forbidden", "<script>window._cf_chl_opt={}</script>"),
        ("403 Forbidden", "<script src='https://ct.captcha-delivery.com/c.js'></script>"),
        ("503 Service Unavailable", "<script src=/cdn-cgi/challenge-platform/h/b></script>"),
        ("405 Not Allowed", "<script>AwsWafIntegration.getToken()</script>"),
        ("200 OK", "<title>Just a moment...</title><p>Checking your browser before you go on."),
    ],
)
def test_a_bot_wall_is_told_as_one(
    status: str, body: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", body, status=status)
    with pytest.raises(SearchFetchError) as caught:
        fetch(make_client(config), url=f"http://public.test:{site.port}/")
    assert (caught.value.code, caught.value.retryable) == ("challenge_page", False)


def test_an_ordinary_refusal_is_no_wall(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", "<h1>Forbidden</h1>", status="403 Forbidden")
    with pytest.raises(SearchFetchError) as caught:
        fetch(make_client(config), url=f"http://public.test:{site.port}/")
    assert (caught.value.code, caught.value.retryable) == ("upstream_http", False)


# Structure


FILL = "The survey of river gauges shows how the water changed in the season. " * 6


def article(inside: str) -> bytes:
    return (
        f"<title>Gauges</title><article><h1>Report</h1><p>{FILL}</p>{inside}<p>{FILL}</p></article>"
    ).encode()


@pytest.mark.parametrize("mode", ["article", "full", "fast"])
def test_line_numbers_are_no_code(mode: Any) -> None:
    for gutter in ("class=linenos", ""):
        cells = f"<td {gutter}><pre>1\n2</pre><td class=code><pre><code>alpha\nbeta</code></pre>"
        content = extract(article(f"<table class=highlighttable><tr>{cells}</table>"), mode=mode)
        assert "```\nalpha\nbeta\n```" in content.content
        assert "1\n2" not in content.content


@pytest.mark.parametrize("mode", ["article", "full", "fast"])
def test_words_that_are_drawn_apart_are_not_glued(mode: Any) -> None:
    inside = (
        "<p>Item. <img alt='A bird' src=x.png>Kestrels hover over the old meadow.</p>"
        "<p><span>Published</span><span style='display:block'>2024</span> in the yearbook.</p>"
        "<ul><li><span>Red</span><span style='float:right'>12</span></li></ul>"
    )
    content = extract(article(inside), "https://a.example/", mode=mode).content
    assert "birdKestrels" not in content
    assert "Kestrels hover" in content
    assert "Published2024" not in content
    assert "Red12" not in content


@pytest.mark.parametrize("mode", ["article", "full", "fast"])
@pytest.mark.parametrize(
    "before",
    ["<nav><a href=/>Home</a></nav>", "<header><a href=/>Birds</a> <a href=/b>B</a></header>"],
)
def test_the_heading_of_a_bare_page_stays(mode: Any, before: str) -> None:
    page = f"<title>Kestrels</title>{before}<h1>Kestrels</h1><p>{FILL}".encode()
    assert "# Kestrels\n\n" in extract(page, "https://a.example/", mode=mode).content


@pytest.mark.parametrize("mode", ["article", "full", "fast"])
def test_a_picture_alone_in_its_block_is_printed_where_pictures_are_wanted(mode: Any) -> None:
    inside = (
        "<figure><img src=/levels.png alt='Water levels'></figure><p>And in other years:</p>"
        "<p><a href=/big><img data-src=flows.png src=data:image/gif;base64,R0 alt=Flows></a></p>"
    )
    menu = "<nav><img src=/logo.png alt=Logo></nav>"
    page = article(inside).replace(b"<article>", menu.encode() + b"<article>")
    options = HtmlOptions(mode=mode, images="url")
    shown = extract(page, "https://a.example/x", options=options).content
    assert "\n\n![Water levels](https://a.example/levels.png)\n\n" in shown
    assert "![Flows](https://a.example/flows.png)" in shown
    assert "logo.png" not in shown
    assert "levels.png" not in extract(page, "https://a.example/x", mode=mode).content


@pytest.mark.parametrize("mode", ["article", "full", "fast"])
def test_a_list_of_links_inside_the_text_stays(mode: Any) -> None:
    links = "".join(f"<li><a href=/{n}>{n}</a></li>" for n in ("Python", "Ruby", "JavaScript"))
    inside = f"<ul><li><p>Index that scales.</p></li></ul><ul>{links}</ul>"
    content = extract(article(inside), "https://a.example/", mode=mode).content
    assert "- [Ruby](https://a.example/Ruby)" in content
