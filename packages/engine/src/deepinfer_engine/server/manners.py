"""What HTTP clients expect of any server: HEAD, OPTIONS, encodings, and where what is not here is.

Pure ASGI, in front of the routes: a streamed answer must not be buffered.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_engine.codec.errors import NotFound, UnsupportedEncoding

ELSEWHERE = {
    "/v1/embeddings": "this model makes no embeddings; run an embedding server beside it",
    "/v1/moderations": "this server has no moderation model",
    "/v1/images": "this model makes no pictures",
    "/v1/audio": "this model neither hears nor speaks",
    "/v1/assistants": "this API has ended; use /v1/responses with previous_response_id",
    "/v1/threads": "this API has ended; use /v1/responses with previous_response_id",
    "/v1/files": "this server keeps no files; send their content in the request",
    "/v1/batches": "use `deepinfer generate in.jsonl out.jsonl`",
    "/v1/messages/batches": "use `deepinfer generate in.jsonl out.jsonl`",
    "/v1/fine_tuning": "this server does not train",
    "/v1/realtime": "stream /v1/responses instead",
    "/v1/responses/compact": "this server does not rewrite conversations; shorten `input`",
}
"""Routes of the public APIs that this server does not have, and what to do instead."""


def not_found(method: str, path: str) -> NotFound:
    """The error for a path that no route has."""
    for prefix, advice in ELSEWHERE.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return NotFound(f"there is no {method} {path}: {advice}")
    return NotFound(f"there is no {method} {path}")


def check_encoding(request: Request | Headers) -> None:
    """Raise UnsupportedEncoding for a body that is compressed: its size would not be known."""
    headers = request if isinstance(request, Headers) else request.headers
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedEncoding(
            f"content-encoding: send the body uncompressed, got {encoding[:40]!r}",
            param="content-encoding",
        )


class Manners:
    """HEAD is GET without a body; OPTIONS tells the methods of a path."""

    def __init__(self, app: ASGIApp, paths: dict[str, tuple[str, ...]]) -> None:
        """paths: methods of each path without parameters."""
        self.app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS":
            methods = self._paths.get(scope["path"].rstrip("/") or "/")
            if methods is None:
                await self.app(scope, receive, send)
                return
            allow = ", ".join(sorted({*methods, "OPTIONS"})).encode()
            headers = [(b"allow", allow), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, without_body)
