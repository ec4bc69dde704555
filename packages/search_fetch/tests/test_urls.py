from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch import InvalidRequestError, RefusedError, SearchFetchError, urls


@pytest.mark.parametrize(
    ("text", "host", "rest"),
    [
        ("HTTP://EXAMPLE.com", "example.com", "/"),
        ("http://example.com./x", "example.com", "/x"),
        ("http://1.1/", "1.0.0.1", "/"),
        ("http://0x7f.1/", "127.0.0.1", "/"),
        ("http://017700000001/", "127.0.0.1", "/"),
        ("http://[2606:4700::1111]/", "2606:4700::1111", "/"),
        ("http://bücher.de/ü?q=ü", "xn--bcher-kva.de", "/%C3%BC?q=%C3%BC"),
        ("http://a.com/b/../c/./d/%2e%2e/e", "a.com", "/c/e"),
        ("http://a.com/%0d%0aHost:%20x", "a.com", "/%0d%0aHost:%20x"),
        ("http://a.com?x=1#frag", "a.com", "/?x=1"),
        ("  http://a.com/ \n", "a.com", "/"),
        ("http://①②⑦.⓪.⓪.①/", "127.0.0.1", "/"),
        ("http://my_host.example.com/", "my_host.example.com", "/"),
    ],
)
def test_hosts_and_targets_are_normalised(text: str, host: str, rest: str) -> None:
    url = urls.parse(text)
    assert (url.host, url.target) == (host, rest)


@pytest.mark.parametrize(
    "text",
    [
        "http://user@example.com/",
        "http://@example.com/",
        "http://a:b@127.0.0.1/",
        "http://exa\tmple.com/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com%00.evil/",
        "http:///127.0.0.1/",
        "http:127.0.0.1/",
        "//127.0.0.1/",
        "http://a.com:0/",
        "http://a.com:99999/",
        "http://a.com:-1/",
        "http://1.2.3.4.5/",
        "http://256.1.1.1.1/",
        "http://999999999999/",
        "http://[fe80::1%25lo]/",
        "http://[::1/",
        "http://a..com/",
        "http://" + "a" * 64 + ".com/",
        "http://exa mple.com/",
        "http://a.com/" + "x" * 9000,
        "",
    ],
)
def test_malformed_urls_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        urls.parse(text)
    assert caught.value.code == "invalid_url"


@pytest.mark.parametrize(
    "text",
    ["file:///etc/passwd", "FILE:/x", "gopher://a/", "data:text/html,x", "javascript:alert(1)",
     "ftp://a/", "view-source:http://a/", "about:blank", "jar:http://a!/b"],
)  # fmt: skip
def test_other_schemes_are_refused(text: str) -> None:
    with pytest.raises(RefusedError) as caught:
        urls.parse(text)
    assert caught.value.code == "blocked_scheme"


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("x", "http://a.com/b/x"),
        ("/x", "http://a.com/x"),
        ("?q", "http://a.com/b/c?q"),
        ("#f", "http://a.com/b/c?k=1#f"),
        ("//o.com/x", "http://o.com/x"),
        ("../x", "http://a.com/x"),
        ("https://z.com", "https://z.com/"),
        ("", "http://a.com/b/c?k=1"),
    ],
)
def test_references_resolve_against_the_base(reference: str, expected: str) -> None:
    assert str(urls.join(urls.parse("http://a.com/b/c?k=1"), reference)) == expected


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.text(max_size=10))
def test_parsing_never_crashes_and_is_idempotent(rest: str, scheme: str) -> None:
    for text in (f"http://{rest}", f"{scheme}://{rest}", rest):
        try:
            url = urls.parse(text)
        except SearchFetchError:
            continue
        again = urls.parse(str(url))
        assert str(again) == str(url)
        assert again.host == url.host
        assert not set("\r\n\t @\\") & set(url.host + url.target)


def test_domains_match_on_labels() -> None:
    assert urls.domain_matches("www.example.com", "example.com")
    assert urls.domain_matches("example.com", "EXAMPLE.com.")
    assert not urls.domain_matches("badexample.com", "example.com")
    assert not urls.domain_matches("example.com", "")


def test_registrable_domain_knows_private_suffixes() -> None:
    assert urls.registrable_domain("a.b.example.co.uk") == "example.co.uk"
    assert urls.registrable_domain("me.github.io") == "me.github.io"
    assert urls.registrable_domain("127.0.0.1") == "127.0.0.1"


def test_canonical_form_drops_tracking_and_sorts_the_query() -> None:
    url = urls.parse("https://A.com/x/index.html?utm_source=a&b=2&a=1#f")
    assert urls.canonical(url) == "https://a.com/x/?a=1&b=2"
    assert urls.strip_tracking("https://a.com/?b=2&fbclid=x&a=1#f") == "https://a.com/?b=2&a=1#f"
