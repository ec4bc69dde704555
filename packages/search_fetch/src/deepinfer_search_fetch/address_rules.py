"""The table of addresses, names and ports denied by default: `net/address_rules.json`.

It is data, so that another program that fetches can ship the same table.
"""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class AddressRules:
    """The table of what is denied by default, as `address_rules.json` holds it.

    names: suffixes of host names. isatap: the 32 bits in front of an embedded IPv4 address.
    """

    ports: frozenset[int]
    ipv4: tuple[Network, ...]
    public_ipv6: tuple[Network, ...]
    ipv6: tuple[Network, ...]
    nat64: tuple[Network, ...]
    isatap: frozenset[int]
    names: tuple[str, ...]


@lru_cache(maxsize=1)
def address_rules() -> AddressRules:
    """The rules that ship with the package."""
    text = (files("deepinfer_search_fetch.net") / "address_rules.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    networks = {
        name: tuple(ipaddress.ip_network(n) for n in data[name])
        for name in ("denied_ipv4", "public_ipv6", "denied_ipv6", "nat64_ipv6")
    }
    return AddressRules(
        ports=frozenset(data["ports"]),
        ipv4=networks["denied_ipv4"],
        public_ipv6=networks["public_ipv6"],
        ipv6=networks["denied_ipv6"],
        nat64=networks["nat64_ipv6"],
        isatap=frozenset(int(i.replace(":", ""), 16) for i in data["isatap_interface_ids"]),
        names=tuple(data["denied_names"]),
    )
