"""The operator's outgoing proxy: asked for vetted addresses, and for nothing else."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    FetchRequest,
    InvalidRequestError,
    RefusedError,
    UpstreamError,
)
from deepinfer_search_fetch.cli_options import make_config

Listener = Any  # see conftest
MakeClient = Callable[..., AsyncSearchFetch]
TEXT = "<p>" + "Voles live in the grass of the meadow. " * 20
TOKEN = base64.b64encode(b"me:a secret").decode()


class Proxy:
    """A CONNECT proxy on loopback. answer: its status line; heads: what it was asked."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.answer = "200 OK"
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := client.recv(1)):
                    return
                head += data
            self.heads.append(head.decode())
            client.sendall(f"HTTP/1.1 {self.answer}\r\n\r\n".encode())
            if not self.answer.startswith("200"):
                return
            host, _, port = head.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as there:
                back = threading.Thread(target=pump, args=(there, client), daemon=True)
                back.start()
                pump(client, there)
                back.join(10)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown(socket.SHUT_RDWR)
            self._server.close()
            self._thread.join(10)


def pump(left: socket.socket, right: socket.socket) -> None:
    try:
        while data := left.recv(65536):
            right.sendall(data)
        right.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    made.close()


def through(config: Config, proxy: Proxy) -> Config:
    url = f"http://me:a%20secret@127.0.0.1:{proxy.port}"
    return Config.model_validate({**config.model_dump(), "egress_proxy": url})


def fetch(client: AsyncSearchFetch, url: str) -> str:
    return asyncio.run(client.fetch(FetchRequest(url=url))).content


def test_the_proxy_is_asked_for_the_vetted_address_and_never_for_a_name(
    config: Config, site: Listener, proxy: Proxy, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    client = make_client(through(config, proxy))
    assert "Voles" in fetch(client, f"http://public.test:{site.port}/")
    (head,) = proxy.heads
    lines = head.split("\r\n")
    assert lines[0] == f"CONNECT 127.0.0.2:{site.port} HTTP/1.1"
    assert f"Proxy-Authorization: Basic {TOKEN}" in lines
    assert "public.test" not in head
    assert b"Host: public.test" in site.requests[0]
    assert b"Proxy-Authorization" not in site.requests[0]


@pytest.mark.parametrize(
    ("url", "answers"),
    [
        ("http://127.0.0.1:{p}/", [["127.0.0.1"]]),
        ("http://private.test:{p}/", [["127.0.0.1"]]),
        ("http://private.test:{p}/", [["127.0.0.2", "10.0.0.1"]]),
        ("http://169.254.169.254:{p}/", [["127.0.0.1"]]),
    ],
)
def test_what_the_guard_refuses_is_not_asked_of_the_proxy_either(
    url: str,
    answers: list[list[str]],
    config: Config,
    site: Listener,
    proxy: Proxy,
    make_client: MakeClient,
) -> None:
    client = make_client(through(config, proxy), {"private.test": answers})
    with pytest.raises(RefusedError):
        fetch(client, url.format(p=site.port))
    assert proxy.heads == []


def test_a_redirect_to_a_private_address_stops_before_the_proxy(
    config: Config, site: Listener, target: Listener, proxy: Proxy, make_client: MakeClient
) -> None:
    site.page("/", "", status="302 Found", headers=(f"Location: http://127.0.0.1:{target.port}/",))
    with pytest.raises(RefusedError):
        fetch(make_client(through(config, proxy)), f"http://public.test:{site.port}/")
    assert len(proxy.heads) == 1


@pytest.mark.parametrize("answer", ["407 Proxy Authentication Required", "403 Forbidden"])
def test_a_proxy_that_refuses_is_named_with_its_answer(
    answer: str, config: Config, site: Listener, proxy: Proxy, make_client: MakeClient
) -> None:
    proxy.answer = answer
    with pytest.raises(UpstreamError, match=f"egress proxy answers {answer[:3]}") as caught:
        fetch(make_client(through(config, proxy)), f"http://public.test:{site.port}/")
    assert caught.value.code == "connect_failure"
    assert "secret" not in str(caught.value)
    assert site.requests == []


def test_without_its_proxy_a_client_reaches_nothing(
    config: Config, site: Listener, proxy: Proxy, make_client: MakeClient
) -> None:
    site.page("/", TEXT)
    settings = through(config, proxy)
    proxy.close()
    with pytest.raises(UpstreamError, match="egress proxy cannot be reached"):
        fetch(make_client(settings), f"http://public.test:{site.port}/")
    assert site.requests == []


@pytest.mark.parametrize(
    "text",
    [
        "proxy:3128",
        "https://proxy:3128",
        "http://me:hush@proxy",
        "http://proxy:0/",
        "http://",
        "http://a b:1",
    ],
)
def test_a_malformed_proxy_is_refused_without_its_password(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_SEARCH_FETCH_EGRESS_PROXY", text)
    with pytest.raises(InvalidRequestError, match=r"EGRESS_PROXY.*wanted http://") as caught:
        make_config(None)
    assert "hush" not in str(caught.value)


def test_the_environment_names_the_proxy_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_SEARCH_FETCH_EGRESS_PROXY", "http://me:hush@proxy.test:3128")
    config = make_config(None)
    assert config.proxy is not None
    assert (config.proxy.host, config.proxy.port) == ("proxy.test", 3128)
    assert "hush" not in repr(config) + repr(config.proxy)
    assert config.proxy.authorization == "Basic " + base64.b64encode(b"me:hush").decode()
