"""Name look-up: exactly one per hop, all records at once."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from deepinfer_search_fetch.errors import UpstreamError


class Resolver(Protocol):
    """Anything that turns a host name into numeric addresses (A and AAAA together)."""

    async def resolve(self, host: str) -> list[str]: ...


class SystemResolver:
    """The C library's resolver, with a time limit."""

    def __init__(self, timeout_seconds: float = 3.0) -> None:
        self._timeout_seconds = timeout_seconds

    async def resolve(self, host: str) -> list[str]:
        """Numeric addresses in the system's order, without duplicates.

        Raises UpstreamError(dns_failure) when there are none or the time is over.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                records = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise UpstreamError("dns_failure", "the name look-up timed out") from None
        except (OSError, UnicodeError):
            raise UpstreamError("dns_failure", "the host name does not resolve") from None
        addresses = dict.fromkeys(str(record[4][0]).partition("%")[0] for record in records)
        if not addresses:
            raise UpstreamError("dns_failure", "the host name does not resolve")
        return list(addresses)
