"""X-Request-Id in and out, on every response: pure ASGI, since it must not buffer a stream."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_engine.server.limits import request_id
from deepinfer_engine.server.services import protocol_of


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

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(raw=message["headers"])
                out["x-request-id"] = identity
                if messages:
                    out["request-id"] = identity
            await send(message)

        await self.app(scope, receive, send_with_id)
