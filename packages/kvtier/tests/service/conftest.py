from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from deepinfer_kvtier.service.client import DirectoryClient
from deepinfer_kvtier.service.server import DirectoryServer
from deepinfer_kvtier.testing import ManualClock


class Served:
    """A directory server in a thread of the test."""

    def __init__(self, key: bytes = b"", clock=None, **keywords) -> None:
        self.server = DirectoryServer(key=key, clock=clock, **keywords)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.host, self.port = self.run(self.server.start("127.0.0.1", 0))
        self.url = f"tcp://{self.host}:{self.port}"

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def close(self) -> None:
        self.run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def serve() -> Iterator:
    opened = []

    def make(**keywords) -> Served:
        opened.append(Served(**keywords))
        return opened[-1]

    yield make
    for served in opened:
        served.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def connect(clock) -> Iterator:
    opened = []

    def make(*urls: str, key: bytes = b"", deadline_s: float = 5.0) -> DirectoryClient:
        client = DirectoryClient(urls, key=key, prefix=b"test", clock=clock, deadline_s=deadline_s)
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server or valkey-server on this machine")
    pytest.importorskip("redis", reason="needs the extra redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            threading.Event().wait(0.05)
        else:
            pytest.fail("redis-server did not start")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(10)
