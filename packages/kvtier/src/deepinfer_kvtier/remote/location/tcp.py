"""Client side of one TCP shard: one connection, many requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

from deepinfer_kvtier.remote.location import messages, wire


class TcpShard:
    """A shard behind `LocationServer`. Lives in one event loop; failures raise OSError."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._host = host
        self._port = port
        self._key = key
        self._channel: wire.Channel | None = None
        self._connecting = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[memoryview]] = {}
        self._numbers = itertools.count()

    async def lookup(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in order. raises: OSError."""
        body = await self._ask(wire.LOOKUP, messages.pack_keys(keys))
        try:
            return messages.parse_values(body, len(keys))
        except wire.WireError as cause:
            await self.close()
            raise ConnectionError(str(cause)) from cause

    async def publish(self, items: Sequence[tuple[bytes, bytes]], ttl_s: int) -> None:
        """raises: OSError."""
        await self._ask(wire.PUBLISH, messages.pack_items(items, ttl_s))

    async def retract(self, keys: Sequence[bytes]) -> None:
        """raises: OSError."""
        await self._ask(wire.RETRACT, messages.pack_keys(keys))

    async def close(self) -> None:
        """Drop the connection; the next request opens another."""
        channel, self._channel = self._channel, None
        listener, self._listener = self._listener, None
        if channel is not None:
            channel.close()
        if listener is not None and listener is not asyncio.current_task():
            listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listener
        self._fail("the connection was closed")

    async def _ask(self, operation: int, body: bytes) -> memoryview:
        channel = await self._connected()
        number = next(self._numbers) & 0xFFFFFFFF
        future: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await channel.send(operation, number, body)
            return await future
        except wire.WireError as cause:
            raise ConnectionError(str(cause)) from cause
        finally:
            self._waiting.pop(number, None)

    async def _connected(self) -> wire.Channel:
        async with self._connecting:
            if self._channel is None:
                try:
                    self._channel = await wire.connect(self._host, self._port, self._key)
                except (wire.WireError, EOFError) as cause:
                    raise ConnectionError(str(cause)) from cause
                self._listener = asyncio.create_task(self._listen(self._channel))
            return self._channel

    async def _listen(self, channel: wire.Channel) -> None:
        try:
            while True:
                _, number, body = await channel.receive()
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(body)
        except (wire.WireError, EOFError, OSError) as cause:
            if self._channel is channel:
                self._channel = self._listener = None
            channel.close()
            self._fail(str(cause))

    def _fail(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(reason))
