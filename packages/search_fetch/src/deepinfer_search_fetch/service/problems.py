"""Every failure as the one JSON error body, whatever raised it: ours, the framework or a bug."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from deepinfer_search_fetch.errors import ErrorCode, InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.service.state import call_of

log = logging.getLogger("deepinfer_search_fetch.service")
JSON = "application/json; charset=utf-8"
_CODE_OF_STATUS: dict[int, ErrorCode] = {
    404: "not_found",
    405: "invalid_argument",
    413: "response_too_large",
}
_MAX_PROBLEMS = 20


class ErrorInfo(BaseModel):
    """`code` is stable; `message` is for people."""

    code: str
    message: str
    type: str
    retryable: bool
    request_id: str | None
    details: dict[str, Any]


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorInfo


def problem(
    request_id: str, error: SearchFetchError, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer that tells an error. headers: further ones."""
    extra = dict(headers or {})
    if error.code in ("rate_limited", "host_busy", "unavailable"):
        extra["Retry-After"] = str(error.details.get("retry_after", 1))
    if error.code == "unauthorized":
        extra["WWW-Authenticate"] = "Bearer"
    text = json.dumps(error.body(request_id), ensure_ascii=False, separators=(",", ":"))
    return Response(text.encode("utf-8", "replace"), error.http_status, extra, JSON)


def add_error_handlers(app: FastAPI) -> None:
    """Handlers of what routes raise, of bugs too."""

    async def ours(request: Request, error: Exception) -> Response:
        return problem(call_of(request.scope).request_id, as_error(error), allowed(error))

    async def unexpected(request: Request, error: Exception) -> Response:
        request_id = call_of(request.scope).request_id
        log.error("request %s failed", request_id, exc_info=error)
        return problem(request_id, as_error(error))

    app.add_exception_handler(Exception, unexpected)
    for kind in (SearchFetchError, RequestValidationError, HTTPException, ValidationError):
        app.add_exception_handler(kind, ours)


def as_error(error: Exception) -> SearchFetchError:
    """An exception as an error of this package."""
    if isinstance(error, SearchFetchError):
        return error
    if isinstance(error, (RequestValidationError, ValidationError)):
        return validation_error(error)
    if isinstance(error, HTTPException):
        code = _CODE_OF_STATUS.get(error.status_code, "invalid_argument")
        return InvalidRequestError(code, str(error.detail), http_status=error.status_code)
    return SearchFetchError("internal", "internal error")


def allowed(error: Exception) -> dict[str, str]:
    """The headers an HTTP exception brings (405 names the methods)."""
    return dict(error.headers or {}) if isinstance(error, HTTPException) else {}


def validation_error(
    error: RequestValidationError | ValidationError, http_status: int = 422
) -> InvalidRequestError:
    """Which fields were wrong and why; never the values, which may be secret."""
    # The framework puts the part of the request before the field: ("body", "query").
    skipped = 1 if isinstance(error, RequestValidationError) else 0
    problems: list[dict[str, Any]] = [
        {"field": ".".join(str(p) for p in e["loc"][skipped:]), "problem": e["msg"]}
        for e in error.errors()[:_MAX_PROBLEMS]
    ]
    first = problems[0] if problems else {"field": "", "problem": "invalid"}
    message = f"{first['field']}: {first['problem']}".removeprefix(": ")
    return InvalidRequestError(
        "invalid_argument", message, http_status=http_status, details={"problems": problems}
    )
