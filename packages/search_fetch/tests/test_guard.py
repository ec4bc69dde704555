# ruff: noqa: E501
"""The attack table: every row is refused before a byte is sent; the reverse list passes."""

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
    Limits,
    RefusedError,
    SearchFetchError,
    UpstreamError,
    urls,
)
from deepinfer_search_fetch.net.guard import AddressPolicy, machine_addresses
from deepinfer_search_fetch.net.transport import Transport

SITE_ADDRESS = "127.0.0.2"
Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
DENIED = ("blocked_address", "blocked_port", "blocked_scheme", "invalid_url")

LITERAL_ATTACKS = """
http://127.0.0.1:{p}/
http://localhost:{p}/
http://LOCALHOST.:{p}/
http://a.localhost:{p}/
http://2130706433:{p}/
http://0x7f000001:{p}/
http://017700000001:{p}/
http://127.1:{p}/
http://127.0.1:{p}/
http://0177.0.0.01:{p}/
http://0x7f.0.0.0x1:{p}/
http://0:{p}/
http://0.0.0.0:{p}/
http://127.0.0.1.:{p}/
http://[::1]:{p}/
http://[0:0:0:0:0:0:0:1]:{p}/
http://[::]:{p}/
http://[::ffff:127.0.0.1]:{p}/
http://[::ffff:7f00:1]:{p}/
http://[::127.0.0.1]:{p}/
http://[64:ff9b::7f00:1]:{p}/
http://[64:ff9b:1::a9fe:a9fe]/
http://[2002:7f00:1::]:{p}/
http://[2001:0:7f00:1::]:{p}/
http://[fe80::1%25lo]:{p}/
http://[fe80::5efe:7f00:1]:{p}/
http://[2a00:1:2:3:0:5efe:7f00:1]:{p}/
http://[fc00::1]/
http://[fd00:ec2::254]/
http://[fec0::1]/
http://[ff02::1]/
http://169.254.169.254/latest/meta-data/
http://2852039166/
http://0xA9FEA9FE/
http://0251.0376.0251.0376/
http://metadata.google.internal/computeMetadata/v1/
http://100.100.100.200/latest/meta-data/
http://192.0.0.192/opc/v2/
http://168.63.129.16/machine/?comp=goalstate
http://169.254.170.2/v2/credentials
http://10.0.0.1/
http://172.16.0.1/
http://172.31.255.255/
http://192.168.1.1/
http://100.64.0.1/
http://198.18.0.1/
http://240.0.0.1/
http://255.255.255.255/
http://224.0.0.1/
http://①②⑦.⓪.⓪.①:{p}/
http://127。0。0。1:{p}/
http://127\uff0e0\uff0e0\uff0e1:{p}/
http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:{p}/
http://loc%61lhost:{p}/
http://%31%32%37.0.0.1:{p}/
http://public.test@127.0.0.1:{p}/
http://public.test:80@127.0.0.1:{p}/
http://127.0.0.1:{p}#@public.test/
http://127.0.0.1:{p}?@public.test/
http://public.test\\@127.0.0.1:{p}/
http://127.0.0.1:{p}\\@public.test/
http://public.test%00.127.0.0.1/
http://127.0.0.1%00.public.test/
http:///127.0.0.1:{p}/
http:127.0.0.1:{p}/
//127.0.0.1:{p}/
file:///etc/passwd
FILE:/etc/passwd
gopher://127.0.0.1:{p}/_INFO
dict://127.0.0.1:{p}/
ftp://127.0.0.1/
ldap://127.0.0.1/
data:text/html,x
javascript:alert(1)
view-source:http://127.0.0.1/
about:blank
http://public.test:22/
http://public.test:25/
http://public.test:6379/
http://public.test:11211/
http://public.test:99999/
http://public.test:0/
http://public.test:-1/
http://intranet/
http://wiki.corp/
http://printer.local/
""".strip("\n")


CONTROL_ATTACKS = (
    "http://127.0.0.1\t.public.test/",
    "http://127.0.0.1\n.public.test/",
    "http://127.0.0.1\r.public.test/",
    "http://public.test/\r\nHost: x",
)


def fetch(client: AsyncSearchFetch, url: str) -> object:
    return asyncio.run(client.fetch(FetchRequest(url=url, render="never")))


def test_no_literal_attack_reaches_the_private_service(
    config: Config, target: Listener, make_client: MakeClient
) -> None:
    config = config.model_copy(update={"ports": (*config.ports, target.port)})
    client = make_client(config)
    for line in [*LITERAL_ATTACKS.split("\n"), *CONTROL_ATTACKS]:
        url = line.replace("{p}", str(target.port))
        with pytest.raises(SearchFetchError) as caught:
            fetch(client, url)
        assert caught.value.code in DENIED, (url, caught.value.code)


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


def test_rebinding_name_is_looked_up_exactly_once(
    config: Config, site: Listener, make_resolver: Any
) -> None:
    site.page("/", "<p>" + "public words " * 30)
    resolver = make_resolver({"rebind.test": [[SITE_ADDRESS], ["127.0.0.1"]]})

    async def run() -> str:
        async with AsyncSearchFetch(config, resolver=resolver) as client:
            response = await client.fetch(FetchRequest(url=f"http://rebind.test:{site.port}/"))
            return response.content

    assert "public words" in asyncio.run(run())
    assert resolver.lookups == {"rebind.test": 1}


