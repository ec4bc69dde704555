"""Ten clients that try to take a service from the others, each on connections of its own.

    python benches/hostile_clients.py SERVICE_PORT SITE_PORT NAME=KEY...

Runs in a process of its own beside the one that measures (`bench_hostile.py`), until its standard
input ends, and then prints how many requests each of them sent, as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

sent: Counter[str] = Counter()
numbers = itertools.count()


class Attack:
    """What every one of them needs: the service's address, a key, pages of its own to name."""

    def __init__(self, name: str, service: int, site: int, keys: list[str]) -> None:
        self.name, self.service, self.site, self.keys = name, service, site, keys
        # Every client has an address of its own, as on a network.
        self.address = (f"127.0.1.{1 + list(ATTACKS).index(name)}", 0)

    async def connect(self, **more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.service, local_addr=self.address, **more
        )

    def page(self, path: str, host: str = "") -> str:
        """A URL nobody has asked for yet, on a host of its own."""
        n = next(numbers)
        return f"http://{host or f'{self.name}{n}.test'}:{self.site}{path}?{n}"

    def head(self, path: str, length: int, key: str | None) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            "Accept: application/json, text/event-stream",
            f"Content-Length: {length}",
            "Connection: close",
        ]
        if key is not None:
            lines.append(f"Authorization: Bearer {key}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    async def send(
        self, path: str, body: Any, *, key: str | None = "", leave: bool = False
    ) -> bytes:
        """One request; leave: without waiting for the answer."""
        data = json.dumps(body).encode()
        sent[self.name] += 1
        reader, writer = await self.connect()
        try:
            writer.write(self.head(path, len(data), self.keys[0] if key == "" else key) + data)
            await writer.drain()
            if leave:
                await asyncio.sleep(random.uniform(0, 0.05))
                return b""
            return await reader.read()
        finally:
            writer.close()

    async def fetch(self, path: str, host: str = "", **more: Any) -> bytes:
        return await self.send("/v1/fetch", {"url": self.page(path, host), **more})


async def slow_names(a: Attack) -> None:
    """Names whose server is silent for twelve seconds."""
    await a.fetch("/small", f"n{next(numbers)}.slow.test")


async def slow_bodies(a: Attack) -> None:
    """A body a byte a second, with a key and without one."""
    for key in (a.keys[0], None):
        sent[a.name] += 1
        _, writer = await a.connect()
        writer.write(a.head("/v1/search", 100, key))
        for _ in range(20):
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(1)
        writer.close()


async def bombs(a: Attack) -> None:
    """Pages that cost as much as a page may, in every mode."""
    path = random.choice(("/marks", "/nested", "/table", "/sheet", "/gzip"))
    await a.fetch(path, mode=random.choice(("article", "full", "fast")))


async def many_keys(a: Attack) -> None:
    """Ten good keys in turn, unknown keys, and none."""
    key = random.choice([*a.keys, None, f"sk-{random.random()}"])
    await a.send("/v1/fetch", {"url": a.page("/long")}, key=key)


async def huge_pages(a: Attack) -> None:
    """Nine megabytes of text a page."""
    await a.fetch("/huge", mode="full", max_tokens=200_000)


async def batch_floods(a: Attack) -> None:
    """Fifty pages a request."""
    requests = [{"url": a.page("/long")} for _ in range(50)]
    await a.send("/v1/fetch/batch", {"requests": requests, "concurrency": 8})


async def abandoned(a: Attack) -> None:
    """Requests whose client leaves at once."""
    await a.send("/v1/fetch", {"url": a.page("/long")}, leave=True)
    await a.send("/v1/search", {"query": "voles in the meadow of grass"}, leave=True)


async def mcp_floods(a: Attack) -> None:
    """Messages to the MCP endpoint: calls, long lists of tools, what is no message."""
    calls: list[Any] = [
        ("tools/call", {"name": "web_search", "arguments": {"query": "voles grass meadow"}}),
        ("tools/call", {"name": "web_fetch", "arguments": {"url": a.page("/long")}}),
        ("tools/list", {}),
        ("no/method", {"x": ["y" * 1000] * 300}),
    ]
    method, parameters = random.choice(calls)
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
    await a.send("/mcp", body)


async def redirect_loops(a: Attack) -> None:
    """Redirects without an end, and in a circle."""
    await a.fetch(random.choice(("/endless", "/circle")))


async def slow_readers(a: Attack) -> None:
    """Long answers of which one byte a second is read."""
    sent[a.name] += 1
    reader, writer = await a.connect(limit=64)
    data = json.dumps({"query": "voles", "count": 50, "content": "full"}).encode()
    writer.write(a.head("/v1/search", len(data), a.keys[0]) + data)
    for _ in range(30):
        await asyncio.sleep(1)
        if not await reader.read(1):
            break
    writer.close()


Step = Callable[[Attack], Awaitable[None]]
# With how many requests at once each of them works.
ATTACKS: dict[str, tuple[Step, int]] = {
    "slow_names": (slow_names, 40),
    "slow_bodies": (slow_bodies, 40),
    "bombs": (bombs, 8),
    "many_keys": (many_keys, 20),
    "huge_pages": (huge_pages, 8),
    "batch_floods": (batch_floods, 4),
    "abandoned": (abandoned, 8),
    "mcp_floods": (mcp_floods, 8),
    "redirect_loops": (redirect_loops, 8),
    "slow_readers": (slow_readers, 40),
}
PAUSE_SECONDS = 0.02  # between the requests of one connection's place: 50 a second


async def repeat(step: Step, attack: Attack) -> None:
    while True:
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            await step(attack)
        await asyncio.sleep(PAUSE_SECONDS)


async def main() -> None:
    service, site = int(sys.argv[1]), int(sys.argv[2])
    keys: dict[str, list[str]] = {}
    for pair in sys.argv[3:]:
        name, _, key = pair.partition("=")
        keys.setdefault(name, []).append(key)
    tasks: list[asyncio.Task[None]] = []
    for name, own in keys.items():
        step, places = ATTACKS[name]
        attack = Attack(name, service, site, own)
        tasks += [asyncio.create_task(repeat(step, attack)) for _ in range(places)]
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(sent), flush=True)


if __name__ == "__main__":
    os.nice(19)  # the machine is the service's; elsewhere these clients have their own
    asyncio.run(main())
