"""The FastAPI application: native routes, drop-in routes, health, usage."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from deepinfer_search_fetch import __version__
from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.errors import (
    InvalidRequestError,
    LimitError,
    RefusedError,
    SearchFetchError,
)
from deepinfer_search_fetch.models import (
    BatchItem,
    BatchRequest,
    BatchResponse,
    FetchRequest,
    FetchResponse,
    SearchRequest,
    SearchResponse,
)
from deepinfer_search_fetch.service.auth import ANONYMOUS, ApiKey, KeyStore
from deepinfer_search_fetch.service.compat import add_compat_routes
from deepinfer_search_fetch.service.metering import Charge, Ledger, stable_json
from deepinfer_search_fetch.service.page import TRY_PAGE
from deepinfer_search_fetch.service.ratelimit import RateLimiter

MAX_BODY_BYTES = 1024 * 1024
_CODE_OF_STATUS = {404: "not_found", 405: "invalid_argument", 413: "response_too_large"}


@dataclass(slots=True)
class Service:
    """The parts behind the routes. keys: None lets everyone in (loopback only)."""

    client: AsyncSearchFetch
    ledger: Ledger
    keys: KeyStore | None
    limiter: RateLimiter
    served: dict[str, int]

    def authenticate(self, request: Request, scope: str) -> ApiKey:
        """The caller's key, after scope, rate and quota checks; sets the rate headers."""
        key = ANONYMOUS
        if self.keys is not None:
            header = request.headers.get("authorization", "")
            bearer = header[7:].strip() if header[:7].lower() == "bearer " else ""
            secret = bearer or request.headers.get("x-api-key", "")
            if not secret:
                raise RefusedError(
                    "unauthorized", "send the key as 'Authorization: Bearer sk-…' or 'x-api-key'"
                )
            key = self.keys.find(secret)
        key.require(scope)
        request.state.rate_headers = self.limiter.take(key.id)
        if (
            key.monthly_quota is not None
            and self.ledger.month_quantity(key.id) >= key.monthly_quota
        ):
            raise LimitError("insufficient_quota", "this key's monthly quota is used up")
        return key


def require(scope: str) -> Callable[[Request], ApiKey]:
    """A dependency that authenticates for `scope`."""

    def dependency(request: Request) -> ApiKey:
        service: Service = request.app.state.service
        return service.authenticate(request, scope)

    return dependency


class MeteredResponse(Response):
    """JSON that runs `on_sent` only after the server took the last byte without an error."""

    media_type = "application/json; charset=utf-8"

    def __init__(self, body: bytes, on_sent: Callable[[], None]) -> None:
        super().__init__(body)
        self._on_sent = on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._on_sent()


