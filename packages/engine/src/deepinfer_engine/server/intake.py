"""Key and body of the routes that answer at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.server.auth import Caller
from deepinfer_engine.server.limits import check_declared_length, read_body
from deepinfer_engine.server.manners import check_encoding
from deepinfer_engine.server.services import services_of
from deepinfer_engine.server.streaming import unless_gone, wait_disconnect

T = TypeVar("T")


def identified(request: Request) -> Caller:
    """The caller; raises AuthenticationFailed."""
    return services_of(request).keys.identify(request.headers)


@dataclass(frozen=True, slots=True)
class Intake:
    """A body that holds a place until its route has answered."""

    body: bytes
    caller: Caller
    max_model_len: int

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; raises InvalidRequest."""
        try:
            value = json.loads(self.body)
        except ValueError as exc:
            raise InvalidRequest(f"the body is not JSON: {exc}") from exc
        except RecursionError as exc:
            raise InvalidRequest("the body is JSON that is nested too deeply") from exc
        if not isinstance(value, dict):
            raise InvalidRequest(f"the body must be a JSON object, got {type(value).__name__}")
        return value


@asynccontextmanager
async def taken(request: Request) -> AsyncGenerator[Intake]:
    """The body of an identified caller, within the limits of size, rate and places."""
    services = services_of(request)
    caller = services.keys.identify(request.headers)
    check_encoding(request)
    services.gate.check_open()
    services.rates.take(caller.key_id)
    info = await services.model_info()
    limit = services.body_limit(info.max_model_len)
    check_declared_length(request.headers.get("content-length"), limit)
    with services.bodies.holding(caller.key_id) as held:
        body = await read_body(request.receive, limit, held)
        with services.gate.enter(caller.key_id):
            yield Intake(body, caller, info.max_model_len)


async def answered(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, given up when the client leaves."""
    gone = asyncio.ensure_future(wait_disconnect(request.receive))
    try:
        return await unless_gone(work, gone)
    finally:
        gone.cancel()
