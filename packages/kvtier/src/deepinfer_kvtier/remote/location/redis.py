"""A shard in Redis or Valkey: one string for each key, with the server's own expiry."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_kvtier.remote.redis_client import open_redis


class RedisShard:
    """A shard behind a Redis URL. Lives in one event loop; failures raise OSError.

    prefix: kept before every key, so that several stores can share a server.
    """

    def __init__(self, url: str, prefix: bytes) -> None:
        self._client, self._error = open_redis(
            "a location service", url, in_event_loop=True, max_connections=8
        )
        self._prefix = b"kvtier:" + prefix + b":"

    async def lookup(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in order. raises: OSError."""
        try:
            return list(await self._client.mget([self._prefix + key for key in keys]))
        except self._error as cause:
            raise ConnectionError(type(cause).__name__) from None

    async def publish(self, items: Sequence[tuple[bytes, bytes]], ttl_s: int) -> None:
        """raises: OSError."""
        try:
            pipe = self._client.pipeline(transaction=False)
            for key, value in items:
                pipe.set(self._prefix + key, value, ex=max(1, ttl_s))
            await pipe.execute()
        except self._error as cause:
            raise ConnectionError(type(cause).__name__) from None

    async def retract(self, keys: Sequence[bytes]) -> None:
        """raises: OSError."""
        try:
            await self._client.unlink(*(self._prefix + key for key in keys))
        except self._error as cause:
            raise ConnectionError(type(cause).__name__) from None

    async def close(self) -> None:
        """Drop the connections; the next request opens others."""
        await self._client.connection_pool.disconnect(inuse_connections=True)
