"""Resolve once, vet every answer, connect to exactly what was vetted."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence

from deepinfer_search_fetch.config import Limits
from deepinfer_search_fetch.egress import READ_BYTES, EgressProxy
from deepinfer_search_fetch.errors import RefusedError, UpstreamError
from deepinfer_search_fetch.net.guard import AddressPolicy
from deepinfer_search_fetch.net.resolver import Resolver
from deepinfer_search_fetch.urls import Url


class Dialer:
    """The only place of this package that opens an outgoing connection.

    proxy: the operator's, through which all of them go; what may be reached is decided here.
    """

    def __init__(
        self,
        policy: AddressPolicy,
        resolver: Resolver,
        limits: Limits,
        proxy: EgressProxy | None = None,
    ) -> None:
        self._policy = policy
        self._resolver = resolver
        self._limits = limits
        self._proxy = proxy

    async def dial(self, url: Url) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """A TCP connection for `url`, and the numeric address at its end: policy first, then one
        look-up, then the vetted addresses.

        Raises RefusedError(blocked_*) before any byte is sent, UpstreamError(dns_failure,
        connect_failure).
        """
        self._policy.check_url(url)
        addresses = (
            [url.host] if url.host_kind != "name" else await self._resolver.resolve(url.host)
        )
        if not addresses:
            raise UpstreamError("dns_failure", "the host name does not resolve")
        self._policy.check_addresses(addresses)
        problem: Exception | None = None
        for address in _interleave(addresses):
            try:
                async with asyncio.timeout(self._limits.connect_seconds):
                    return await self._connect(address, url.port)
            except (OSError, TimeoutError, UpstreamError) as error:
                problem = error
        if isinstance(problem, UpstreamError):
            raise problem
        where = "the egress proxy cannot be reached, or" if self._proxy is not None else ""
        raise UpstreamError(
            "connect_failure", f"{where} no address of the host accepts a connection".strip()
        ) from problem

    async def _connect(
        self, address: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        if self._proxy is not None:
            return *await self._proxy.connect(address, port), address
        reader, writer = await asyncio.open_connection(address, port, limit=READ_BYTES)
        if ipaddress.ip_address(_peer_address(writer)) != ipaddress.ip_address(address):
            writer.transport.abort()
            raise RefusedError("blocked_address", "the connection went to another address")
        return reader, writer, address


def _peer_address(writer: asyncio.StreamWriter) -> str:
    """The numeric address at the other end, without an IPv6 zone."""
    return str(writer.get_extra_info("peername")[0]).partition("%")[0]


def _interleave(addresses: Sequence[str]) -> list[str]:
    """Alternate the address families, first family first (the order of Happy Eyeballs)."""
    six = [a for a in addresses if ":" in a]
    four = [a for a in addresses if ":" not in a]
    first, second = (six, four) if addresses and ":" in addresses[0] else (four, six)
    ordered: list[str] = []
    for i in range(max(len(first), len(second))):
        ordered += first[i : i + 1] + second[i : i + 1]
    return ordered
