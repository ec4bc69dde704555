"""X-Request-Id in and out, on every response, and one log line a request that names it.

Pure ASGI, since it must not buffer a stream.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_engine.pd.announcing import PATH as ANNOUNCE_PATH
from deepinfer_engine.server.limits import request_id
from deepinfer_engine.server.services import protocol_of

log = logging.getLogger(__name__)
_PROBES = frozenset({"/health", "/health/live", "/health/ready", "/metrics", ANNOUNCE_PATH})
"""Asked every few seconds by machines: their lines are for debugging only."""
_LONGEST_PATH = 200


class RequestIdMiddleware:
    """Puts the id into `scope["state"]["request_id"]` and into the response's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = identity
        messages = protocol_of(scope["path"], headers) == "messages"

        status: int | str = "-"  # the client went before there was one

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(raw=message["headers"])
                out["x-request-id"] = identity
                if messages:
                    out["request-id"] = identity
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            log.log(level, "%s %s %s %s", scope["method"], _shown(scope), status, identity)


def _shown(scope: Scope) -> str:
    """The path as it was sent, percent-encoded and so on one line; without its query."""
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "backslashreplace")
    text = raw.partition(b"?")[0][:_LONGEST_PATH].decode("ascii", "backslashreplace")
    return "".join(one if one.isprintable() else "?" for one in text)
