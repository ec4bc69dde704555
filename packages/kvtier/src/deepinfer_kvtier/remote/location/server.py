"""One shard of the location service as an asyncio TCP service."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import signal
import struct
from collections import Counter
from collections.abc import Callable, Sequence

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.timing import Clock, SystemClock
from deepinfer_kvtier.remote.location import DEFAULT_PORT, messages, wire

MAX_CONNECTIONS = 1024
# A client that is silent this long is taken for gone; clients reconnect by themselves.
IDLE_S = 600.0


class LocationServer:
    """Serves one `ShardMap`. It keeps nothing on disk: after a restart all hints are gone."""

    def __init__(
        self, *, key: bytes = b"", max_entries: int = 2_000_000, clock: Clock | None = None
    ) -> None:
        self.map = ShardMap(max_entries, clock or SystemClock())
        self.counts: Counter[str] = Counter()
        self._key = key
        self._tasks: set[asyncio.Task[None]] = set()
        # By when they were heard of: those that have not shown the key yet, and the others.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._members: dict[asyncio.Task[None], None] = {}
        self._ousted: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> tuple[str, int]:
        """Listen; returns the address, with the port that was given for port 0.

        raises: ConfigError for an address others can reach without a shared key, OSError.
        """
        if not self._key and not is_loopback(host):
            raise ConfigError(
                f"listening on {host} without a shared key would let anybody steer lookups:"
                " pass a key file"
            )
        self._server = await asyncio.start_server(
            self._serve, host, port, limit=wire.MAX_FRAME_BYTES
        )
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            self._make_room(task)
            channel = await wire.accept(reader, writer, self._key)
            self._strangers.pop(task, None)
            self._members[task] = None
            self.counts["connections"] += 1
            while True:
                async with asyncio.timeout(IDLE_S):
                    operation, number, body = await channel.receive()
                self._members.pop(task, None)
                self._members[task] = None  # heard of last
                answer = self._answer(operation, body)
                await channel.send(operation, number, answer)
        except wire.WireError:
            self.counts["protocol_errors"] += 1
        except (EOFError, OSError, TimeoutError):
            self.counts["ended_connections"] += 1
        except asyncio.CancelledError:
            if task not in self._ousted:
                raise
        finally:
            self._tasks.discard(task)
            self._ousted.discard(task)
            self._strangers.pop(task, None)
            self._members.pop(task, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _make_room(self, task: asyncio.Task[None]) -> None:
        """A new connection is always taken. Where there are too many, the one that has been silent
        longest goes, strangers first: nobody locks others out by saying nothing."""
        self._strangers[task] = None
        while len(self._strangers) + len(self._members) > MAX_CONNECTIONS:
            silent = next(iter(self._strangers if len(self._strangers) > 1 else self._members))
            self._strangers.pop(silent, None)
            self._members.pop(silent, None)
            self._ousted.add(silent)
            silent.cancel()
            self.counts["ousted_connections"] += 1

    def _answer(self, operation: int, body: memoryview) -> bytes:
        if operation == wire.LOOKUP:
            keys = messages.parse_keys(body)
            self.counts["lookups"] += 1
            self.counts["looked_up_keys"] += len(keys)
            return messages.pack_values(self.map.lookup(keys))
        if operation == wire.PUBLISH:
            items, ttl_s = messages.parse_items(body)
            self.counts["published_keys"] += len(items)
            self.map.publish(items, ttl_s)
            return b""
        if operation == wire.RETRACT:
            self.map.retract(messages.parse_keys(body))
            return b""
        if operation == wire.STATS:
            return json.dumps(
                {"entries": len(self.map), "evicted": self.map.evicted, **self.counts}
            ).encode()
        raise wire.WireError(f"unknown operation {operation}")


def run_until_told(
    host: str, port: int, *, key: bytes, max_entries: int, started: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `started` gets the URL. raises: ConfigError."""

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = LocationServer(key=key, max_entries=max_entries)
        try:
            where, chosen = await server.start(host, port)
        except OSError as cause:
            said = cause.strerror or cause
            raise ConfigError(f"cannot listen on {host}:{port}: {said}") from cause
        started(f"tcp://[{where}]:{chosen}" if ":" in where else f"tcp://{where}:{chosen}")
        await stop.wait()
        await server.close()

    asyncio.run(serve())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; names other than localhost do not count."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_EXPIRY = struct.Struct("<d")


class ShardMap:
    """Values by key with an expiry; the oldest publications go first when it is full."""

    def __init__(self, max_entries: int, clock: Clock) -> None:
        self.max_entries = max_entries
        self._clock = clock
        # Expiry and value as one object: a tuple and a float would cost half as much again.
        self._items: dict[bytes, bytes] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._items)

    def lookup(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in order; None for what is unknown or expired."""
        now = self._clock.monotonic()
        found: list[bytes | None] = []
        for key in keys:
            item = self._items.get(key)
            if item is not None and _EXPIRY.unpack_from(item)[0] <= now:
                del self._items[key]
                item = None
            found.append(None if item is None else item[_EXPIRY.size :])
        return found

    def publish(self, items: Sequence[tuple[bytes, bytes]], ttl_s: float) -> None:
        """Remember values; the latest publication of a key wins."""
        until = _EXPIRY.pack(self._clock.monotonic() + ttl_s)
        for key, value in items:
            self._items.pop(key, None)
            self._items[key] = until + value
        while len(self._items) > self.max_entries:
            del self._items[next(iter(self._items))]
            self.evicted += 1

    def retract(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._items.pop(key, None)
