"""The FastAPI application: native routes, drop-in routes, MCP, health, usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer_search_fetch import __version__
from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.models import (
    BatchRequest,
    BatchResponse,
    FetchRequest,
    FetchResponse,
    SearchRequest,
    SearchResponse,
)
from deepinfer_search_fetch.service.answers import answer, compact
from deepinfer_search_fetch.service.auth import ApiKey, KeyStore
from deepinfer_search_fetch.service.batch import batch_answer
from deepinfer_search_fetch.service.compat import add_compat_routes
from deepinfer_search_fetch.service.compat_root import add_root_routes
from deepinfer_search_fetch.service.delivery import Delivery
from deepinfer_search_fetch.service.docs_page import docs_response
from deepinfer_search_fetch.service.idempotency import Replays
from deepinfer_search_fetch.service.mcp_http import MCP_PATH, McpRoute
from deepinfer_search_fetch.service.metering import Ledger
from deepinfer_search_fetch.service.metrics import Metrics
from deepinfer_search_fetch.service.page import page_response
from deepinfer_search_fetch.service.problems import JSON, ErrorBody, add_error_handlers
from deepinfer_search_fetch.service.ratelimit import RateLimiter
from deepinfer_search_fetch.service.settings import ServiceSettings
from deepinfer_search_fetch.service.state import Service, call_of
from deepinfer_search_fetch.service.usage import UsageReport, report

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in (400, 401, 402, 403, 404, 409, 413, 415, 422, 429, 500, 501, 502, 503, 504)
}


def require(scope: str | None) -> Callable[[Request], Awaitable[ApiKey]]:
    """A dependency that authenticates for `scope`; None lets any live key in."""

    async def dependency(request: Request) -> ApiKey:  # without `async`, on a thread each time
        service: Service = request.app.state.service
        return service.authorise(call_of(request.scope), request.headers, scope)

    return dependency


class _Application(FastAPI):
    """The framework behind `Delivery`: what is refused costs none of the framework's work."""

    outside: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.inside if scope["type"] == "lifespan" else self.outside
        await answer(scope, receive, send)

    async def inside(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Routes and what surrounds them."""
        await super().__call__(scope, receive, send)


def create_app(
    client: AsyncSearchFetch,
    ledger: Ledger,
    keys: KeyStore | None,
    settings: ServiceSettings | None = None,
) -> FastAPI:
    """The application. Whoever made the parts closes the ledger and the keys; the client is closed
    when the application shuts down. keys: None serves everyone, to loopback hosts only.
    """
    settings = settings or ServiceSettings()
    service = Service(
        client=client,
        ledger=ledger,
        keys=keys,
        settings=settings,
        limiter=RateLimiter(settings.rate_per_second, settings.rate_burst),
        metrics=Metrics(lambda: client.backend.size()),
        replays=Replays(ledger),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close)
            await client.warm()
            await stack.enter_async_context(mcp.running())
            yield

    app = _Application(
        title="search-fetch",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    app.state.service = service
    add_error_handlers(app)
    app.outside = Delivery(app.inside, service)
    if settings.cors_origins:
        app.outside = CORSMiddleware(
            app.outside,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "X-Api-Key", "Content-Type", "Idempotency-Key"],
            expose_headers=["X-Request-Id", "Retry-After", "X-RateLimit-Remaining"],
        )
    _add_work_routes(app, service)
    _add_operator_routes(app, service)
    add_compat_routes(app, service.client, require)
    add_root_routes(app, service.client, require)
    mcp = McpRoute(service)
    app.router.routes.append(Route(MCP_PATH, endpoint=mcp, include_in_schema=False))
    return app


def _add_work_routes(app: FastAPI, service: Service) -> None:
    fetch_key, search_key = [Depends(require("fetch"))], [Depends(require("search"))]

    @app.post("/v1/fetch", response_model=FetchResponse, dependencies=fetch_key)
    async def fetch(body: FetchRequest, request: Request) -> Response:
        return await answer(request, body, service.client.fetch)

    @app.get("/v1/fetch", response_model=FetchResponse, dependencies=fetch_key)
    async def fetch_by_query(body: Annotated[FetchRequest, Query()], request: Request) -> Response:
        return await answer(request, body, service.client.fetch)

    @app.post("/v1/search", response_model=SearchResponse, dependencies=search_key)
    async def search(body: SearchRequest, request: Request) -> Response:
        return await answer(request, body, service.client.search)

    @app.post("/v1/fetch/batch", response_model=BatchResponse, dependencies=fetch_key)
    async def batch(body: BatchRequest, request: Request) -> Response:
        return await batch_answer(request, body)

    _ = (fetch, fetch_by_query, search, batch)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/usage", response_model=UsageReport, response_model_exclude_none=True)
    async def usage(
        key: ApiKey = Depends(require(None)),  # noqa: B008
        since: Annotated[str | None, Query(alias="from", max_length=40)] = None,
        until: Annotated[str | None, Query(alias="to", max_length=40)] = None,
        group_by: Annotated[str, Query(max_length=100)] = "key,endpoint",
    ) -> Response:
        """Sums of this key's billable calls; of every key's for the scope `admin`."""
        whose = None if "admin" in key.scopes else key.id
        found = report(service.ledger, whose, since, until, group_by)
        return Response(compact(found).encode(), media_type=JSON)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok", "version": __version__}

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        """The index can be read."""
        return {"status": "ready", "documents": service.client.backend.size()}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def try_page() -> Response:
        return page_response()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return docs_response(app)

    _ = (usage, healthz, readyz, metrics, try_page, docs)
