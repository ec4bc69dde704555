"""Which names, ports and addresses may be connected to.

An explicit table (`address_rules.json`) instead of `ipaddress.is_global`, which calls NAT64, 6to4,
IPv4-compatible, multicast and several cloud metadata addresses global.
"""

from __future__ import annotations

import ipaddress
import itertools
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_search_fetch.address_rules import Network, address_rules
from deepinfer_search_fetch.config import Config
from deepinfer_search_fetch.errors import RefusedError
from deepinfer_search_fetch.urls import Url, domain_matches

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Decides before any byte is sent; immutable, so no request can widen it."""

    ports: frozenset[int] = field(default_factory=lambda: address_rules().ports)
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
        if _within(address, self.deny):
            return True
        if _within(address, self.allow):
            return False
        if address in self.own_addresses:
            return True
        rules = address_rules()
        if isinstance(address, ipaddress.IPv4Address):
            return _within(address, rules.ipv4)
        if self.allow_nat64 and _within(address, rules.nat64):
            return self.denied(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
        if not _within(address, rules.public_ipv6) or _within(address, rules.ipv6):
            return True
        return (int(address) >> 32) & 0xFFFF_FFFF in rules.isatap

    def _check_name(self, name: str) -> None:
        if any(domain_matches(name, allowed) for allowed in self.allow_names):
            return
        private = "." not in name or any(domain_matches(name, s) for s in address_rules().names)
        if private or name in self.own_names:
            raise RefusedError("blocked_address", "the host name is not a public one")


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


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
