"""The operator's outgoing proxy. It is asked for the numeric address that was vetted, never for a
name, so that what is reached is what was checked; TLS goes through it from end to end.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from deepinfer_search_fetch.errors import UpstreamError

READ_BYTES = 64 * 1024
_HOST = re.compile(r"[0-9a-f:.]{2,45}|[\w-]{1,63}(?:\.[\w-]{1,63})*", re.ASCII)
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")


@dataclass(frozen=True, slots=True)
class EgressProxy:
    """authorization: value of Proxy-Authorization, None for none."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> EgressProxy:
        """From `http://[user:password@]host:port`. Raises ValueError, which tells no password."""
        problem = ValueError("wanted http://[user:password@]host:port")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise problem from None
        if parts.scheme != "http" or not _HOST.fullmatch(host or "") or not port:
            raise problem
        if parts.path.strip("/") or parts.query or host is None:
            raise problem
        if parts.username is None:
            return cls(host, port)
        account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return cls(host, port, "Basic " + b64encode(account.encode()).decode())

    async def connect(
        self, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to `address` (numeric) through the proxy.

        Raises UpstreamError(connect_failure), OSError where the proxy cannot be reached.
        """
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=READ_BYTES)
        try:
            await self._ask(reader, writer, f"[{address}]" if ":" in address else address, port)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()
            raise UpstreamError(
                "connect_failure", "the egress proxy closed before it answered"
            ) from None
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        place = f"{host}:{port}"
        lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
        if self.authorization is not None:
            lines.append(f"Proxy-Authorization: {self.authorization}")
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
        await writer.drain()
        status = _STATUS.match(await reader.readuntil(b"\r\n\r\n"))
        if status is None or not status[1].startswith(b"2"):
            told = status[1].decode() if status else "no HTTP"
            raise UpstreamError(
                "connect_failure",
                f"the egress proxy answers {told} to CONNECT {place}; check egress_proxy and which"
                " ports the proxy lets through",
            )
