"""The address policy by itself, and the callers' own domain lists. See test_attack_table.py."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    FetchRequest,
    InvalidRequestError,
    RefusedError,
)
from deepinfer_search_fetch.net.guard import AddressPolicy

SITE_ADDRESS = "127.0.0.2"
Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]


def fetch(client: AsyncSearchFetch, url: str) -> object:
    return asyncio.run(client.fetch(FetchRequest(url=url, render="never")))


@pytest.mark.parametrize(
    "answers",
    [["127.0.0.1"], ["::1"], ["8.8.8.8", "10.0.0.1"], ["64:ff9b::7f00:1"], ["169.254.169.254"]],
)
def test_names_that_resolve_to_private_addresses_are_refused(
    answers: list[str], config: Config, target: Listener, make_client: MakeClient
) -> None:
    config = config.model_copy(update={"ports": (*config.ports, target.port)})
    client = make_client(config, {"evil.test": [answers]})
    with pytest.raises(RefusedError) as caught:
        fetch(client, f"http://evil.test:{target.port}/")
    assert caught.value.code == "blocked_address"
    assert not any(a in caught.value.message for a in answers)


def test_operator_lists_open_and_close_networks() -> None:
    config = Config(allow_cidrs=("10.0.0.0/8",), deny_cidrs=("10.1.0.0/16", "8.8.8.8/32"))
    policy = AddressPolicy.from_config(config)
    assert not policy.denied(ipaddress.ip_address("10.2.3.4"))
    assert policy.denied(ipaddress.ip_address("10.1.3.4"))
    assert policy.denied(ipaddress.ip_address("8.8.8.8"))


def test_nat64_is_unwrapped_only_when_the_operator_allows_it() -> None:
    private, public = (ipaddress.ip_address(a) for a in ("64:ff9b::7f00:1", "64:ff9b::808:808"))
    assert AddressPolicy().denied(public)
    assert not AddressPolicy(allow_nat64=True).denied(public)
    assert AddressPolicy(allow_nat64=True).denied(private)


@given(st.integers(0, 2**32 - 1))
def test_no_private_ipv4_passes_in_any_embedding(value: int) -> None:
    address = ipaddress.IPv4Address(value)
    policy = AddressPolicy()
    if address.is_private or address.is_multicast or address.is_loopback or address.is_link_local:
        assert policy.denied(address)
    for prefix in ("::ffff:0:0", "64:ff9b::", "::"):
        assert policy.denied(ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) + value))


def test_domain_lists_of_the_caller_hold_for_every_hop(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", "", status="302 Found", headers=(f"Location: http://other.test:{site.port}/x",))
    site.page("/x", "<p>" + "words " * 40)
    client = make_client(config, {"other.test": [[SITE_ADDRESS]]})
    request = FetchRequest(url=f"http://public.test:{site.port}/")
    with pytest.raises(RefusedError) as caught:
        asyncio.run(client.fetch(request, allowed_domains=["public.test"]))
    assert caught.value.code == "forbidden"
    assert site.paths() == ["/"]


def test_bad_selector_is_the_callers_fault(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/", "<p>" + "words " * 40)
    request = FetchRequest(url=f"http://public.test:{site.port}/", selector="p[[")
    with pytest.raises(InvalidRequestError):
        asyncio.run(make_client(config).fetch(request))
