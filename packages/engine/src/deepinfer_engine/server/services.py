"""What every route works with: one value, made by `create_app`, kept in `app.state.services`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from deepinfer_engine.codec.errors import Protocol
from deepinfer_engine.codec.protocol import Codec
from deepinfer_engine.router.client import EngineClient, ModelInfo
from deepinfer_engine.server.auth import AdminGate, KeyRing
from deepinfer_engine.server.clock import Clock
from deepinfer_engine.server.limits import ByteBudget, Gate
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.settings import Settings

INLINE_BYTES = 32 * 1024
THREADS = 8
"""Few: each may hold the decoded pictures of one request."""

T = TypeVar("T")


@dataclass(slots=True)
class Services:
    """The engine behind the routes, and the policies in front of it. Wall time is for `created`
    alone.
    """

    engine: EngineClient
    codec: Codec
    settings: Settings
    keys: KeyRing
    admin: AdminGate
    gate: Gate
    metrics: Metrics
    clock: Clock
    wall: Callable[[], float]
    pixels: ByteBudget
    info: ModelInfo | None = None
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, "prepare")
    )

    async def model_info(self) -> ModelInfo:
        """Asked once; raises EngineUnavailable while no worker is there yet."""
        if self.info is None:
            self.info = await self.engine.model_info()
        return self.info

    async def off_loop(self, call: Callable[..., T], *args: object, size: int) -> T:
        """`call(*args)` of the codec for a body of `size` bytes; in a thread where it may take
        long, to keep the event loop answering."""
        if size <= INLINE_BYTES and not self.codec.blocks:
            return call(*args)
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *args)


def services_of(request: Request) -> Services:
    """The services of the application that got this request."""
    return request.app.state.services


def protocol_of(path: str, headers: object) -> Protocol:
    """In which protocol's shape an error is told when no route knows better."""
    has_header = "anthropic-version" in headers  # type: ignore[operator]  # any header mapping
    return "messages" if "/messages" in path or has_header else "chat"
