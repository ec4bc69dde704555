"""Errors of the HTTP surface, and the one table that turns any exception into a wire error.

EngineError
├── RequestError
│   └── HttpError            carries its own row of the table
│       ├── InvalidRequest   the body is not JSON, or a field is missing or out of range   400
│       ├── ContextLengthExceeded  prompt + wanted output pass the model's length         400
│       ├── AuthenticationFailed                                                          401
│       ├── PermissionDenied                                                              403
│       ├── NotFound         no such route or object                                      404
│       │   └── PreviousResponseNotFound                                                  404
│       ├── MethodNotAllowed                                                              405
│       ├── BodyTooLarge                                                                  413
│       ├── UnsupportedEncoding  the body is compressed                                   415
│       └── LimitExceeded    too many requests of this key in flight                      429
└── EngineUnavailable
    └── Draining             this server is shutting down                             503 / 529
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer_engine.errors import (
    CapacityError,
    ConstraintsUnavailable,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
    SchemaTooComplex,
    UnknownModel,
)

ChatProtocol = Literal["chat", "responses", "messages"]
"""Those that bring a conversation."""
Protocol = ChatProtocol | Literal["completions"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: HTTP status, OpenAI type and code, Messages status and type."""

    status: int
    type: str
    code: str
    messages_status: int
    messages_type: str


_INVALID = Row(400, "invalid_request_error", "invalid_value", 400, "invalid_request_error")
_TOO_LONG = Row(
    400, "invalid_request_error", "context_length_exceeded", 400, "invalid_request_error"
)
_TOO_COMPLEX = Row(400, "invalid_request_error", "schema_too_complex", 400, "invalid_request_error")
_NOT_HERE = Row(501, "invalid_request_error", "not_implemented", 501, "api_error")
_NO_MODEL = Row(404, "invalid_request_error", "model_not_found", 404, "not_found_error")
_OVERLOADED = Row(503, "server_error", "overloaded", 529, "overloaded_error")
_TIMEOUT = Row(504, "server_error", "timeout", 504, "timeout_error")
_INTERNAL = Row(500, "server_error", "internal_error", 500, "api_error")


class HttpError(RequestError):
    """A refusal decided by the HTTP layer itself; the subclass names its row."""

    row: Row = _INVALID
    details: dict[str, str] | None = None
    """More for clients of Messages that look for a code of their own."""


class InvalidRequest(HttpError):  # noqa: N818 - reads as the condition it reports
    """The request cannot be understood; `param` names the field."""


class ContextLengthExceeded(HttpError):  # noqa: N818
    """Prompt and wanted output together pass the model's length; the message has the numbers."""

    row = _TOO_LONG


class AuthenticationFailed(HttpError):  # noqa: N818
    """No key, or one this server does not know."""

    row = Row(401, "authentication_error", "invalid_api_key", 401, "authentication_error")


class PermissionDenied(HttpError):  # noqa: N818
    """The caller is known, but may not do this."""

    row = Row(403, "permission_error", "permission_denied", 403, "permission_error")


class NotFound(HttpError):  # noqa: N818
    """There is nothing at this path."""

    row = Row(404, "invalid_request_error", "not_found", 404, "not_found_error")


class PreviousResponseNotFound(NotFound):
    """The answer that a request wants to go on from is not kept here."""

    row = Row(404, "invalid_request_error", "previous_response_not_found", 404, "not_found_error")


class MethodNotAllowed(HttpError):  # noqa: N818
    """The path exists, but not for this method."""

    row = Row(405, "invalid_request_error", "method_not_allowed", 405, "invalid_request_error")


class BodyTooLarge(HttpError):  # noqa: N818
    """The request body passed the limit while it was being read."""

    row = Row(413, "invalid_request_error", "request_too_large", 413, "request_too_large")


class UnsupportedEncoding(HttpError):  # noqa: N818
    """The body is compressed, which nobody here unpacks."""

    row = Row(415, "invalid_request_error", "unsupported_encoding", 415, "invalid_request_error")


class LimitExceeded(HttpError):  # noqa: N818
    """The key has too many requests in flight."""

    row = Row(429, "rate_limit_error", "rate_limit_exceeded", 429, "rate_limit_error")

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(EngineUnavailable):
    """The server finishes what it runs and takes nothing new."""


# First match wins, so subclasses stand before their bases.
_TABLE: tuple[tuple[type[BaseException], Row], ...] = (
    (UnknownModel, _NO_MODEL),
    (PromptTooLong, _TOO_LONG),
    (CapacityError, _TOO_LONG),
    (SchemaTooComplex, _TOO_COMPLEX),
    (ConstraintsUnavailable, _NOT_HERE),
    (RequestError, _INVALID),
    (EngineUnavailable, _OVERLOADED),
    (TimeoutError, _TIMEOUT),
    (EngineLost, _INTERNAL),
)


@dataclass(frozen=True, slots=True)
class WireError:
    """An error as a client sees it, before or (`event_json`) after the 200 went out."""

    status: int
    code: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def json(self) -> str:
        return _dumps(self.body)

    def event(self, protocol: Protocol) -> tuple[str | None, str]:
        """Name and data of the event that ends a stream with this error."""
        if protocol == "responses":
            error = self.body["error"]
            fields = {name: error[name] for name in ("code", "message", "param")}
            return "error", _dumps({"type": "error", **fields})
        return ("error" if protocol == "messages" else None), self.json


def _dumps(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def wire_error(exc: BaseException, protocol: Protocol, request_id: str) -> WireError:
    """The table, applied. Text of an unexpected exception never leaves the process."""
    row = exc.row if isinstance(exc, HttpError) else _row_of(exc)
    if row is _INTERNAL and not isinstance(exc, EngineLost):
        message = f"internal error; the server's log has the details under request {request_id}"
    else:
        message = str(exc) or row.code.replace("_", " ")
    headers = {"Retry-After": str(max(1, math.ceil(wait)))} if (wait := _retry_after(exc)) else {}
    if isinstance(exc, Draining):
        headers["Connection"] = "close"
    param = "model" if isinstance(exc, UnknownModel) else getattr(exc, "param", None)
    if protocol == "messages":
        # There is no place for the field but the message.
        if param and param not in message and _spelled(param) not in message:
            message = f"{param}: {message}"
        error: dict[str, Any] = {"type": row.messages_type, "message": message}
        if details := getattr(exc, "details", None):
            error["details"] = details
        body: dict[str, Any] = {"type": "error", "error": error, "request_id": request_id}
        return WireError(row.messages_status, row.messages_type, body, headers)
    error = {"message": message, "type": row.type, "param": param, "code": row.code}
    return WireError(row.status, row.code, {"error": error}, headers)


def _spelled(param: str) -> str:
    """A field as Anthropic's messages spell it: `messages.0.content`."""
    return param.replace("[", ".").replace("]", "")


def _row_of(exc: BaseException) -> Row:
    return next((row for kind, row in _TABLE if isinstance(exc, kind)), _INTERNAL)


def _retry_after(exc: BaseException) -> float | None:
    wait = getattr(exc, "retry_after_s", None)
    return float(wait) if wait is not None else None
