"""Key and body of the routes that answer at once."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.server.auth import Caller
from deepinfer_engine.server.limits import check_declared_length, read_body
from deepinfer_engine.server.services import services_of


def identified(request: Request) -> Caller:
    """The caller; raises AuthenticationFailed."""
    return services_of(request).keys.identify(request.headers)


async def small_body(request: Request) -> bytes:
    """The body of an identified caller, within the size limit."""
    services = services_of(request)
    limit = services.settings.max_body_bytes
    check_declared_length(request.headers.get("content-length"), limit)
    caller = services.keys.identify(request.headers)
    with services.gate.enter(caller.key_id):
        return await read_body(request.receive, limit)


async def json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; raises InvalidRequest."""
    try:
        value = json.loads(await small_body(request))
    except ValueError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise InvalidRequest("the body is JSON that is nested too deeply") from exc
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(value).__name__}")
    return value
