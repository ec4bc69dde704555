from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import resource
import socket
import time
import zlib
from typing import Any

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch import LimitError, Limits, SearchFetchError, UpstreamError, urls
from deepinfer_search_fetch.net.chain import follow
from deepinfer_search_fetch.net.decode import decode_body
from deepinfer_search_fetch.net.guard import AddressPolicy
from deepinfer_search_fetch.net.transport import Response, Transport

Listener = Any  # see conftest
FAST = Limits(
    first_byte_seconds=0.3,
    idle_seconds=0.3,
    wire_bytes=100_000,
    header_bytes=8192,
    min_rate_grace_seconds=0.2,
    min_bytes_per_second=1000,
)


@pytest.fixture
def get(site: Listener, make_resolver: Any) -> Any:
    policy = AddressPolicy(
        ports=frozenset({site.port}), allow=(ipaddress.ip_network("127.0.0.2/32"),)
    )
    transport = Transport(policy, make_resolver({"public.test": [["127.0.0.2"]]}), FAST, "agent/1")

    def run(path: str = "/", *, chain: bool = False) -> Any:
        url = urls.parse(f"http://public.test:{site.port}{path}")
        return asyncio.run(follow(transport, url, (), FAST) if chain else transport.get(url))

    return run


def send(*parts: bytes, pause: float = 0.0, repeat: int = 1) -> Any:
    def behave(connection: socket.socket, _: bytes) -> None:
        for part in [*parts[:1], *list(parts[1:]) * repeat]:
            connection.sendall(part)
            time.sleep(pause)

    return behave


def test_a_plain_page_arrives_whole(get: Any, site: Listener) -> None:
    site.page("/", "hello", headers=("X-One: 1",))
    response: Response = get()
    assert (response.status, response.body, response.header("x-one")) == (200, b"hello", "1")
    assert b"User-Agent: agent/1" in site.requests[0]
    assert b"Cookie" not in site.requests[0]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda b: zlib.compress(b)[2:-4]),
        ("br", brotli.compress),
        ("zstd", zstandard.ZstdCompressor().compress),
        ("identity", lambda b: b),
        ("gzip, br", lambda b: brotli.compress(gzip.compress(b))),
    ],
)
def test_every_content_encoding_is_undone(encoding: str, encode: Any) -> None:
    body = b"the same text " * 500
    assert decode_body(encode(body), encoding, Limits()) == body


def test_several_gzip_members_are_one_body() -> None:
    data = gzip.compress(b"one ") + gzip.compress(b"two")
    assert decode_body(data, "gzip", Limits()) == b"one two"


def bombs() -> list[tuple[str, bytes]]:
    zeros = b"\0" * (80 * 1024 * 1024)
    flat = gzip.compress(zeros, 9)
    return [
        ("gzip", flat),
        ("gzip, gzip", gzip.compress(flat)),
        ("br", brotli.compress(zeros, quality=1)),
        ("zstd", zstandard.ZstdCompressor().compress(zeros)),
        ("gzip, gzip, gzip", gzip.compress(gzip.compress(flat))),
    ]


def test_compression_bombs_stop_early_and_small() -> None:
    cases = bombs()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for encoding, data in cases:
        with pytest.raises(LimitError) as caught:
            decode_body(data, encoding, Limits())
        assert caught.value.code == "decompression_bomb"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300 * 1024


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "br", "zstd", "gzip, br"]))
def test_damaged_bodies_are_our_errors_or_bytes(data: bytes, encoding: str) -> None:
    with contextlib.suppress(SearchFetchError):
        assert isinstance(decode_body(data, encoding, Limits()), bytes)


@pytest.mark.parametrize(
    ("behaviour", "codes"),
    [
        pytest.param(send(b""), {"upstream_http", "connect_failure"}, id="closes at once"),
        pytest.param(send(b"nonsense\r\n\r\n"), {"upstream_http"}, id="not http"),
        pytest.param(send(b"", b"", pause=0.6), {"timeout"}, id="never answers"),
        pytest.param(
            send(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n"),
            {"response_too_large"},
            id="announces too much",
        ),
        pytest.param(
            send(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 10_000, repeat=30),
            {"response_too_large"},
            id="sends too much",
        ),
        pytest.param(
            send(b"HTTP/1.1 200 OK\r\n", b"A: " + b"x" * 900 + b"\r\n", repeat=40),
            {"response_too_large", "upstream_http"},
            id="endless headers",
        ),
        pytest.param(
            send(b"", b"HTTP/1.1 100 Continue\r\n\r\n", repeat=50),
            {"response_too_large"},
            id="flood of 1xx",
        ),
        pytest.param(
            send(b"HTTP/1.1 200 OK\r\n\r\n", b"x", pause=0.05, repeat=100),
            {"timeout"},
            id="slow drip",
        ),
        pytest.param(
            send(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", b"", pause=0.6),
            {"timeout", "upstream_http"},
            id="stops in the body",
        ),
        pytest.param(
            send(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
                b"T: " + b"x" * 900 + b"\r\n",
                repeat=40,
            ),
            {"response_too_large", "upstream_http"},
            id="endless trailers",
        ),
    ],
)
def test_hostile_servers_end_within_their_limits(
    behaviour: Any, codes: set[str], get: Any, site: Listener
) -> None:
    site.behaviour = behaviour
    with pytest.raises(SearchFetchError) as caught:
        get()
    assert caught.value.code in codes


def test_redirects_are_followed_and_recorded(get: Any, site: Listener) -> None:
    site.page("/", "", status="301 Moved", headers=("Location: /b",))
    site.page("/b", "", status="307 Temporary", headers=("Location: c?x=1",))
    site.page("/c?x=1", "end")
    page = get(chain=True)
    assert page.response.body == b"end"
    assert [h.status for h in page.hops] == [301, 307]
    assert page.final.target == "/c?x=1"


@pytest.mark.parametrize(
    ("pages", "code"),
    [
        ({"/": "/b", "/b": "/"}, "redirect_loop"),
        ({f"/{i or ''}": f"/{i + 1}" for i in range(20)}, "too_many_redirects"),
    ],
)
def test_endless_redirects_end(pages: dict[str, str], code: str, get: Any, site: Listener) -> None:
    for path, location in pages.items():
        site.page(path, "", status="302 Found", headers=(f"Location: {location}",))
    with pytest.raises(UpstreamError) as caught:
        get(chain=True)
    assert caught.value.code == code


def test_quick_refreshes_are_followed_and_slow_ones_are_not(get: Any, site: Listener) -> None:
    site.page("/", '<META content="1; URL=/next" HTTP-EQUIV=refresh>')
    site.page("/next", "<meta http-equiv='refresh' content='60;url=/never'>stay")
    page = get(chain=True)
    assert page.final.target == "/next"
    assert "/never" not in site.paths()


def test_a_page_that_reloads_itself_is_a_page(get: Any, site: Listener) -> None:
    site.page("/", '<meta http-equiv=refresh content="3;url=/">text')
    assert get(chain=True).response.body.endswith(b"text")
