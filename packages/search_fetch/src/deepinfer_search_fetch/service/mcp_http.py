"""MCP over Streamable HTTP at `/mcp`, with the keys, limits and ledger of the REST routes.

Stateless: every message is a request of its own, so that any number of workers may serve it. A
message takes one rate token; a tool call that succeeds is charged as its REST twin is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from deepinfer_search_fetch.admission import CLIENT
from deepinfer_search_fetch.errors import InvalidRequestError, RefusedError, SearchFetchError
from deepinfer_search_fetch.models import FetchResponse, SearchResponse
from deepinfer_search_fetch.service.answers import charge_for, observed
from deepinfer_search_fetch.service.delivery import host_name, is_loopback_name
from deepinfer_search_fetch.service.mcp import build_server
from deepinfer_search_fetch.service.problems import problem
from deepinfer_search_fetch.service.state import Call, Service, call_of

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

MCP_PATH = "/mcp"
_GRANTS = "search_fetch.scopes"
_LABEL = SimpleNamespace(path=MCP_PATH)


class McpRoute:
    """The ASGI endpoint. Without the `mcp` extra it answers `feature_unavailable`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._manager: StreamableHTTPSessionManager | None = None
        self._missing: SearchFetchError | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """The protocol's session manager, while the application runs."""
        try:
            server = build_server(self._service.client, self._guard)
        except SearchFetchError as error:
            self._missing = error
            yield
            return
        from mcp.server.transport_security import TransportSecuritySettings

        server.streamable_http_app(
            streamable_http_path=MCP_PATH,
            json_response=True,
            stateless_http=True,
            # This route checks Host and Origin itself, with names the operator gives.
            transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )
        self._manager = server.session_manager
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = _LABEL
        call, headers = call_of(scope), Headers(scope=scope)
        try:
            self._check_names(headers)
            if scope["method"] != "POST":
                # Without sessions there is no stream to open and none to end.
                raise InvalidRequestError(
                    "invalid_argument", "MCP messages are sent with POST", http_status=405
                )
            key = self._service.authorise(call, headers, None)
            if self._manager is None:
                raise self._missing or SearchFetchError("unavailable", "MCP is not running")
            scope[_GRANTS] = key
            await self._manager.handle_request(scope, receive, send)
        except SearchFetchError as error:
            allow = {"Allow": "POST"} if error.http_status == 405 else None
            await problem(call.request_id, error, allow)(scope, receive, send)

    def _check_names(self, headers: Headers) -> None:
        """A web page must not reach a local server by a name of its own (DNS rebinding)."""
        known = self._service.settings.public_hosts
        for label, name in (
            ("Host", host_name(headers.get("host"))),
            ("Origin", urlsplit(headers.get("origin") or "//localhost").hostname or "null"),
        ):
            if not is_loopback_name(name) and name not in known:
                raise RefusedError(
                    "forbidden", f"{label} {name[:80]!r} is not in this service's public_hosts"
                )

    async def _guard(
        self, context: Any, tool: str, scope: str, work: Callable[[], Awaitable[Any]]
    ) -> Any:
        service, request = self._service, context.request_context.request
        call: Call = call_of(request.scope)
        if service.keys is not None:
            CLIENT.set(call.key_id)
        try:
            request.scope[_GRANTS].require(scope)
            service.check_quota(call)
            result = await observed(service, work())
            if isinstance(result, (SearchResponse, FetchResponse)):
                due = charge_for(service, call, result, f".{len(call.charges)}")
                if due is None:
                    result.usage.billable, result.usage.quantity = False, 0
                else:
                    service.owe(call, due)
        except SearchFetchError as error:
            service.metrics.tool_calls.labels(tool, error.code).inc()
            raise
        service.metrics.tool_calls.labels(tool, "ok").inc()
        return result
