"""One HTTP/1.1 exchange with one vetted address.

Nothing is shared between exchanges: no pool, no cookies, no proxy from the environment, no second
look-up. The socket's peer is compared with the vetted address before a byte is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import h11

from deepinfer_search_fetch.admission import WorkThreads
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.egress import READ_BYTES, EgressProxy
from deepinfer_search_fetch.errors import LimitError, UpstreamError
from deepinfer_search_fetch.net.decode import ACCEPT_ENCODING, decode_body
from deepinfer_search_fetch.net.dial import Dialer
from deepinfer_search_fetch.net.guard import AddressPolicy
from deepinfer_search_fetch.net.resolver import Resolver
from deepinfer_search_fetch.urls import Url, registrable_domain

MAX_INFORMATIONAL = 8
_SHORT_BYTES = 16 * 1024
# Files of these types are larger than pages are.
_DOCUMENT_TYPE = re.compile(
    r"\s*application/(?:pdf|epub\+zip|vnd\.(?:openxmlformats|oasis\.opendocument))", re.I
)


@dataclass(frozen=True, slots=True)
class Response:
    """status, headers with lower-case names in wire order, decoded body.

    peer: the address that answered, "" for a response from the cache. digest: SHA-256 of the body.
    """

    url: Url
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    wire_bytes: int
    peer: str = ""
    digest: str = ""

    def header(self, name: str) -> str | None:
        """The first header of that lower-case name."""
        return next((value for key, value in self.headers if key == name), None)


class Transport:
    """Sends GET requests under an `AddressPolicy`."""

    def __init__(
        self,
        policy: AddressPolicy,
        resolver: Resolver,
        limits: Limits,
        user_agent: str,
        *,
        proxy: EgressProxy | None = None,
        threads: WorkThreads | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dialer = Dialer(policy, resolver, limits, proxy)
        self._limits = limits
        self._user_agent = user_agent
        self._threads = threads or WorkThreads("decoding", 2)
        self._tls = tls if tls is not None else ssl.create_default_context()
        self._clock = clock

    async def get(
        self, url: Url, headers: Sequence[tuple[str, str]] = (), *, max_bytes: int | None = None
    ) -> Response:
        """One GET without following redirects; every check runs before the first byte is sent.

        Raises RefusedError, UpstreamError or LimitError.
        """
        reader, writer, peer = await self._dialer.dial(url)
        try:
            if url.scheme == "https":
                await self._start_tls(url, writer)
            exchange = _Exchange(reader, writer, self._limits, max_bytes, self._clock)
            status, raw_headers, wire = await exchange.run(url, self._request_headers(url, headers))
        finally:
            writer.transport.abort()
        encoding = ", ".join(value for name, value in raw_headers if name == "content-encoding")
        if not encoding and len(wire) <= min(_SHORT_BYTES, self._limits.decoded_bytes):
            body, digest = wire, body_digest(wire)  # a thread's turn takes longer
        else:
            body, digest = await self._threads.run_for(
                registrable_domain(url.host), _decoded, wire, encoding, self._limits
            )
        return Response(url, status, raw_headers, body, len(wire), peer, digest)

    def _request_headers(self, url: Url, extra: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        return [
            ("Host", url.authority),
            ("User-Agent", self._user_agent),
            ("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"),
            ("Accept-Encoding", ACCEPT_ENCODING),
            ("Connection", "close"),
            *extra,
        ]

    async def _start_tls(self, url: Url, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._limits.tls_seconds):
                await writer.start_tls(self._tls, server_hostname=url.host)
        except (ssl.SSLError, OSError, TimeoutError) as error:
            writer.transport.abort()
            reason = getattr(error, "verify_message", None) or type(error).__name__
            raise UpstreamError("tls_failure", f"TLS failed: {reason}") from None


def _decoded(wire: bytes, encoding: str, limits: Limits) -> tuple[bytes, str]:
    body = decode_body(wire, encoding, limits)
    return body, body_digest(body)


def body_digest(body: bytes) -> str:
    """What tells one body from another."""
    return hashlib.sha256(body).hexdigest()


class _Exchange:
    """Request out, response in, with idle, rate and size limits."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: Limits,
        max_bytes: int | None,
        clock: Callable[[], float],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._asked_bytes = max_bytes
        self._max_bytes = max_bytes or limits.wire_bytes
        self._clock = clock
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.header_bytes)
        self._received = 0
        self._informational = 0

    async def run(
        self, url: Url, headers: list[tuple[str, str]]
    ) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
        try:
            # A validator goes back as the bytes it came in; h11 itself encodes ASCII only.
            raw = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers]
            request = h11.Request(method="GET", target=url.target, headers=raw)
            out = self._http.send(request) or b""
            out += self._http.send(h11.EndOfMessage()) or b""
            async with self._within("idle_seconds", "sending the request took too long"):
                self._writer.write(out)
                await self._writer.drain()
            async with self._within("first_byte_seconds", "no answer within the time limit"):
                response = await self._response()
            return response[0], response[1], await self._body()
        except h11.RemoteProtocolError as error:
            if "Receive buffer too long" in str(error):
                raise LimitError(
                    "response_too_large",
                    f"headers or trailers exceed {self._limits.header_bytes} bytes",
                    details={"limit": "header_bytes", "value": self._limits.header_bytes},
                ) from None
            raise UpstreamError(
                "upstream_http", f"not valid HTTP: {error}", retryable=False
            ) from None
        except OSError as error:
            raise UpstreamError("connect_failure", f"connection broke: {error}") from None

    async def _response(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        while True:
            event = await self._next()
            if isinstance(event, h11.InformationalResponse):
                self._informational += 1
                if self._informational > MAX_INFORMATIONAL:
                    raise LimitError(
                        "response_too_large", "more informational responses than are accepted"
                    )
            elif isinstance(event, h11.Response):
                kind = next((v for k, v in event.headers if k == b"content-type"), b"")
                if self._asked_bytes is None and _DOCUMENT_TYPE.match(kind.decode("latin-1")):
                    self._max_bytes = max(self._max_bytes, self._limits.document_bytes)
                length = next((v for k, v in event.headers if k == b"content-length"), b"0")
                self._check_size(int(length))
                pairs = [(k.decode("ascii"), v.decode("latin-1")) for k, v in event.headers]
                return event.status_code, tuple(pairs)
            else:
                raise UpstreamError("upstream_http", "the server closed before answering")

    async def _body(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        started = self._clock()
        while True:
            async with self._within("idle_seconds", "the server stopped sending"):
                event = await self._next()
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                size += len(event.data)
                self._check_size(size)
                self._check_rate(size, self._clock() - started)
            elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                return b"".join(parts)

    async def _next(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(READ_BYTES)
            self._received += len(data)
            # Framing (chunk headers, trailers) counts too, or endless framing costs nothing.
            if self._received > 2 * self._max_bytes + self._limits.header_bytes:
                self._check_size(self._received)
            self._http.receive_data(data)
        return event

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise LimitError(
                "response_too_large",
                f"body exceeds {self._max_bytes} bytes on the wire",
                details={"limit": "wire_bytes", "value": self._max_bytes},
            )

    def _check_rate(self, size: int, seconds: float) -> None:
        limits = self._limits
        if seconds > limits.min_rate_grace_seconds and size < limits.min_bytes_per_second * seconds:
            raise UpstreamError(
                "timeout",
                f"the server sends less than {limits.min_bytes_per_second} bytes/s",
                details={"limit": "min_bytes_per_second", "value": limits.min_bytes_per_second},
            )

    @asynccontextmanager
    async def _within(self, limit: str, message: str) -> AsyncGenerator[None]:
        """Like asyncio.timeout, but its own expiry becomes UpstreamError(timeout)."""
        seconds = float(getattr(self._limits, limit))
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise UpstreamError(
                "timeout", f"{message} ({seconds:g} s)", details={"limit": limit, "value": seconds}
            ) from None
