"""Errors as HTTP: status and body, in the shape that each protocol's clients expect."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.base.errors import (
    ConversionError,
    GrammarError,
    ImageError,
    RecipeError,
    RequestParseError,
)
from deepinfer_recipe.protocols.common.codec import ProtocolName
from deepinfer_recipe.protocols.table import protocol_of

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def _names(message: str, param: str) -> bool:
    """Whether a message names a field, `messages[0].content` or as Anthropic spells it."""
    return param in message or param.replace("[", ".").replace("]", "") in message


def error_body(
    protocol: ProtocolName,
    status: int,
    message: str,
    *,
    code: str = "invalid_value",
    param: str | None = None,
    type: str = "invalid_request_error",
) -> dict[str, Any]:
    """The error body of a protocol.

    Messages clients get `{"type": "error", "error": {"type", "message"}}`, the type derived
    from the status; the other two `{"error": {"message", "type", "param", "code"}}`.
    """
    if protocol_of(protocol).error_style == "anthropic":
        # There is no place for the field but the message.
        if param is not None and not _names(message, param):
            message = f"{param}: {message}"
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else type)
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


def error_response(protocol: ProtocolName, error: RecipeError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an error of this package.

    Errors that are the client's fault are 4xx and name the field; anything else is a 500
    without detail, since its text is not meant for clients.
    """
    if isinstance(error, ConversionError):
        code = error.code if error.code != "invalid_request_error" else "invalid_value"
        return error.status_code, error_body(
            protocol, error.status_code, error.message, code=code, param=error.param
        )
    if isinstance(error, RequestParseError):
        return 400, error_body(protocol, 400, str(error), param=error.param)
    if isinstance(error, GrammarError):
        return 400, error_body(protocol, 400, str(error), code=error.code, param=error.param)
    if isinstance(error, ImageError):
        return 400, error_body(protocol, 400, str(error), code="invalid_image")
    return 500, error_body(
        protocol, 500, "internal error", code="internal_error", type="server_error"
    )
