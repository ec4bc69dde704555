"""Which network addresses a picture may be fetched from."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import TypeAlias

DestinationFilter: TypeAlias = Callable[[str, str], bool]
"""`(host, address) -> may connect`; anything but True, or an exception, means no."""

# Special-purpose ranges (RFC 6890 and its registry) that `is_global` of one Python version or
# another lets through; the others it covers.
_DENIED_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "100.64.0.0/10",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/23",
        "3fff::/20",
    )
)
# All that is assigned to be reached; outside lie IPv4-compatible, site-local and reserved forms.
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")


def is_public_address(host: str, address: str) -> bool:
    """The default rule: only addresses that are globally reachable.

    Loopback, private, link-local (with cloud metadata), multicast, reserved, unspecified
    addresses are not, nor IPv6 forms that carry an IPv4 address.
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address) and parsed not in _GLOBAL_UNICAST:
        return False
    if any(parsed in network for network in _DENIED_NETWORKS if network.version == parsed.version):
        return False
    return parsed.is_global and not parsed.is_multicast


def allows(rule: DestinationFilter, host: str, address: str) -> bool:
    """Ask a filter; an exception or a value that is not True means no."""
    try:
        return rule(host, address) is True
    except Exception:
        return False
