"""The outermost layer of the service: what holds for every request and every answer.

Request id, the caller's key, concurrency, size and time limits of the body, the Host check without
keys, common headers, one log line, metrics; and the last byte: an answer that costs something is
written up to its last byte, its ledger rows are begun, the byte goes out, the rows stand.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepinfer_search_fetch.admission import CLIENT
from deepinfer_search_fetch.errors import LimitError, RefusedError, SearchFetchError
from deepinfer_search_fetch.service.problems import problem
from deepinfer_search_fetch.service.ratelimit import RefusalDelays
from deepinfer_search_fetch.service.state import CALL, Call, Service

log = logging.getLogger("deepinfer_search_fetch.service")
# Served without a key, a place or a body.
_OPEN = frozenset(
    {"/", "/healthz", "/readyz", "/metrics", "/docs", "/openapi.json", "/favicon.ico"}
)
_FIRST_SHARE = 8


class ClientLeft(Exception):  # noqa: N818 - reads as the condition it reports
    """The client closed the connection; nothing can be told any more."""


class Delivery:
    """ASGI middleware around the whole framework."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._running: Counter[str] = Counter()
        self._refusals = RefusalDelays()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = Call(new_request_id(headers.get("x-request-id", "")), time.monotonic())
        scope[CALL] = call
        answer = _Answer(self._service, call, send)
        kept = scope["path"] not in _OPEN
        admitted = False
        try:
            # The caller first: nobody without a key takes a place or sends a body.
            self._check_names(headers)
            if kept:
                await self._identify(call, headers, scope)
                # Here, not in the routes: a refusal costs a quarter of one that got so far.
                self._service.take_token(call)
                self._admit(call)
                admitted = True
            body = await self._body(headers, receive) if kept else b""
            CLIENT.set(call.key_id if self._service.keys is not None else "")
            await answer.run(self._app, scope, body, receive)
        except ClientLeft:
            call.status = 499
        except SearchFetchError as error:
            await problem(call.request_id, error)(scope, receive, answer.send)
        except asyncio.CancelledError:
            # The time to finish after SIGTERM is over: the client is told, not dropped.
            if not call.status:
                gone = SearchFetchError("unavailable", "the service is shutting down")
                await problem(call.request_id, gone)(scope, receive, answer.send)
            raise
        except Exception:
            if answer.ended:
                return  # told, and in the log
            log.exception("request %s failed", call.request_id)
            if call.status:
                raise  # too late for an answer: the server cuts the connection
            error = SearchFetchError("internal", "internal error")
            await problem(call.request_id, error)(scope, receive, answer.send)
        finally:
            if admitted:
                self._leave(call)
            self._note(scope, call)

    async def _identify(self, call: Call, headers: Headers, scope: Scope) -> None:
        """Who calls; those who were refused too often lately wait here."""
        if self._service.keys is None:
            self._service.identify(call, headers)
            return
        try:
            self._service.identify(call, headers)
        except RefusedError:
            peer = self._client_of(call, scope)
            await self._refusals.wait(peer)
            self._refusals.note(peer)
            raise
        await self._refusals.wait(call.key_id)

    @staticmethod
    def _client_of(call: Call, scope: Scope) -> str:
        """The key's id, or the address of a client without a key."""
        return call.key_id if call.key else (scope.get("client") or ("",))[0]

    def _admit(self, call: Call) -> None:
        settings, key = self._service.settings, call.key_id
        running, own = self._running.total(), self._running[key]
        # A key may hold as many places as are left free, so that one who holds none finds one:
        # n keys that take all they can leave one place in n + 1 free. Some of these are for the
        # first request of a key alone, since keys that all come and go may meet at the last one.
        left = settings.max_concurrent - running
        limits = [("max_concurrent", running, settings.max_concurrent)]
        if self._service.keys is not None and own:
            first = settings.max_concurrent // _FIRST_SHARE
            limits.append(("max_concurrent_per_key", own, settings.max_concurrent_per_key))
            limits.append(("max_concurrent", own, left - first))
        for limit, held, most in limits:
            if held >= most:
                raise LimitError(
                    "rate_limited",
                    f"{running} requests are at work already, {own} of them this key's ({limit})",
                    details={"limit": limit, "value": getattr(settings, limit)},
                )
        self._running[key] += 1
        self._service.metrics.in_flight.set(self._running.total())

    def _leave(self, call: Call) -> None:
        self._running[call.key_id] -= 1
        if not self._running[call.key_id]:
            del self._running[call.key_id]
        self._service.metrics.in_flight.set(self._running.total())

    def _check_names(self, headers: Headers) -> None:
        if self._service.keys is None:
            # Without keys only these headers tell a local client from a web page that rebinds DNS
            # or posts across origins.
            origin = headers.get("origin")
            local = origin is None or is_loopback_name(urlsplit(origin).hostname or "")
            if not local or not is_loopback_name(host_name(headers.get("host"))):
                raise RefusedError(
                    "forbidden", "without API keys only loopback hosts and origins are served"
                )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._service.settings.max_body_bytes
        too_large = LimitError(
            "response_too_large",
            f"request body exceeds {limit} bytes (max_body_bytes)",
            details={"limit": "max_body_bytes", "value": limit},
        )
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:18]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._service.settings.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise SearchFetchError(
                "timeout",
                "the request body came too slowly",
                http_status=408,
                details={
                    "limit": "body_seconds",
                    "value": self._service.settings.body_seconds,
                },
            ) from None

    def _note(self, scope: Scope, call: Call) -> None:
        if call.status == 429:
            self._refusals.note(call.key_id)
        route = getattr(scope.get("route"), "path", "unknown")
        seconds = time.monotonic() - call.started
        self._service.metrics.responses.labels(route, str(call.status)).inc()
        self._service.metrics.seconds.labels(route).observe(seconds)
        # A flood of refused requests is counted above, not written out line by line.
        flood = call.status in (401, 429) and self._refusals.delayed(self._client_of(call, scope))
        log.log(
            logging.DEBUG if flood else logging.INFO,
            "%s %s %d %.1fms request=%s key=%s",
            *(scope["method"], route, call.status, seconds * 1000, call.request_id, call.key_id),
        )