def create_app(
    client: AsyncSearchFetch,
    ledger: Ledger,
    keys: KeyStore | None,
    limiter: RateLimiter | None = None,
) -> FastAPI:
    """The application. Whoever made the parts closes the ledger and the keys; the client is closed
    when the application shuts down."""
    service = Service(client, ledger, keys, limiter or RateLimiter(), {})

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await client.close()

    app = FastAPI(
        title="search-fetch",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    _add_error_handlers(app)
    app.middleware("http")(_finish)
    _add_routes(app, service)
    add_compat_routes(app, service.client, require, answer)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    fetch_key = Depends(require("fetch"))
    search_key = Depends(require("search"))

    @app.post("/v1/fetch", response_model=FetchResponse)
    async def fetch(body: FetchRequest, request: Request, key: ApiKey = fetch_key) -> Response:
        return await answer(request, key, body, service.client.fetch)

    @app.get("/v1/fetch", response_model=FetchResponse)
    async def fetch_by_query(
        body: Annotated[FetchRequest, Query()], request: Request, key: ApiKey = fetch_key
    ) -> Response:
        return await answer(request, key, body, service.client.fetch)

    @app.post("/v1/search", response_model=SearchResponse)
    async def search(body: SearchRequest, request: Request, key: ApiKey = search_key) -> Response:
        return await answer(request, key, body, service.client.search)

    @app.post("/v1/fetch/batch", response_model=BatchResponse)
    async def batch(body: BatchRequest, request: Request, key: ApiKey = fetch_key) -> Response:
        items = _run_batch(service, key, request.state.request_id, body)
        if "application/x-ndjson" in request.headers.get("accept", ""):
            return StreamingResponse(_ndjson(items), media_type="application/x-ndjson")
        results = sorted([item async for item in items], key=lambda item: item.index)
        return JSONResponse(BatchResponse(results=results).model_dump(mode="json", by_alias=True))

    @app.get("/v1/usage")
    async def usage(
        key: ApiKey = Depends(require("search")),  # noqa: B008
        since: float = 0.0,
        until: float = 1e18,
    ) -> dict[str, Any]:
        everyone = "admin" in key.scopes
        return {"usage": service.ledger.usage(None if everyone else key.id, since, until)}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        return {"status": "ready", "documents": service.client.backend.size()}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        lines = ["# TYPE search_fetch_responses_total counter"]
        for label, count in sorted(service.served.items()):
            route, _, status = label.rpartition(" ")
            lines.append(
                f'search_fetch_responses_total{{route="{route}",status="{status}"}} {count}'
            )
        lines.append("# TYPE search_fetch_index_documents gauge")
        lines.append(f"search_fetch_index_documents {service.client.backend.size()}")
        return "\n".join(lines) + "\n"

    @app.get("/", include_in_schema=False)
    async def try_page() -> Response:
        return Response(TRY_PAGE, media_type="text/html; charset=utf-8")

    _ = (fetch, fetch_by_query, search, batch, usage, healthz, readyz, metrics, try_page)


async def answer(
    request: Request,
    key: ApiKey,
    body: Any,
    work: Callable[[Any], Awaitable[Any]],
    shape: Callable[[Any], dict[str, Any]] | None = None,
) -> Response:
    """Run `work`, render its result, and charge for it once it was sent.

    shape: another JSON shape of the same result (drop-in routes).
    """
    service: Service = request.app.state.service
    started = time.monotonic()
    fingerprint = stable_json([request.url.path, body.model_dump(mode="json")])
    idempotency_key = request.headers.get("idempotency-key")
    if idempotency_key:
        stored = service.ledger.replay(key.id, idempotency_key, fingerprint)
        if stored is not None:
            return Response(stored, media_type="application/json; charset=utf-8")
    result = await work(body)
    charge = _charge(service, key, request.state.request_id, result, started)
    if charge is None:
        result.usage.billable = False
        result.usage.quantity = 0
    content = shape(result) if shape else result.model_dump(mode="json", by_alias=True)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    if idempotency_key:
        service.ledger.remember(key.id, idempotency_key, fingerprint, text)

    def settle() -> None:
        if charge is not None:
            service.ledger.record(charge)

    return MeteredResponse(text.encode("utf-8", "replace"), settle)


def _charge(
    service: Service, key: ApiKey, request_id: str, result: Any, started: float
) -> Charge | None:
    ms = int((time.monotonic() - started) * 1000)
    if isinstance(result, SearchResponse):
        if not result.results:
            return None
        return Charge(request_id, key.id, "search", 1, False, 0, ms, "")
    # The following pages of a document that was just paid for are free.
    if result.tokens.offset > 0 and service.ledger.was_paid(key.id, result.id):
        return None
    size = len(result.content.encode("utf-8", "replace"))
    return Charge(request_id, key.id, "fetch", 1, result.cache.hit, size, ms, result.id)


async def _run_batch(
    service: Service, key: ApiKey, request_id: str, body: BatchRequest
) -> AsyncIterator[BatchItem]:
    """Items in completion order; one URL asked for twice is fetched and charged once."""
    paid: set[str] = set()
    items = service.client.fetch_many(body.requests, concurrency=body.concurrency)
    async for item in items:
        if item.response is not None:
            charge = _charge(
                service, key, f"{request_id}.{item.index}", item.response, time.monotonic()
            )
            if charge is None or item.response.id in paid:
                item.response.usage.billable = False
                item.response.usage.quantity = 0
            else:
                paid.add(item.response.id)
                service.ledger.record(charge)
        yield item
        if body.fail_fast and not item.ok:
            break


async def _ndjson(items: AsyncIterator[BatchItem]) -> AsyncIterator[bytes]:
    async for item in items:
        yield item.model_dump_json(by_alias=True).encode() + b"\n"


async def _finish(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Request id, size check, common headers, counters."""
    given = request.headers.get("x-request-id", "")
    ok = 1 <= len(given) <= 64 and given.isascii() and given.replace("-", "").isalnum()
    request.state.request_id = f"{given}-{secrets.token_hex(4)}" if ok else secrets.token_hex(12)
    request.state.rate_headers = {}
    service: Service = request.app.state.service
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        response: Response = _error_response(
            request,
            LimitError("response_too_large", f"request body exceeds {MAX_BODY_BYTES} bytes"),
        )
    elif service.keys is None and not _is_local(request.headers.get("host")):
        # Without keys only the Host header tells a local client from a web page that rebinds DNS.
        response = _error_response(
            request,
            RefusedError("forbidden", "without API keys only loopback host names are served"),
        )
    else:
        response = await call_next(request)
    response.headers["X-Request-Id"] = request.state.request_id
    response.headers.setdefault("Cache-Control", "no-store")
    for name, value in request.state.rate_headers.items():
        response.headers[name] = value
    route = request.scope.get("route")
    label = f"{getattr(route, 'path', 'unknown')} {response.status_code}"
    service.served[label] = service.served.get(label, 0) + 1
    return response


def _is_local(host: str | None) -> bool:
    name = (host or "localhost").rpartition(":")[0] or host or "localhost"
    return name.strip("[]") in ("localhost", "127.0.0.1", "::1")


def _add_error_handlers(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        if isinstance(error, SearchFetchError):
            return _error_response(request, error)
        if isinstance(error, (RequestValidationError, ValidationError)):
            return _error_response(request, _validation_error(error))
        if isinstance(error, HTTPException):
            code: Any = _CODE_OF_STATUS.get(error.status_code, "invalid_argument")
            wrapped = InvalidRequestError(code, str(error.detail), http_status=error.status_code)
            return _error_response(request, wrapped)
        return _error_response(request, SearchFetchError("internal", "internal error"))

    for kind in (SearchFetchError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, ours)


def _validation_error(error: RequestValidationError | ValidationError) -> InvalidRequestError:
    problems = [
        {
            "field": ".".join(str(p) for p in e["loc"] if p not in ("body", "query")),
            "problem": e["msg"],
        }
        for e in error.errors()
    ]
    first = problems[0] if problems else {"field": "", "problem": "invalid"}
    return InvalidRequestError(
        "invalid_argument", f"{first['field']}: {first['problem']}", details={"problems": problems}
    )


def _error_response(request: Request, error: SearchFetchError) -> Response:
    request_id = getattr(request.state, "request_id", None)
    headers = {}
    if error.code in ("rate_limited", "host_busy"):
        headers["Retry-After"] = str(error.details.get("retry_after", 1))
    return JSONResponse(error.body(request_id), status_code=error.http_status, headers=headers)
