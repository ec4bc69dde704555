"""What every route works with: one value, made by `create_app`, kept in `app.state.services`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from deepinfer_engine.router.client import EngineClient, ModelInfo
from deepinfer_engine.server.auth import AdminGate, KeyRing
from deepinfer_engine.server.clock import Clock
from deepinfer_engine.server.codec import Codec
from deepinfer_engine.server.errors import Protocol
from deepinfer_engine.server.limits import Gate
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.settings import Settings


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
    info: ModelInfo | None = None

    async def model_info(self) -> ModelInfo:
        """Asked once; raises EngineUnavailable while no worker is there yet."""
        if self.info is None:
            self.info = await self.engine.model_info()
        return self.info


def services_of(request: Request) -> Services:
    """The services of the application that got this request."""
    return request.app.state.services


def protocol_of(path: str, headers: object) -> Protocol:
    """In which protocol's shape an error is told when no route knows better."""
    has_header = "anthropic-version" in headers  # type: ignore[operator]  # any header mapping
    return "messages" if "/messages" in path or has_header else "chat"
