"""Every error this package raises, and the one table from code to HTTP status.

SearchFetchError             carries code, http_status, message, retryable, details
├── InvalidRequestError      the caller must change the request (URL, argument, field)
├── RefusedError             policy says no: address, port, scheme, robots.txt, missing scope
├── UpstreamError            the other side failed: DNS, connect, TLS, HTTP status, time
├── LimitError               a size limit, a rate limit or a quota was reached
└── ContentError             a page came back, but nothing usable could be made of it
"""

from __future__ import annotations

from typing import Any, Final, Literal

from deepinfer_search_fetch.json_values import as_object

ErrorCode = Literal[
    "invalid_url",
    "invalid_argument",
    "not_found",
    "conflict",
    "unauthorized",
    "insufficient_quota",
    "forbidden",
    "blocked_address",
    "blocked_port",
    "blocked_scheme",
    "robots_disallowed",
    "dns_failure",
    "connect_failure",
    "tls_failure",
    "upstream_http",
    "too_many_redirects",
    "redirect_loop",
    "response_too_large",
    "decompression_bomb",
    "unsupported_content_type",
    "feature_unavailable",
    "extraction_empty",
    "challenge_page",
    "timeout",
    "rate_limited",
    "host_busy",
    "unavailable",
    "internal",
]


class SearchFetchError(Exception):
    """Root of this package's errors; `code` is stable, `message` is for people."""

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        http_status: int | None = None,
        retryable: bool | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        status, default_retryable = _TABLE[code]
        self.code: ErrorCode = code
        self.message = message
        self.http_status = status if http_status is None else http_status
        self.retryable = default_retryable if retryable is None else retryable
        self.details: dict[str, Any] = details or {}

    def body(self, request_id: str | None = None) -> dict[str, Any]:
        """The JSON error body of every route: {"error": {...}}."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "type": type(self).__name__,
                "retryable": self.retryable,
                "request_id": request_id,
                "details": self.details,
            }
        }


def error_from_body(body: object, http_status: int) -> SearchFetchError:
    """The error that a body of `SearchFetchError.body` tells. Raises ValueError for others."""
    told = as_object((as_object(body) or {}).get("error")) or {}
    if told.get("code") not in _TABLE:
        raise ValueError("not an error body of this service")
    kinds = (InvalidRequestError, RefusedError, UpstreamError, LimitError, ContentError)
    named: dict[str, type[SearchFetchError]] = {kind.__name__: kind for kind in kinds}
    return named.get(str(told.get("type")), SearchFetchError)(
        told["code"],
        str(told.get("message")),
        http_status=http_status,
        retryable=bool(told.get("retryable")),
        details=dict(as_object(told.get("details")) or {}),
    )


class InvalidRequestError(SearchFetchError):
    """The request itself is wrong; sending it again unchanged cannot help."""


class RefusedError(SearchFetchError):
    """Allowed by syntax, forbidden by policy."""


class UpstreamError(SearchFetchError):
    """The remote side could not be reached or did not answer well."""


class LimitError(SearchFetchError):
    """A size, rate or quota limit was reached."""


class ContentError(SearchFetchError):
    """The bytes arrived, but they hold nothing this service can return."""


# code -> (HTTP status, retryable)
_TABLE: Final[dict[str, tuple[int, bool]]] = {
    "invalid_url": (400, False),
    "invalid_argument": (422, False),
    "not_found": (404, False),
    "conflict": (409, False),
    "unauthorized": (401, False),
    "insufficient_quota": (402, False),
    "forbidden": (403, False),
    "blocked_address": (403, False),
    "blocked_port": (403, False),
    "blocked_scheme": (403, False),
    "robots_disallowed": (403, False),
    "dns_failure": (502, True),
    "connect_failure": (502, True),
    "tls_failure": (502, False),
    "upstream_http": (502, True),
    "too_many_redirects": (502, False),
    "redirect_loop": (502, False),
    "response_too_large": (413, False),
    "decompression_bomb": (413, False),
    "unsupported_content_type": (415, False),
    "feature_unavailable": (501, False),
    "extraction_empty": (422, False),
    "challenge_page": (422, False),
    "timeout": (504, True),
    "rate_limited": (429, True),
    "host_busy": (429, True),
    "unavailable": (503, True),
    "internal": (500, True),
}