class _Answer:
    """Sends one answer; `run` has it produced by the application."""

    def __init__(self, service: Service, call: Call, send: Send) -> None:
        self._service = service
        self._call = call
        self._send = send
        self._gone: asyncio.Future[Message] | None = None
        self.ended = False

    async def run(self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive) -> None:
        """Run `app` on a request whose body is here already; leave no charge unsettled."""
        waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = gone = asyncio.ensure_future(_disconnect(receive))

        async def rest() -> Message:
            return waiting.pop() if waiting else await asyncio.shield(gone)

        try:
            await app(scope, rest, self.send)
        finally:
            gone.cancel()
            self._release()

    async def send(self, message: Message) -> None:
        """Pass a message on; body bytes with charges due take the way of the last byte."""
        call = self._call
        if message["type"] == "http.response.start":
            call.status = message["status"]
            if call.status >= 400:
                self._release()  # an error costs nothing, whatever was owed before it
            _complete_headers(message, call)
        elif message["type"] == "http.response.body" and message.get("body") and call.charges:
            await self._settle(message)
            self.ended = not message.get("more_body", False)
            return
        await self._send(message)
        if message["type"] == "http.response.body":
            self.ended = not message.get("more_body", False)

    async def _settle(self, message: MutableMapping[str, Any]) -> None:
        service, charges, body = self._service, list(self._call.charges), message["body"]
        await self._send({**message, "body": body[:-1], "more_body": True})
        # An empty chunk writes nothing, but waits until the kernel has everything before it.
        await self._send({**message, "body": b"", "more_body": True})
        await asyncio.sleep(0)
        if self._gone is not None and self._gone.done():
            service.metrics.voided.inc(len(charges))
            raise ClientLeft
        written = service.ledger.begin(charges)
        try:
            await self._send({**message, "body": body[-1:]})
        except BaseException:
            service.ledger.void(written)
            service.metrics.voided.inc(len(charges))
            raise
        service.ledger.finish(written)
        service.metrics.billed(c for c in charges if c.request_id in written)
        self._release()

    def _release(self) -> None:
        for charge in self._call.charges:
            self._service.ledger.release(charge.key_id, charge.quantity)
        self._call.charges.clear()


async def _disconnect(receive: Callable[[], Awaitable[Message]]) -> Message:
    while (message := await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)
    return message


def _complete_headers(message: MutableMapping[str, Any], call: Call) -> None:
    headers = MutableHeaders(raw=list(message.get("headers", ())))
    headers["X-Request-Id"] = call.request_id
    headers.setdefault("Cache-Control", "no-store")
    headers["X-Content-Type-Options"] = "nosniff"
    for name, value in call.headers.items():
        headers[name] = value
    message["headers"] = headers.raw


def new_request_id(given: str = "") -> str:
    """A new id; a reasonable one of the client's stands before it, so that both can search logs."""
    ok = 1 <= len(given) <= 64 and given.isascii() and given.replace("-", "").isalnum()
    return f"{given}-{secrets.token_hex(8)}" if ok else secrets.token_hex(12)


def host_name(host: str | None) -> str:
    """The name in a Host header, without its port."""
    return urlsplit(f"//{host or ''}").hostname or ""


def is_loopback_name(name: str) -> bool:
    return name in ("localhost", "127.0.0.1", "::1")
