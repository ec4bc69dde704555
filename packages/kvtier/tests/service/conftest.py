from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from deepinfer_kvtier.remote.location.client import LocationClient
from deepinfer_kvtier.remote.location.server import LocationServer
from deepinfer_kvtier.testing import ManualClock


class Served:
    """A directory server in a thread of the test."""

    def __init__(self, key: bytes = b"", clock=None, **keywords) -> None:
        self.server = LocationServer(key=key, clock=clock, **keywords)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.host, self.port = self.run(self.server.start("127.0.0.1", 0))
        self.url = f"tcp://{self.host}:{self.port}"

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

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

    def make(*urls: str, key: bytes = b"", deadline_s: float = 5.0) -> LocationClient:
        client = LocationClient(urls, key=key, prefix=b"test", clock=clock, deadline_s=deadline_s)
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.close()
