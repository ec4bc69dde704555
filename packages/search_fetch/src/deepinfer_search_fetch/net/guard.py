"""Which names, ports and addresses may be connected to.

An explicit table instead of `ipaddress.is_global`, which calls NAT64, 6to4, IPv4-compatible,
multicast and several cloud metadata addresses global.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.errors import RefusedError
from deepinfer_search_fetch.urls import Url, domain_matches

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_DENIED_V4 = tuple(
    ipaddress.IPv4Network(n)
    for n in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "168.63.129.16/32",  # a cloud's wire server, in public space
    )
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
_DENIED_V6 = tuple(
    ipaddress.IPv6Network(n)
    for n in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "2620:4f:8000::/48")
)
_NAT64 = tuple(ipaddress.IPv6Network(n) for n in ("64:ff9b::/96", "64:ff9b:1::/48"))

_DENIED_SUFFIXES = (
    "localhost",
    "local",
    "internal",
    "intranet",
    "lan",
    "home.arpa",
    "corp",
    "onion",
    "metadata",
    "instance-data",
)


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Decides before any byte is sent; immutable, so no request can widen it."""

    ports: frozenset[int] = frozenset({80, 443, 8080, 8443})
    allow: tuple[Network, ...] = ()
    deny: tuple[Network, ...] = ()
    allow_names: tuple[str, ...] = ()
    allow_nat64: bool = False
    own_addresses: frozenset[Address] = field(default_factory=frozenset)
    own_names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def from_config(cls, config: Config) -> AddressPolicy:
        return cls(
            ports=frozenset(config.ports),
            allow=tuple(ipaddress.ip_network(c) for c in config.allow_cidrs),
            deny=tuple(ipaddress.ip_network(c) for c in config.deny_cidrs),
            allow_names=config.allow_names,
            allow_nat64=config.allow_nat64,
            own_addresses=machine_addresses(),
            own_names=frozenset({socket.gethostname().lower()}),
        )

    def check_url(self, url: Url) -> None:
        """Raise RefusedError for a denied port, name or literal address."""
        if url.port not in self.ports:
            raise RefusedError(
                "blocked_port",
                f"port {url.port} is not allowed; the operator allows {sorted(self.ports)}",
            )
        if url.host_kind == "name":
            self._check_name(url.host)
        else:
            self.check_addresses([url.host])

    def check_addresses(self, addresses: Iterable[str]) -> None:
        """Raise RefusedError if any of the addresses is denied: mixed answers fail closed.

        The message never tells which address a name resolved to.
        """
        for text in addresses:
            if self.denied(ipaddress.ip_address(text)):
                raise RefusedError("blocked_address", "the host's address is not public")

    def denied(self, address: Address) -> bool:
        """True if `address` must not be connected to."""
        if any(address in network for network in self.deny):
            return True
        if any(address in network for network in self.allow):
            return False
        if address in self.own_addresses:
            return True
        if isinstance(address, ipaddress.IPv4Address):
            return any(address in network for network in _DENIED_V4)
        if self.allow_nat64 and any(address in network for network in _NAT64):
            return self.denied(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _GLOBAL_V6 or any(address in network for network in _DENIED_V6):
            return True
        return _is_isatap(address)

    def _check_name(self, name: str) -> None:
        if any(domain_matches(name, allowed) for allowed in self.allow_names):
            return
        private = "." not in name or any(domain_matches(name, s) for s in _DENIED_SUFFIXES)
        if private or name in self.own_names:
            raise RefusedError("blocked_address", "the host name is not a public one")


def _is_isatap(address: ipaddress.IPv6Address) -> bool:
    return (int(address) >> 32) & 0xFFFF_FFFF in (0x0000_5EFE, 0x0200_5EFE)


def machine_addresses() -> frozenset[Address]:
    """Every address of this machine's interfaces, public ones too (Linux; empty elsewhere)."""
    found: set[Address] = set()
    found.update(_local_v4(Path("/proc/net/fib_trie")))
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        found.add(ipaddress.IPv6Address(int(line.split()[0], 16)))
    return frozenset(found)


def _local_v4(table: Path) -> set[Address]:
    """Addresses whose line is followed by '/32 host LOCAL' in the kernel's routing trie."""
    try:
        lines = table.read_text("ascii").splitlines()
    except OSError:
        return set()
    found: set[Address] = set()
    for line, following in itertools.pairwise(lines):
        if following.strip() == "/32 host LOCAL":
            found.add(ipaddress.IPv4Address(line.split()[-1]))
    return found
