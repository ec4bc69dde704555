# ruff: noqa: E501, RUF001
"""The attack table, row by row: T is a private service on loopback that must never be reached.

Rows 57 to 59 need a browser and stand in test_render.py.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import ipaddress
import re
import socket
import ssl
import time
import zipfile
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import brotli
import pytest
from hostile_pages import CLASSIC, HOSTILE, zeros_packed

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    FetchRequest,
    FetchResponse,
    Limits,
    RefusedError,
    SearchFetchError,
    urls,
)
from deepinfer_search_fetch.models import Mode
from deepinfer_search_fetch.net.guard import AddressPolicy, machine_addresses
from deepinfer_search_fetch.net.transport import Transport

SITE_ADDRESS = "127.0.0.2"
# Two on a quiet machine; load slows the same instructions down a little.
HERE = Path(__file__).parent
Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
DENIED = frozenset({"blocked_address", "blocked_port", "blocked_scheme", "invalid_url"})
WORDS = "<p>" + "Voles live in the grass of the meadow. " * 20

# Row -> inputs that are refused before a byte is sent; {p} is the port of T.
LITERALS: dict[int, tuple[str, ...]] = {
    1: ("http://127.0.0.1:{p}/",),
    2: ("http://localhost:{p}/", "http://LOCALHOST.:{p}/", "http://a.localhost:{p}/"),
    3: ("http://2130706433:{p}/",),
    4: ("http://0x7f000001:{p}/", "http://0X7F000001:{p}/"),
    5: ("http://017700000001:{p}/",),
    6: ("http://127.1:{p}/", "http://127.0.1:{p}/"),
    7: ("http://0177.0.0.01:{p}/",),
    8: ("http://0x7f.0.0.0x1:{p}/",),
    9: ("http://0:{p}/", "http://0.0.0.0:{p}/"),
    10: ("http://127.0.0.1.:80/", "http://127.0.0.1.:{p}/"),
    11: ("http://[::1]:{p}/", "http://[0:0:0:0:0:0:0:1]:{p}/"),
    12: ("http://[::]:{p}/",),
    13: ("http://[::ffff:127.0.0.1]:{p}/", "http://[::ffff:7f00:1]:{p}/"),
    14: ("http://[::127.0.0.1]:{p}/",),
    15: ("http://[64:ff9b::7f00:1]:{p}/", "http://[64:ff9b:1::a9fe:a9fe]/"),
    16: ("http://[2002:7f00:1::]:{p}/",),
    17: ("http://[2001:0:7f00:1::]:{p}/",),
    18: ("http://[fe80::1%25lo]:{p}/", "http://[fe80::5efe:7f00:1]:{p}/", "http://[2a00:1:2:3:0:5efe:7f00:1]:{p}/"),
    19: ("http://[fc00::1]/", "http://[fd00:ec2::254]/"),
    20: ("http://[fec0::1]/", "http://[ff02::1]/"),
    21: ("http://169.254.169.254/latest/meta-data/",),
    22: ("http://2852039166/", "http://0xA9FEA9FE/", "http://0251.0376.0251.0376/"),
    23: ("http://metadata.google.internal/computeMetadata/v1/", "http://metadata/", "http://instance-data/"),
    24: ("http://100.100.100.200/latest/meta-data/",),
    25: ("http://192.0.0.192/opc/v2/",),
    26: ("http://168.63.129.16/machine/?comp=goalstate",),
    27: ("http://169.254.170.2/v2/credentials",),
    28: ("http://10.0.0.1/", "http://172.16.0.1/", "http://172.31.255.255/", "http://192.168.1.1/"),
    29: ("http://100.64.0.1/", "http://198.18.0.1/", "http://240.0.0.1/", "http://255.255.255.255/", "http://224.0.0.1/"),
    30: ("http://①②⑦.⓪.⓪.①:{p}/",),
    31: ("http://127。0。0。1:{p}/", "http://127．0．0．1:{p}/"),
    32: ("http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:{p}/",),
    33: ("http://loc%61lhost:{p}/", "http://%31%32%37.0.0.1:{p}/"),
    34: ("http://public.test@127.0.0.1:{p}/", "http://public.test:80@127.0.0.1:{p}/", "http://@127.0.0.1:{p}/", "http://:@127.0.0.1:{p}/"),
    35: ("http://127.0.0.1:{p}#@public.test/", "http://127.0.0.1:{p}?@public.test/"),
    36: ("http://public.test\\@127.0.0.1:{p}/", "http://127.0.0.1:{p}\\@public.test/"),
    37: ("http://127.0.0.1\t.public.test/", "http://127.0.0.1\n.public.test/", "http://127.0.0.1\r.public.test/"),
    38: ("http://public.test%00.127.0.0.1:{p}/", "http://127.0.0.1%00.public.test/"),
    39: ("http:///127.0.0.1:{p}/", "http:127.0.0.1:{p}/", "//127.0.0.1:{p}/", "http:/127.0.0.1:{p}/"),
    40: ("file:///etc/passwd", "FILE:/etc/passwd"),
    41: ("gopher://127.0.0.1:{p}/_INFO", "dict://127.0.0.1:{p}/", "ftp://127.0.0.1/", "ldap://127.0.0.1/", "tftp://127.0.0.1/x", "sftp://127.0.0.1/x", "jar:http://127.0.0.1!/", "netdoc:///etc/passwd"),
    42: ("data:text/html,x", "javascript:alert(1)", "blob:http://127.0.0.1/x", "view-source:http://127.0.0.1/", "about:blank"),
    43: ("http://a-127.test:{p}/", "http://127.0.0.1.nip.test:{p}/"),
    44: ("http://aaaa.test:{p}/",),
    45: ("http://mixed.test:{p}/",),
    48: ("http://cname.test:{p}/",),
    60: ("http://public.test:22/", "http://public.test:25/", "http://public.test:6379/", "http://public.test:11211/", "http://public.test:99999/", "http://public.test:0/", "http://public.test:-1/"),
    61: ("http://public.test/\r\nHost: x", "http://public.test/?a=\r\nX: y"),
}  # fmt: skip
# What the scripted resolver says; a CNAME arrives as the addresses at its end.
NAMES = {
    "a-127.test": [["127.0.0.1"]],
    "127.0.0.1.nip.test": [["127.0.0.1"]],
    "aaaa.test": [["::1"]],
    "mixed.test": [["93.184.216.34", "10.0.0.1"]],
    "cname.test": [["127.0.0.1", "::1"]],
    "private.test": [["127.0.0.1"]],
    "other.test": [[SITE_ADDRESS]],
}


def get(client: AsyncSearchFetch, url: str, **fields: Any) -> FetchResponse:
    return asyncio.run(client.fetch(FetchRequest(url=url, render="never", **fields)))


async def outcome(client: AsyncSearchFetch, request: FetchRequest) -> str:
    """The error code, or "ok"."""
    try:
        await client.fetch(request)
    except SearchFetchError as error:
        return error.code
    return "ok"


def denied(client: AsyncSearchFetch, url: str) -> SearchFetchError:
    with pytest.raises(SearchFetchError) as caught:
        get(client, url)
    assert caught.value.code in DENIED, (url, caught.value.code)
    return caught.value


@pytest.fixture
def open_ports(config: Config, target: Listener) -> Config:
    """Even with T's port allowed, T's address is not."""
    return config.model_copy(update={"ports": (*config.ports, target.port)})


@pytest.mark.parametrize("row", LITERALS)
def test_row(row: int, open_ports: Config, target: Listener, make_client: MakeClient) -> None:
    client = make_client(open_ports, NAMES)
    for text in LITERALS[row]:
        error = denied(client, text.replace("{p}", str(target.port)))
        if row in (43, 44, 45, 48):
            assert not re.search(r"\d+\.\d+\.\d+|::", error.message), "the message tells an address"


def test_rows_46_and_47_a_rebinding_name_is_looked_up_once(
    open_ports: Config, site: Listener, target: Listener, make_resolver: Any
) -> None:
    site.page("/", WORDS)
    resolver = make_resolver({"rebind.test": [[SITE_ADDRESS], ["127.0.0.1"]]})

    async def run() -> FetchResponse:
        async with AsyncSearchFetch(open_ports, resolver=resolver) as client:
            return await client.fetch(FetchRequest(url=f"http://rebind.test:{site.port}/"))

    assert "Voles" in asyncio.run(run()).content
    assert resolver.lookups == {"rebind.test": 1}
    refusing = make_resolver({"rebind.test": [["127.0.0.3"], ["127.0.0.1"]]})
    policy = AddressPolicy(
        ports=frozenset({target.port}), allow=(ipaddress.ip_network("127.0.0.3/32"),)
    )
    transport = Transport(policy, refusing, Limits(), "test")
    with pytest.raises(SearchFetchError) as caught:
        asyncio.run(transport.get(urls.parse(f"http://rebind.test:{target.port}/")))
    assert caught.value.code == "connect_failure"
    assert refusing.lookups == {"rebind.test": 1}


REDIRECTS = [
    (49, "302", "http://127.0.0.1:{p}/"),
    (50, "302", "http://169.254.169.254/"),
    (50, "301", "//127.0.0.1:{p}/"),
    (50, "308", "http://[::1]:{p}/"),
    (50, "307", "http://2130706433:{p}/"),
    (50, "303", "http://public.test\\@127.0.0.1:{p}/"),
    (51, "302", "http://private.test:{p}/"),
    (52, "302", "file:///etc/passwd"),
    (52, "302", "gopher://127.0.0.1:{p}/"),
    (52, "302", "data:text/html,x"),
    (53, "refresh", "http://127.0.0.1:{p}/"),
    (53, "meta", "http://127.0.0.1:{p}/"),
    (53, "meta", "http://private.test:{p}/"),
]


@pytest.mark.parametrize(("row", "kind", "location"), REDIRECTS)
def test_rows_49_to_53_no_redirect_leads_to_the_private_service(
    row: int,
    kind: str,
    location: str,
    open_ports: Config,
    site: Listener,
    target: Listener,
    make_client: MakeClient,
) -> None:
    where = location.replace("{p}", str(target.port))
    if kind == "refresh":
        site.page("/end", "x", headers=(f"Refresh: 0; url={where}",))
    elif kind == "meta":
        site.page("/end", f'<meta http-equiv="refresh" content="0;url={where}">')
    else:
        site.page("/end", "", status=f"{kind} Moved", headers=(f"Location: {where}",))
    middle = f"http://other.test:{site.port}/end"
    site.page("/", "", status="302 Found", headers=(f"Location: {middle}",))
    denied(make_client(open_ports, NAMES), f"http://public.test:{site.port}/")
    assert site.paths() == ["/", "/end"]


@pytest.mark.parametrize("base", ["http://127.0.0.1:{p}/", "file:///etc/"])
def test_row_54_a_base_element_causes_no_request_and_no_private_link(
    base: str, open_ports: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    site.page("/", f'<base href="{base.replace("{p}", str(target.port))}">{WORDS}<a href=x>l</a>')
    response = get(make_client(open_ports), f"http://public.test:{site.port}/", format="links")
    assert site.paths() == ["/"]
    assert not any(link.url.startswith("file") for link in response.links or [])


def test_row_55_robots_behind_a_private_redirect_count_as_unreachable(
    open_ports: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    where = f"http://127.0.0.1:{target.port}/robots.txt"
    site.page("/robots.txt", "", status="302 Found", headers=(f"Location: {where}",))
    site.page("/", WORDS)
    strict = open_ports.model_copy(update={"robots": "respect"})
    with pytest.raises(RefusedError) as caught:
        get(make_client(strict), f"http://public.test:{site.port}/")
    assert caught.value.code == "robots_disallowed"


@pytest.mark.parametrize("kind", ["sitemap", "feed"])
def test_row_56_lists_of_links_to_private_hosts_are_denied_entry_by_entry(
    kind: str, open_ports: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    bad = f"http://127.0.0.1:{target.port}/x"
    good = f"http://public.test:{site.port}/good"
    site.page("/good", "<title>Good</title>" + WORDS)
    sitemap = "".join(f"<url><loc>{u}</loc></url>" for u in (bad, good))
    feed = "".join(f"<item><title>t</title><link>{u}</link></item>" for u in (bad, good))
    entries = {
        "sitemap": f"<urlset>{sitemap}</urlset>",
        "feed": f"<rss><channel><title>t</title>{feed}</channel></rss>",
    }
    site.page(f"/{kind}.xml", entries[kind], content_type="application/xml")
    client = make_client(open_ports)
    report = asyncio.run(client.ingest(f"http://public.test:{site.port}/{kind}.xml", kind))
    assert report.indexed == 1
    assert report.failed == {"blocked_address": 1} or report.skipped == {"blocked_address": 1}


def test_row_61_an_encoded_line_break_stays_in_the_path(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.page("/%0d%0aX-Evil:%201", WORDS)
    get(make_client(config), f"http://public.test:{site.port}/%0d%0aX-Evil:%201")
    head = site.requests[-1].decode().lower()
    assert "x-evil" not in head.replace("/%0d%0ax-evil:%201", "")
    assert f"host: public.test:{site.port}" in head


def test_row_62_a_request_cannot_name_headers_hosts_or_proxies() -> None:
    for name in ("headers", "proxy", "Host", "Forwarded", "cookies", "user_agent", "allow_cidrs"):
        with pytest.raises(ValueError, match="Extra inputs"):
            FetchRequest.model_validate({"url": "http://a.example/", name: "x"})


def test_rows_63_and_64_proxies_of_the_environment_and_alternative_services_are_ignored(
    open_ports: Config,
    site: Listener,
    target: Listener,
    make_client: MakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{target.port}")
    site.page("/", WORDS, headers=(f'Alt-Svc: h2="127.0.0.1:{target.port}"',))
    client = make_client(open_ports)
    for _ in range(2):
        assert get(client, f"http://public.test:{site.port}/", max_age=0).content


@pytest.mark.parametrize("name", ["public.test", "other.test"])
def test_row_65_a_certificate_of_another_name_or_of_nobody_is_refused(
    name: str, config: Config, tmp_path: Path, make_resolver: Any
) -> None:
    certificate = self_signed(tmp_path, "other.test")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(certificate)
    # The client trusts that certificate for other.test only; without the trust it is self-signed.
    client_tls = ssl.create_default_context(cafile=certificate if name == "public.test" else None)
    asked: list[bytes] = []

    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.read(100))
            writer.close()

        server = await asyncio.start_server(serve, SITE_ADDRESS, 0, ssl=server_tls)
        port = server.sockets[0].getsockname()[1]
        policy = AddressPolicy(
            ports=frozenset({port}), allow=(ipaddress.ip_network(f"{SITE_ADDRESS}/32"),)
        )
        resolver = make_resolver({name: [[SITE_ADDRESS]]})
        transport = Transport(policy, resolver, Limits(), "test", tls=client_tls)
        try:
            with pytest.raises(SearchFetchError) as caught:
                await transport.get(urls.parse(f"https://{name}:{port}/"))
            assert caught.value.code == "tls_failure"
        finally:
            server.close()
            await server.wait_closed()

    asyncio.run(run())
    assert asked == []


def self_signed(folder: Path, name: str) -> Path:
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path


W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def archive(**parts: str | bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in parts.items():
            made.writestr(name, data)
    return out.getvalue()


def word(text: str, prolog: str = "", **more: str) -> bytes:
    body = f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"
    main = f'{prolog}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
    return archive(**{"word/document.xml": main, **more})


def pdf_stream(data: bytes, filters: bytes) -> bytes:
    return (
        b"%PDF-1.7\n1 0 obj\n<</Type/ObjStm/N 1/First 4/Filter[" + filters + b"]/Length "
        + str(len(data)).encode() + b">>\nstream\n" + data + b"\nendstream\nendobj\n%%EOF"
    )  # fmt: skip


def outside(where: str) -> dict[str, tuple[str, bytes]]:
    dtd = f'<!DOCTYPE x [<!ENTITY e SYSTEM "{where}"><!ENTITY % p SYSTEM "{where}"> %p;]>'
    relation = (
        '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
        '<Relationship Id="r1" TargetMode="External" Type="http://schemas.openxml'
        'formats.org/officeDocument/2006/relationships/attachedTemplate"'
        f' Target="{where}"/></Relationships>'
    )
    pdf = (
        b"%PDF-1.7\n1 0 obj\n<</Type/Catalog/OpenAction<</S/URI/URI("
        + where.encode()
        + b")>>>>\nendobj\ntrailer<</Root 1 0 R>>\n%%EOF"
    )
    return {
        "xml": ("application/xml", f'<?xml version="1.0"?>{dtd}<x>&e;</x>'.encode()),
        "svg": ("image/svg+xml", f'<?xml version="1.0"?>{dtd}<svg xmlns="http://www.w3.org/2000/svg"><image href="{where}"/><text>&e;</text></svg>'.encode()),
        "feed": ("application/rss+xml", f'<?xml version="1.0"?>{dtd}<rss><channel><title>&e;</title><item><title>&e;</title></item></channel></rss>'.encode()),
        "stylesheet": ("application/xml", f'<?xml version="1.0"?><?xml-stylesheet href="{where}"?><x>text</x>'.encode()),
        "docx entity": ("application/octet-stream", word("&e;", dtd)),
        "docx template": ("application/octet-stream", word("text " * 30, **{"word/_rels/document.xml.rels": relation})),
        "pdf": ("application/pdf", pdf),
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(outside("")))
def test_row_66_no_document_makes_a_request_of_its_own(
    kind: str, open_ports: Config, site: Listener, target: Listener, make_client: MakeClient
) -> None:
    content_type, body = outside(f"http://127.0.0.1:{target.port}/x")[kind]
    site.page("/", body, content_type=content_type)
    request = FetchRequest(url=f"http://public.test:{site.port}/", render="never")
    code = asyncio.run(outcome(make_client(open_ports), request))
    assert code in ("ok", "unsupported_content_type", "extraction_empty")
    assert site.paths() == ["/"]


LAUGHS = "<!DOCTYPE x [<!ENTITY a 'haha'>" + "".join(
    f"<!ENTITY {b} '{f'&{a};' * 10}'>" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
) + "]>"  # fmt: skip


# Entities are never expanded, so a page full of them is a small page or an empty one.
ENDS = ("ok", "decompression_bomb", "unsupported_content_type", "extraction_empty")


def bombs() -> dict[str, tuple[str, str, bytes]]:
    """name -> (content type, content encoding, body)."""
    long_gzip = zeros_packed(1000, 31)
    deflated = zeros_packed(200)
    return {
        "gzip": ("text/html", "gzip", long_gzip),
        "stacked gzip": ("text/html", "gzip, gzip", gzip.compress(long_gzip)),
        "three stacked": ("text/html", "gzip, gzip, gzip", gzip.compress(gzip.compress(b"x"))),
        "br": ("text/html", "br", brotli.compress(bytes(200_000_000), quality=5)),
        "docx": ("application/zip", "", word("x" * 30_000_000)),
        "docx padding": ("application/zip", "", word("x", **{"a.bin": "\0" * 280_000_000})),
        "pdf": ("application/pdf", "", pdf_stream(deflated, b"/FlateDecode")),
        "pdf stacked": ("application/pdf", "", pdf_stream(zlib.compress(deflated, 9), b"/FlateDecode/FlateDecode")),
        "docx laughs": ("application/zip", "", word("&i;", LAUGHS)),
        "xml laughs": ("application/xml", "", f'<?xml version="1.0"?>{LAUGHS}<x>&i;</x>'.encode()),
        "feed laughs": ("application/xml", "", f'<?xml version="1.0"?>{LAUGHS}<rss><channel><title>&i;</title></channel></rss>'.encode()),
    }  # fmt: skip


def test_row_67_bombs_end_within_300_mib_and_the_next_page_works(
    config: Config, site: Listener, make_client: MakeClient
) -> None:
    made = bombs()
    for number, (content_type, encoding, body) in enumerate(made.values()):
        headers = (f"Content-Encoding: {encoding}",) if encoding else ()
        site.page(f"/{number}", body, content_type=content_type, headers=headers)
    site.page("/fine", WORDS)
    client = make_client(config.model_copy(update={"extract_workers": 1}))
    base = f"http://public.test:{site.port}"

    async def run() -> None:
        await client.fetch(FetchRequest(url=f"{base}/fine", render="never"))
        for number, name in enumerate(made):
            request = FetchRequest(url=f"{base}/{number}", render="never", max_tokens=1000)
            assert await outcome(client, request) in ENDS, name
            for worker in workers_of(client):
                assert peak_bytes(worker) <= 300 * 1024 * 1024, name
        again = await client.fetch(FetchRequest(url=f"{base}/fine", render="never", max_age=0))
        assert "Voles" in again.content
        await client.close()

    asyncio.run(run())


def workers_of(client: AsyncSearchFetch) -> list[int]:
    pool = client.fetcher.pool
    return [w.pid for lane in (pool._pages, pool._documents, pool._overtime) for w in lane.idle]


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status).group(1)) * 1024


def _drip(connection: socket.socket, _: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n")
    for _ in range(40):
        connection.sendall(b"x")
        time.sleep(0.05)


def _endless(head: bytes, piece: bytes) -> Callable[[socket.socket, bytes], None]:
    def behave(connection: socket.socket, _: bytes) -> None:
        connection.sendall(head)
        for _ in range(3000):
            connection.sendall(piece)

    return behave


SLOW = {
    "drip": (_drip, "timeout"),
    "headers": (_endless(b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"b" * 500 + b"\r\n"), "response_too_large"),
    "header line": (_endless(b"HTTP/1.1 200 OK\r\nX: ", b"b" * 500), "response_too_large"),
    "trailers": (_endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"X-A: " + b"b" * 500 + b"\r\n"), "response_too_large"),
    "1xx": (_endless(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"), "response_too_large"),
    "chunks": (_endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"e" * 400 + b"\r\nx\r\n"), "response_too_large"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLOW)
def test_row_68_servers_that_never_end_are_left(
    kind: str, config: Config, site: Listener, make_client: MakeClient
) -> None:
    site.behaviour, code = SLOW[kind]
    limits = Limits(
        wire_bytes=100_000, header_bytes=16_000, min_rate_grace_seconds=0.3, idle_seconds=0.5,
        first_byte_seconds=1.0, total_seconds=2.0,
    )  # fmt: skip
    client = make_client(config.model_copy(update={"limits": limits}))
    with pytest.raises(SearchFetchError) as caught:
        get(client, f"http://public.test:{site.port}/")
    assert caught.value.code == code


@pytest.mark.parametrize(
    "names", [CLASSIC, pytest.param(sorted(HOSTILE.keys() - set(CLASSIC)), marks=pytest.mark.slow)]
)
def test_row_69_hostile_markup_is_read_within_300_mib_in_every_mode(
    names: list[str], config: Config, site: Listener, make_client: MakeClient
) -> None:
    for number, name in enumerate(names):
        site.page(f"/{number}", f"<title>t</title>{HOSTILE[name]}", content_type="text/html")
    site.page("/fine", WORDS)
    # The limit ends what runs away; what takes two seconds and what less, the bench says.
    limits = Limits(
        wire_bytes=20_000_000, decoded_bytes=20_000_000, extract_cpu_seconds=30,
        extract_wall_seconds=600, total_seconds=600, first_byte_seconds=60, idle_seconds=60,
    )  # fmt: skip
    client = make_client(config.model_copy(update={"extract_workers": 1, "limits": limits}))
    base = f"http://public.test:{site.port}"

    async def run() -> None:
        for (number, name), mode in product(enumerate(names), get_args(Mode)):
            request = FetchRequest(
                url=f"{base}/{number}", render="never", mode=mode, max_tokens=1000, timeout=120
            )
            assert await outcome(client, request) in ("ok", "extraction_empty"), (name, mode)
            for worker in workers_of(client):
                assert peak_bytes(worker) <= 300 * 1024 * 1024, (name, mode)
        again = await client.fetch(FetchRequest(url=f"{base}/fine", render="never", max_age=0))
        assert "Voles" in again.content
        await client.close()

    asyncio.run(run())


def test_row_70_the_machines_own_addresses_and_name_are_refused() -> None:
    own = machine_addresses()
    assert ipaddress.ip_address("127.0.0.1") in own
    public = ipaddress.ip_address("93.184.216.34")
    policy = AddressPolicy(own_addresses=frozenset({public}), own_names=frozenset({"me.example"}))
    assert policy.denied(public)
    for text in ("http://me.example/", "http://ME.example./"):
        with pytest.raises(RefusedError):
            policy.check_url(urls.parse(text))
    configured = AddressPolicy.from_config(Config())
    assert own <= configured.own_addresses
    assert socket.gethostname().lower() in configured.own_names


PASS = ("http://1.1.1.1/", "http://[2606:4700::1111]/", "http://bücher.de/", "http://1.1/",
        "https://example.com:8443/x", "http://example.com./", "http://xn--bcher-kva.de/",
        "http://8.8.8.8:8080/", "http://a_b.example.com/", "http://internal.example.com/",
        "http://localhost.example.com/", "http://127.0.0.1.example.com/", "http://9.9.9.9#x@y",
        "http://172.32.0.1/", "http://172.15.255.255/", "http://100.128.0.1/", "http://11.0.0.1/",
        "http://198.20.0.1/", "http://192.169.0.1/", "http://[2001:4860:4860::8888]/")  # fmt: skip


@pytest.mark.parametrize("text", PASS)
def test_reverse_list_ordinary_addresses_pass(text: str) -> None:
    AddressPolicy.from_config(Config()).check_url(urls.parse(text))


def test_reverse_list_a_name_with_eight_mixed_public_records_passes() -> None:
    AddressPolicy.from_config(Config()).check_addresses(
        [*(f"93.184.216.{i}" for i in range(4)), *(f"2606:4700::{i}" for i in range(1, 5))]
    )
    assert urls.parse("http://1.1/").host == "1.0.0.1"


def test_every_row_of_the_table_has_a_test() -> None:
    rows = set(LITERALS) | {row for row, _, _ in REDIRECTS}
    text = "".join((HERE / name).read_text() for name in ("test_attack_table.py", "test_render.py"))
    for line in re.findall(r"^def (test_rows?_[0-9a-z_]*)\(", text, re.M):
        numbers = [int(n) for n in re.findall(r"\d+", line.partition("_no_")[0])]
        rows |= set(numbers[:2]) if "rows" in line else set(numbers[:1])
    assert rows >= set(range(1, 71))
