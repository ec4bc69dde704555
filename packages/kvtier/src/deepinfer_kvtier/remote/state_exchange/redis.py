"""Locations of windows in Redis or Valkey: one 64-byte value a key, expiring with the window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deepinfer_kvtier.remote.redis_client import open_redis
from deepinfer_kvtier.remote.state_exchange.wire import WindowRecord, WireError

_PREFIX = b"kvtier:window:"
_PUBLISH_TIMEOUT_S = 0.5
# Another machine may have published the key meanwhile: only the own record is deleted.
_WITHDRAW = """
for i, key in ipairs(KEYS) do
  local value = redis.call('GET', key)
  if value and string.sub(value, 17, 24) == ARGV[1] then redis.call('DEL', key) end
end
"""


class RedisLocations:
    """`WindowLocations` on a server at `url`; needs the extra `[redis]`.

    lookup_timeout_s: time for a lookup, fixed per connection by the client library.
    raises:           ConfigError for an unusable URL or without the extra; OSError from calls.
    """

    def __init__(self, url: str, *, lookup_timeout_s: float) -> None:
        self._slow, self._errors = _client(url, _PUBLISH_TIMEOUT_S)
        self._quick, _ = _client(url, lookup_timeout_s)

    def publish(self, records: Sequence[WindowRecord]) -> None:
        try:
            with self._slow.pipeline(transaction=False) as pipe:
                for record in records:
                    pipe.set(_PREFIX + record.key, record.pack(), px=max(1, record.ttl_ms))
                pipe.execute()
        except self._errors as cause:
            raise OSError(f"the window location service did not take it: {cause}") from cause

    def withdraw(self, keys: Sequence[bytes], machine: bytes) -> None:
        try:
            self._slow.eval(_WITHDRAW, len(keys), *(_PREFIX + key for key in keys), machine)
        except self._errors as cause:
            raise OSError(f"the window location service did not take it: {cause}") from cause

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> list[WindowRecord | None]:
        try:
            with self._quick.pipeline(transaction=False) as pipe:
                pipe.mget([_PREFIX + key for key in keys])
                for key in keys:
                    pipe.pttl(_PREFIX + key)
                values, *lives = pipe.execute()
        except self._errors as cause:
            raise OSError(f"the window location service did not answer: {cause}") from cause
        found: list[WindowRecord | None] = []
        for value, ttl_ms in zip(values, lives, strict=True):
            try:
                record = None if value is None else WindowRecord.unpack(value)
            except WireError:
                record = None
            found.append(record if record is None else replace(record, ttl_ms=max(0, ttl_ms)))
        return found

    def close(self) -> None:
        self._slow.close()
        self._quick.close()


def _client(url: str, timeout_s: float) -> tuple[Any, type[Exception]]:
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    return open_redis("windows.redis_url: a location service", url, in_event_loop=False, **limits)
