"""Prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deepinfer_engine.backend.base import StepRunner
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.kv.store import PrefixStore


async def serve_prefill(
    runner: StepRunner,
    store: PrefixStore | None,
    listen: str,
    *,
    config: EngineConfig | None = None,
    cluster_key: bytes | None = None,
    ready: Callable[[str], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    drain_timeout_s: float = 120.0,
) -> None:
    """Serve prefill on `listen` ("host:port", port 0 = any) until SIGTERM, SIGINT or `stop`; then drain.

    Calls `ready("host:port")` once with the bound address. `store` is closed at the end.
    Raises ConfigError for an unusable address, or a non-loopback one without `cluster_key`.
    """
