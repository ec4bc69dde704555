"""The one place that opens Redis or Valkey: clients that try once, and what their failures are."""

from __future__ import annotations

import importlib
from typing import Any

from deepinfer_kvtier.base.errors import ConfigError


def open_redis(
    what: str, url: str, *, in_event_loop: bool, **settings: Any
) -> tuple[Any, type[Exception]]:
    """A client of a server, and the root of the errors that its calls raise.

    what: what the server is for, as the error of a missing extra or a wrong URL says it.
    in_event_loop: whether the calls are awaited.
    raises: ConfigError, which never shows the URL: it may hold a password.
    """
    try:
        library: Any = importlib.import_module("redis.asyncio" if in_event_loop else "redis")
        errors: Any = importlib.import_module("redis.exceptions")
    except ImportError as cause:
        raise ConfigError(
            f'{what} in Redis needs the extra "redis": pip install "./packages/kvtier[redis]"'
        ) from cause
    try:
        # Deadlines are the caller's; a repeated request would only outlive them.
        return library.Redis.from_url(url, retry=None, **settings), errors.RedisError
    except ValueError:
        raise ConfigError(
            f"{what}: a Redis URL looks like redis://host:6379/0, or rediss:// for TLS"
        ) from None
