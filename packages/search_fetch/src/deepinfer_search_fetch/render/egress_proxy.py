"""The browser's only way out: an HTTP proxy on loopback that vets every single connection.

CONNECT for https and WebSockets, absolute-form requests for http. Each one goes through the URL
parser, the address policy and one look-up of its own, so neither a sub-resource nor a name that
changes its address between two requests reaches anything a fetch could not reach.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.errors import InvalidRequestError, RefusedError, SearchFetchError
from deepinfer_search_fetch.net.dial import READ_BYTES, Dialer

MAX_CONNECTIONS = 64
_HOP_BY_HOP = ("connection", "proxy-connection", "proxy-authorization", "keep-alive", "upgrade")


class EgressProxy:
    """`start`, then `port`; `begin` before each page resets its byte budget and counters."""

    def __init__(self, dialer: Dialer, limits: Limits, max_bytes: int) -> None:
        self._dialer = dialer
        self._limits = limits
        self._max_bytes = max_bytes
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._budget = max_bytes
        self.refused: list[RefusedError] = []

    @property
    def port(self) -> int:
        if self._server is None:
            raise RuntimeError("the proxy is not started")
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._accepted, "127.0.0.1", 0, limit=self._limits.header_bytes
        )

    def begin(self) -> None:
        """A new page: full budget; what the previous page left open is closed."""
        self._drop_connections()
        self._budget = self._max_bytes
        self.refused = []

    @property
    def exhausted(self) -> bool:
        return self._budget <= 0

    async def close(self) -> None:
        self._drop_connections()
        if self._server is not None:
            self._server.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()

    def _drop_connections(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                raise InvalidRequestError("invalid_argument", "too many connections")
            async with asyncio.timeout(self._limits.total_seconds * 2):
                await self._serve(reader, writer)
        except SearchFetchError as error:
            if isinstance(error, RefusedError):
                self.refused.append(error)
            with contextlib.suppress(OSError):
                writer.write(
                    b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 0\r\n"
                    b"X-Refused: " + error.code.encode() + b"\r\n\r\n"
                )
                await writer.drain()
        except (
            OSError,
            TimeoutError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            # The page is over or the peer is gone: nobody is left to be told.
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._limits.idle_seconds):
            line, headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        method, _, rest = line.partition(" ")
        target = rest.rpartition(" ")[0]
        if method == "CONNECT":
            there, back, _ = await self._dialer.dial(urls.parse(f"https://{target}/"))
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self._both_ways((reader, writer), (there, back))
            return
        url = urls.parse(target)
        if url.scheme != "http" or _value(headers, "transfer-encoding"):
            raise InvalidRequestError("invalid_argument", "not a request this proxy forwards")
        length = _value(headers, "content-length") or "0"
        if not length.isdigit():
            raise InvalidRequestError("invalid_argument", "malformed Content-Length")
        upstream_reader, upstream_writer, _ = await self._dialer.dial(url)
        try:
            kept = [h for h in headers if h[0].lower() not in (*_HOP_BY_HOP, "host")]
            head = [("Host", url.authority), *kept, ("Connection", "close")]
            upstream_writer.write(_head(f"{method} {url.target} HTTP/1.1", head))
            await self._copy(reader, upstream_writer, int(length))
            await self._answer(upstream_reader, writer)
        finally:
            upstream_writer.transport.abort()

    async def _answer(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One response, then close: a second request on this connection would not be vetted."""
        while True:
            async with asyncio.timeout(self._limits.first_byte_seconds):
                line, headers = _parse_head(await upstream.readuntil(b"\r\n\r\n"))
            if not line.split(" ", 2)[1:2][0].startswith("1"):
                break
        kept = [h for h in headers if h[0].lower() not in _HOP_BY_HOP]
        writer.write(_head(line, [*kept, ("Connection", "close")]))
        await self._copy(upstream, writer, None)

    async def _both_ways(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        tasks = [
            asyncio.create_task(self._copy(client[0], upstream[1], None)),
            asyncio.create_task(self._copy(upstream[0], client[1], None)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            upstream[1].transport.abort()

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, length: int | None
    ) -> None:
        """Copy `length` bytes, or until the end, within the page's budget and the idle limit."""
        left = length
        while left is None or left > 0:
            async with asyncio.timeout(self._limits.idle_seconds):
                data = await source.read(READ_BYTES if left is None else min(left, READ_BYTES))
            if not data:
                return
            self._budget -= len(data)
            if self._budget <= 0:
                return
            sink.write(data)
            await sink.drain()
            left = None if left is None else left - len(data)


def _parse_head(raw: bytes) -> tuple[str, list[tuple[str, str]]]:
    line, *rest = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    if len(line.split(" ")) < 2:
        raise InvalidRequestError("invalid_argument", "malformed start line")
    pairs = [h.partition(":") for h in rest]
    return line, [(name, value.strip()) for name, _, value in pairs]


def _head(line: str, headers: Sequence[tuple[str, str]]) -> bytes:
    text = "\r\n".join([line, *(f"{name}: {value}" for name, value in headers)])
    return (text + "\r\n\r\n").encode("latin-1", "replace")


def _value(headers: Sequence[tuple[str, str]], name: str) -> str | None:
    return next((value for key, value in headers if key.lower() == name), None)
