"""Which ports, names and addresses a picture may be fetched from.

The table is data (`address_rules.json`); other fetchers of this repository ship the same one. It
is explicit, since `ipaddress.is_global` calls NAT64, 6to4 and some metadata addresses global.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeAlias

DestinationFilter: TypeAlias = Callable[[str, str], bool]
"""`(host, address) -> may connect`; anything but True, or an exception, means no."""

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class AddressRules:
    """What the table says. names: suffixes of host names; isatap: the 32 bits in front of an
    embedded IPv4 address.
    """

    ports: frozenset[int]
    ipv4: tuple[Network, ...]
    public_ipv6: tuple[Network, ...]
    ipv6: tuple[Network, ...]
    isatap: frozenset[int]
    names: tuple[str, ...]


@lru_cache(maxsize=1)
def address_rules() -> AddressRules:
    """The rules that ship with the package."""
    text = (files("deepinfer_recipe.images") / "address_rules.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    networks = {
        name: tuple(ipaddress.ip_network(network) for network in data[name])
        for name in ("denied_ipv4", "public_ipv6", "denied_ipv6")
    }
    return AddressRules(
        ports=frozenset(data["ports"]),
        ipv4=networks["denied_ipv4"],
        public_ipv6=networks["public_ipv6"],
        ipv6=networks["denied_ipv6"],
        isatap=frozenset(int(i.replace(":", ""), 16) for i in data["isatap_interface_ids"]),
        names=tuple(data["denied_names"]),
    )


def is_public_address(host: str, address: str) -> bool:
    """The default rule: only public addresses, of hosts with public names."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    rules = address_rules()
    if _is_private_name(host, rules) or _is_own(parsed):
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return not _within(parsed, rules.ipv4)
    if not _within(parsed, rules.public_ipv6) or _within(parsed, rules.ipv6):
        return False
    return (int(parsed) >> 32) & 0xFFFF_FFFF not in rules.isatap


def is_usual_port(port: int) -> bool:
    """Whether pictures may be fetched from this port."""
    return port in address_rules().ports


def _within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)


def _is_private_name(host: str, rules: AddressRules) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        name = host.rstrip(".").lower()
        if "." not in name:
            return True
        return any(name == suffix or name.endswith(f".{suffix}") for suffix in rules.names)
    return False


def _is_own(address: Address) -> bool:
    """Whether the address is one of this machine's: a socket can be bound to no other."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def allows(rule: DestinationFilter, host: str, address: str) -> bool:
    """Ask a filter; an exception or a value that is not True means no."""
    try:
        return rule(host, address) is True
    except Exception:
        return False