def test_refused_connection_causes_no_second_look_up(
    config: Config, site: Listener, make_resolver: Any
) -> None:
    resolver = make_resolver({"rebind.test": [["127.0.0.3"], ["127.0.0.1"]]})
    policy = AddressPolicy(
        ports=frozenset({site.port}), allow=(ipaddress.ip_network("127.0.0.3/32"),)
    )
    transport = Transport(policy, resolver, Limits(), "test")
    with pytest.raises(UpstreamError) as caught:
        asyncio.run(transport.get(urls.parse(f"http://rebind.test:{site.port}/")))
    assert caught.value.code == "connect_failure"
    assert resolver.lookups == {"rebind.test": 1}


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.1:{p}/", "//127.0.0.1:{p}/", "http://[::1]:{p}/", "http://rebind.test:{p}/",
     "http://169.254.169.254/", "file:///etc/passwd", "gopher://127.0.0.1:{p}/", "data:text/html,x"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["302", "308", "refresh", "meta"])
def test_no_redirect_reaches_the_private_service(
    location: str,
    kind: str,
    config: Config,
    site: Listener,
    target: Listener,
    make_client: MakeClient,
) -> None:
    config = config.model_copy(update={"ports": (*config.ports, target.port)})
    where = location.replace("{p}", str(target.port))
    if kind == "refresh":
        site.page("/", "x", headers=(f"Refresh: 0; url={where}",))
    elif kind == "meta":
        site.page("/", f'<meta http-equiv="refresh" content="0;url={where}">')
    else:
        site.page("/", "", status=f"{kind} Moved", headers=(f"Location: {where}",))
    site.page("/start", "", status="302 Found", headers=("Location: /",))
    client = make_client(config, {"rebind.test": [["127.0.0.1"]]})
    with pytest.raises(SearchFetchError) as caught:
        fetch(client, f"http://public.test:{site.port}/start")
    assert caught.value.code in DENIED


def test_neither_base_href_nor_a_robots_redirect_reaches_a_private_host(
    config: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    site.page(
        "/", f'<base href="http://127.0.0.1:{target.port}/"><p>{"words " * 40}<a href=x>l</a>'
    )
    site.page(
        "/robots.txt",
        "",
        status="302 Found",
        headers=(f"Location: http://127.0.0.1:{target.port}/robots.txt",),
    )
    strict = config.model_copy(update={"robots": "respect"})
    with pytest.raises(RefusedError) as caught:
        fetch(make_client(strict), f"http://public.test:{site.port}/")
    assert caught.value.code == "robots_disallowed"
    assert fetch(make_client(config), f"http://public.test:{site.port}/")


def test_proxy_variables_and_alt_svc_are_ignored(
    config: Config,
    site: Listener,
    target: Listener,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{target.port}")
    site.page("/", "<p>" + "words " * 40, headers=(f'Alt-Svc: h2="127.0.0.1:{target.port}"',))
    assert fetch(make_client(config), f"http://public.test:{site.port}/")


def test_request_line_and_headers_cannot_be_injected(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/%0d%0aX-Evil:%201", "<p>" + "words " * 40)
    fetch(make_client(config), f"http://public.test:{site.port}/%0d%0aX-Evil:%201")
    head = site.requests[-1].decode()
    assert "x-evil" not in head.lower().replace("/%0d%0ax-evil:%201", "")
    assert f"host: public.test:{site.port}" in head.lower()


def test_the_machines_own_addresses_are_refused() -> None:
    own = machine_addresses()
    assert ipaddress.ip_address("127.0.0.1") in own
    public = ipaddress.ip_address("93.184.216.34")
    policy = AddressPolicy(own_addresses=frozenset({public}), own_names=frozenset({"me.example"}))
    assert policy.denied(public)
    with pytest.raises(RefusedError):
        policy.check_url(urls.parse("http://me.example/"))


@pytest.mark.parametrize(
    "url",
    ["http://1.1.1.1/", "http://[2606:4700::1111]/", "http://bücher.de/", "http://1.1/",
     "https://example.com:8443/x"],
)  # fmt: skip
def test_ordinary_addresses_pass(url: str) -> None:
    AddressPolicy().check_url(urls.parse(url))


def test_eight_mixed_public_records_pass() -> None:
    AddressPolicy().check_addresses(
        [*(f"93.184.216.{i}" for i in range(4)), *(f"2606:4700::{i}" for i in range(1, 5))]
    )


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


def test_a_request_cannot_name_headers_or_a_proxy() -> None:
    for name in ("headers", "proxy", "Host", "allow_cidrs"):
        with pytest.raises(ValueError, match="Extra inputs"):
            FetchRequest.model_validate({"url": "http://a.com/", name: "x"})


def test_untrusted_certificates_are_refused(
    config: Config, site: Listener, make_resolver: Any
) -> None:
    policy = AddressPolicy.from_config(config)
    resolver = make_resolver({"public.test": [[SITE_ADDRESS]]})
    transport = Transport(policy, resolver, Limits(tls_seconds=2), "test")
    with pytest.raises(UpstreamError) as caught:
        asyncio.run(transport.get(urls.parse(f"https://public.test:{site.port}/")))
    assert caught.value.code == "tls_failure"


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
