# ruff: noqa: E501
"""What the pipeline remembers, refuses and follows: one claim a test."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    ContentError,
    FetchRequest,
    FetchResponse,
    RefusedError,
    SearchFetchError,
    UpstreamError,
)
from deepinfer_search_fetch.extract.present import outline
from deepinfer_search_fetch.extract.tokens import paginate
from deepinfer_search_fetch.fetching import Fetcher
from deepinfer_search_fetch.net.charset import decode_text
from deepinfer_search_fetch.net.robots import robots_directives

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
TEXT = "<p>" + "Voles live in the grass of the meadow. " * 20


def fetch(
    client: AsyncSearchFetch | Fetcher, site: Listener, path: str = "/", **fields: Any
) -> FetchResponse:
    request = FetchRequest(url=f"http://public.test:{site.port}{path}", **fields)
    return asyncio.run(client.fetch(request))


@pytest.mark.parametrize("status", ["404 Not Found", "410 Gone"])
def test_a_missing_page_is_remembered_for_ten_minutes(
    status: str, config: Config, site: Listener, make_resolver: Any
) -> None:
    now = [1_700_000_000.0]
    site.page("/", TEXT, status=status)
    resolver = make_resolver({"public.test": [["127.0.0.2"]]})
    fetcher = Fetcher(config, resolver=resolver, clock=lambda: now[0])
    for expected, max_age, wait in ((1, 86_400, 0), (1, 86_400, 599), (2, 0, 0), (3, 86_400, 601)):
        now[0] += wait
        with pytest.raises(UpstreamError) as caught:
            fetch(fetcher, site, max_age=max_age)
        assert (caught.value.http_status, len(site.requests)) == (404, expected)
    site.page("/", TEXT)
    now[0] += 601
    assert fetch(fetcher, site).content
    assert fetch(fetcher, site).cache.hit
    asyncio.run(fetcher.close())


def test_a_name_that_does_not_resolve_is_remembered_for_a_minute(
    config: Config, make_resolver: Any
) -> None:
    now = [1_700_000_000.0]
    resolver = make_resolver({})
    fetcher = Fetcher(config, resolver=resolver, clock=lambda: now[0])
    for wait, lookups in ((0, 1), (59, 1), (61, 2)):
        now[0] += wait
        with pytest.raises(UpstreamError) as caught:
            asyncio.run(fetcher.fetch(FetchRequest(url="http://nowhere.test/")))
        assert caught.value.code == "dns_failure"
        assert resolver.lookups["nowhere.test"] == lookups
    asyncio.run(fetcher.close())


@pytest.mark.parametrize("status", ["500 Oops", "502 Bad", "503 Busy", "504 Late"])
def test_a_page_that_fails_now_is_served_stale_for_a_day(
    status: str, config: Config, site: Listener, make_resolver: Any
) -> None:
    now = [1_700_000_000.0]
    site.page("/", TEXT)
    resolver = make_resolver({"public.test": [["127.0.0.2"]]})
    fetcher = Fetcher(config, resolver=resolver, clock=lambda: now[0])
    fetch(fetcher, site)
    site.page("/", "down", status=status)
    now[0] += 20 * 3600
    stale = fetch(fetcher, site, max_age=60)
    assert "Voles" in stale.content
    assert "stale" in stale.extraction.warnings
    now[0] += 5 * 3600
    with pytest.raises(UpstreamError):
        fetch(fetcher, site, max_age=60)
    asyncio.run(fetcher.close())


def test_a_304_may_change_how_long_the_page_stays_fresh(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", TEXT, headers=('ETag: "1"', "Cache-Control: max-age=0"))
    client = make_client(config)
    fetch(client, site)
    site.page("/", "", status="304 Not Modified", headers=("Cache-Control: max-age=600",))
    assert fetch(client, site).cache.revalidated
    assert fetch(client, site).cache.hit
    assert len(site.requests) == 2


@pytest.mark.parametrize(
    ("headers", "html", "kept"),
    [
        (("X-Robots-Tag: noarchive",), "", False),
        (("X-Robots-Tag: noindex, NoArchive",), "", False),
        (("X-Robots-Tag: otherbot: noarchive",), "", True),
        (("X-Robots-Tag: DeepInferFetch: noarchive",), "", False),
        ((), '<meta name="robots" content="noarchive">', False),
        ((), '<meta name="robots" content="noindex">', True),
    ],
)
def test_pages_that_forbid_archiving_are_not_kept(
    headers: tuple[str, ...],
    html: str,
    kept: bool,
    config: Config,
    site: Listener,
    make_client: MakeClient,
) -> None:
    site.page("/", html + TEXT, headers=headers)
    client = make_client(config)
    fetch(client, site)
    assert fetch(client, site).cache.hit is kept


def test_robots_headers_speak_to_all_or_to_us() -> None:
    def found(*values: str) -> frozenset[str]:
        return robots_directives([("x-robots-tag", v) for v in values])

    assert found("none") == {"none", "noindex"}
    assert found("a: noindex", "deepinferfetch: nofollow") == {"nofollow"}
    assert found("unavailable_after: 25 Jun 2030 15:00:00 PST, noindex") >= {"noindex"}


def test_processes_that_share_a_cache_make_one_request(
    config: Config, site: Listener, tmp_path: Path
) -> None:
    site.page("/", TEXT)
    answer = site.pages["/"]

    def slowly(connection: Any, _: bytes) -> None:
        time.sleep(1.0)
        connection.sendall(answer)

    site.behaviour = slowly
    script = (
        "import sys\n"
        "from deepinfer_search_fetch import Config, FetchRequest, SearchFetch\n"
        "config = Config.model_validate_json(sys.argv[1])\n"
        "with SearchFetch(config) as client:\n"
        "    client.fetch(FetchRequest(url=sys.argv[2], render='never'))\n"
    )
    arguments = [sys.executable, "-P", "-c", script, config.model_dump_json()]
    url = f"http://127.0.0.2:{site.port}/"
    # Whoever comes second finds the lock taken or the page stored, however late it starts.
    running = [subprocess.Popen([*arguments, url]) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert site.paths() == ["/"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_every_redirect_status_is_followed_with_get_to_a_relative_target(
    status: int, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/a/b", "", status=f"{status} Moved", headers=("Location: ../c?d#part",))
    site.page("/c?d", TEXT + '<a href="e">link</a>')
    response = fetch(make_client(config), site, "/a/b#top", format="links", mode="full")
    assert [r.split(b" ")[0] for r in site.requests] == [b"GET", b"GET"]
    assert response.final_url == f"http://public.test:{site.port}/c?d"
    assert [hop.status for hop in response.redirects] == [status]
    assert response.links
    assert response.links[0].url == f"http://public.test:{site.port}/e"


@pytest.mark.parametrize(
    "markup",
    ['<!-- <meta http-equiv="refresh" content="0;url=/next"> -->',
     "<script>x = '<meta http-equiv=refresh content=\"0;url=/next\">'</script>",
     '<meta http-equiv="refresh" content="30;url=/next">'],
)  # fmt: skip
def test_what_is_no_quick_refresh_is_not_followed(
    markup: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", markup + TEXT)
    assert fetch(make_client(config), site).redirects == []


@pytest.mark.parametrize(
    ("page", "code"),
    [
        ("<title>Page not found | Example</title><p>Sorry, nothing here.", "upstream_http"),
        ("<title>404 - Not Found</title><p>Try the search.", "upstream_http"),
        ("<title>Seite nicht gefunden</title><p>Leider.", "upstream_http"),
        ("<title>找不到页面</title><p>抱歉。", "upstream_http"),
        ("<title>Attention</title><p>Verify you are human by completing this.", "challenge_page"),
        ("<title>x</title><p>Before you continue to Example, accept.", "challenge_page"),
    ],
)
def test_walls_and_soft_404s_are_errors(
    page: str, code: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", page)
    with pytest.raises(SearchFetchError) as caught:
        fetch(make_client(config), site, mode="full")
    assert caught.value.code == code


@pytest.mark.parametrize(
    "page",
    ["<title>404 Not Found: a history</title>" + TEXT * 2,
     "<title>Lost and found</title><p>An umbrella was found in the reading room.",
     "<title>How captchas work</title>" + TEXT * 3 + "<p>Verify you are human."],
)  # fmt: skip
def test_pages_about_missing_pages_are_pages(
    page: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", page)
    assert fetch(make_client(config), site, mode="full").content


def test_a_document_that_changed_between_two_pages_says_so(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", "".join(f"<h2>Part {i}</h2>{TEXT}" for i in range(9)))
    client = make_client(config)
    first = fetch(client, site, mode="full", max_tokens=200)
    following = first.tokens.next_offset
    same = fetch(client, site, mode="full", max_tokens=200, offset=following)
    assert "content_changed" not in same.extraction.warnings
    site.page("/", "".join(f"<h2>Section {i}</h2>{TEXT}" for i in range(9)))
    other = fetch(client, site, mode="full", max_tokens=200, offset=following, max_age=0)
    assert "content_changed" in other.extraction.warnings


def test_a_batch_fetches_each_page_once_however_it_is_spelled(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/?a=1&b=2", TEXT)
    client = make_client(config)
    base = f"http://public.test:{site.port}"
    spelled = [f"{base}/?a=1&b=2", f"{base}/?a=1&b=2&utm_source=x", f"{base}/?a=1&b=2#part"]
    requests = [FetchRequest(url=u, store=False, max_age=0) for u in spelled]
    bad = [FetchRequest(url=f"{base}/none"), FetchRequest(url="http://127.0.0.1/")]

    async def run() -> dict[int, tuple[bool, str]]:
        return {
            item.index: (item.ok, item.response.url if item.response else item.error["code"])
            async for item in client.fetch_many([*requests, *bad], concurrency=1)
        }

    assert asyncio.run(run()) == {
        0: (True, spelled[0]), 1: (True, spelled[1]), 2: (True, spelled[2]),
        3: (False, "upstream_http"), 4: (False, "blocked_address"),
    }  # fmt: skip
    assert site.paths() == ["/?a=1&b=2", "/none"]


PIECES = ["Plain words here. And more of them!", "世界你好。再见。", "```py\n# no heading\n\nb = 2\n```",
          "| a | b |\n| --- | --- |\n| 1 | 2 |", "- x, y. z\n- y", "w" * 2000, "# H one, two. Three",
          "## 标题", "text\n### inside a block. Yes"]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=10))
def test_a_page_that_starts_at_an_outline_offset_starts_with_that_heading(
    blocks: list[str],
) -> None:
    content = "\n\n".join(blocks) + "\n"
    entries = outline(content)
    assert len(entries) == sum(line.startswith("#") for b in blocks for line in b.splitlines()
                               if "no heading" not in line)  # fmt: skip
    for entry in entries:
        page = paginate(content, entry.token_offset, 100).body.lstrip("\n")
        assert page.startswith("#" * entry.level + " ")


LABELS = {
    "utf-8": "Grüße, мир, 世界", "windows-1250": "Příliš žluťoučký kůň",
    "windows-1251": "Привет, мир", "koi8-r": "Привет, мир", "shift_jis": "日本語のテキスト",
    "euc-jp": "日本語のテキスト", "euc-kr": "안녕하세요 세계", "gb18030": "简体中文网页",
    "big5": "繁體中文網頁", "windows-1253": "Καλημέρα κόσμε", "windows-1255": "שלום עולם",
    "windows-1256": "مرحبا بالعالم",
}  # fmt: skip


@pytest.mark.parametrize("label", ["utf-8", "windows-1251", "shift_jis", "euc-jp", "gb18030"])
def test_undeclared_encodings_of_long_texts_are_detected(label: str) -> None:
    body = f"<p>{LABELS[label]}, {LABELS[label]}. " * 60
    found, _, source = decode_text(body.encode(label), "text/html")
    assert LABELS[label] in found
    assert source == "detected"


@pytest.mark.parametrize("label", LABELS)
def test_a_header_that_is_wrong_about_utf8_yields_to_the_page(label: str) -> None:
    body = f'<meta charset="{label}"><p>' + LABELS[label] * 20
    found, _, source = decode_text(body.encode(label), "text/html; charset=utf-8")
    assert LABELS[label] in found
    assert source == ("header" if label == "utf-8" else "meta")


@pytest.mark.parametrize(
    ("robots", "path", "allowed"),
    [
        (b"\xef\xbb\xbfUser-agent: *\r\nDisallow: /a\r\n", "/a", False),
        (b"User-agent: *\nDisallow:\n", "/a", True),
        (b"User-agent: *\nDisallow: /*.gif$\n", "/a.gif", False),
        (b"User-agent: *\nDisallow: /*.gif$\n", "/a.gif?x", True),
        (b"User-agent: *\nDisallow: /p\nAllow: /p\n", "/p", True),
        (b"User-agent: *\nDisallow: /a%3Cd\n", "/a%3cd", False),
        (b"User-agent: foo\nUser-agent: *\nDisallow: /x\n", "/x", False),
        (b"Disallow: /x\nUser-agent: *\n", "/x", True),
        (b"user-agent: deepinferfetch\nallow: /\nuser-agent: *\ndisallow: /\n", "/x", True),
        (b"User-agent: *\n" + b"#" * 600_000 + b"\nDisallow: /x\n", "/x", True),
    ],
)
def test_robots_examples(
    robots: bytes, path: str, allowed: bool, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/robots.txt", robots, content_type="text/plain")
    site.page(path, TEXT)
    client = make_client(config.model_copy(update={"robots": "respect"}))
    if allowed:
        assert fetch(client, site, path).robots.allowed
    else:
        with pytest.raises(RefusedError) as caught:
            fetch(client, site, path)
        assert caught.value.code == "robots_disallowed"
    assert path not in site.paths() or allowed


def test_robots_are_asked_once_a_day_and_after_five_redirects_given_up(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    for i in range(7):
        site.page(f"/r{i}", "", status="302 Found", headers=(f"Location: /r{i + 1}",))
    site.page("/robots.txt", "", status="302 Found", headers=("Location: /r0",))
    site.page("/", TEXT)
    client = make_client(config.model_copy(update={"robots": "respect"}))
    for _ in range(2):
        with pytest.raises(RefusedError):
            fetch(client, site)
    assert site.paths().count("/robots.txt") == 1
    assert "/r6" not in site.paths()


def test_large_documents_may_be_larger_than_pages(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    limits = config.limits.model_copy(update={"wire_bytes": 1000})
    client = make_client(config.model_copy(update={"limits": limits}))
    body = b"%PDF-1.7\n" + b"%" * 5000
    site.page("/p", body, content_type="application/pdf")
    site.page("/h", TEXT * 5)
    with pytest.raises(ContentError) as caught:
        fetch(client, site, "/p")
    assert caught.value.code == "unsupported_content_type"
    with pytest.raises(SearchFetchError) as limit:
        fetch(client, site, "/h")
    assert limit.value.code == "response_too_large"
