"""The application: routes, and one handler for whatever a route raises."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from deepinfer_engine import __version__
from deepinfer_engine.codec.errors import InvalidRequest, MethodNotAllowed, wire_error
from deepinfer_engine.codec.protocol import Codec
from deepinfer_engine.errors import EngineError
from deepinfer_engine.router.client import EngineClient
from deepinfer_engine.server import (
    admin,
    chat,
    completions,
    docs_page,
    fleet,
    health,
    messages,
    models,
    responses,
    start_page,
    status,
    tokens,
    usage,
)
from deepinfer_engine.server.auth import AdminGate, KeyRing, accepted_keys, read_secret
from deepinfer_engine.server.billing import open_billing
from deepinfer_engine.server.browser import BrowserRules
from deepinfer_engine.server.clock import Clock, SystemClock
from deepinfer_engine.server.compat_metrics import CompatCollector
from deepinfer_engine.server.connections import ConnectionLimits, ConnectionTable
from deepinfer_engine.server.exposure import is_loopback, refuse_open
from deepinfer_engine.server.limits import ByteBudget, Gate, Rates
from deepinfer_engine.server.manners import Manners, not_found
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.server.openapi import describe
from deepinfer_engine.server.request_id import RequestIdMiddleware
from deepinfer_engine.server.services import TOKENISERS, Services, protocol_of
from deepinfer_engine.server.tokenising import TokeniserProcesses
from deepinfer_engine.server.tracing import open_tracing
from deepinfer_engine.settings import Settings


def create_app(
    engine: EngineClient,
    codec: Codec,
    settings: Settings,
    *,
    clock: Clock | None = None,
    wall: Callable[[], float] = time.time,
) -> FastAPI:
    """An ASGI application over `engine`; it does not own the engine and never closes it.

    `app.state.services.gate` is how a supervisor drains it: set `draining`, wait for `in_flight ==
    0`. Raises ConfigError when a key file cannot be used, or the server would be open to strangers.
    """
    clock = clock or SystemClock()
    keys, admin_key = accepted_keys(settings), read_secret(settings.admin_key_file)
    refuse_open(settings, keys)
    tokenizer = codec.tokenizer_path
    share = settings.key_share
    app = FastAPI(title="deepinfer", version=__version__, docs_url=None, redoc_url=None)
    app.state.started = wall()
    app.state.services = Services(
        engine=engine,
        codec=codec,
        settings=settings,
        keys=KeyRing(keys),
        admin=AdminGate(admin_key),
        gate=Gate(settings.max_concurrent_requests, settings.max_concurrent_per_key),
        metrics=Metrics(),
        clock=clock,
        wall=wall,
        pixels=ByteBudget(settings.max_pixel_bytes, "decoded pictures", share),
        bodies=ByteBudget(settings.max_queued_bytes, "bodies", share),
        rates=Rates(settings.requests_per_minute, settings.tokens_per_minute, clock),
        connections=ConnectionTable(
            ConnectionLimits(
                connections=settings.max_connections,
                idle_s=settings.http_idle_s,
                head_s=settings.header_timeout_s,
                body_s=settings.body_timeout_s,
            ),
            clock,
        ),
        tokenisers=tokenizer and TokeniserProcesses(tokenizer, processes=TOKENISERS),
        billing=open_billing(settings, codec.model_names, wall),
        tracing=open_tracing(settings.traces, codec.model_names[0]),
        private=is_loopback(settings.host),
    )
    services: Services = app.state.services
    services.history.begin(clock.monotonic())
    if settings.metrics_compat:
        compat = CompatCollector(services.metrics, settings.metrics_compat, codec.model_names[0])
        services.metrics.registry.register(compat)
        services.compat = compat
    for module in _ROUTES:
        app.include_router(module.router)
    app.add_middleware(Manners, paths=_methods())
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["*"],
            max_age=600,
        )
    app.add_middleware(
        BrowserRules, hosts=(settings.host, *settings.allowed_hosts), origins=settings.cors_origins
    )
    app.add_middleware(RequestIdMiddleware)
    describe(app)
    app.add_exception_handler(EngineError, _told)
    app.add_exception_handler(HTTPException, _told)
    app.add_exception_handler(Exception, _told)
    return app


_ROUTES = (
    chat, completions, responses, messages, models, health, tokens, usage, status, admin, fleet,
    docs_page, start_page,
)  # fmt: skip


def _methods() -> dict[str, tuple[str, ...]]:
    """Methods of each path without parameters."""
    found: dict[str, tuple[str, ...]] = {}
    for route in (route for module in _ROUTES for route in module.router.routes):
        if isinstance(route, Route) and route.methods and "{" not in route.path:
            more = ("HEAD",) if "GET" in route.methods else ()
            found[route.path] = (*found.get(route.path, ()), *route.methods, *more)
    return found


async def _told(request: Request, exc: Exception) -> Response:
    """An exception of a route that answers at once, in the shape of the caller's protocol."""
    allow = None
    if isinstance(exc, HTTPException):
        path = f"{request.method} {request.url.path}"
        known = {
            404: not_found(request.method, request.url.path),
            405: MethodNotAllowed(f"{path} is not allowed"),
        }
        allow = (exc.headers or {}).get("allow") or (exc.headers or {}).get("Allow")
        exc = known.get(exc.status_code) or InvalidRequest(str(exc.detail))
    protocol = protocol_of(request.url.path, request.headers)
    error = wire_error(exc, protocol, request.state.request_id)
    request.app.state.services.metrics.errors.labels(protocol, error.code).inc()
    headers = {**error.headers, **({"allow": allow} if allow else {})}
    return JSONResponse(error.body, error.status, headers=headers)
