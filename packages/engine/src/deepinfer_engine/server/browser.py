"""What a web page may do: nothing, unless its origin is on the list.

A page can send requests to a server on the visitor's machine or network, and by rebinding its own
name to that address it can read the answers too. The name it used then stands in `Host`, and the
page itself in `Origin`; both are checked before anything else happens.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from deepinfer_engine.codec.errors import InvalidRequest, PermissionDenied, wire_error
from deepinfer_engine.server.services import protocol_of

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class BrowserRules:
    """Refuses a `Host` that names no address of this server and an `Origin` that is not allowed.

    An address cannot be rebound, so any is taken; of names, `localhost`, this machine's, and
    those of `hosts`.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self.app = app
        self._any_host = "*" in hosts
        self._hosts = {"localhost", socket.gethostname().lower(), *(h.lower() for h in hosts)}
        self._any_origin = "*" in origins
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            error = self.refusal(scope["method"], headers)
            if error is not None:
                wire = wire_error(
                    error, protocol_of(scope["path"], headers), scope["state"]["request_id"]
                )
                response = JSONResponse(wire.body, wire.status, headers=wire.headers)
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def refusal(self, method: str, headers: Headers) -> Exception | None:
        """Why these headers are not taken; None where they are."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return InvalidRequest("a request has exactly one Host header", param="host")
        if not self._known_host(hosts[0]):
            return PermissionDenied(
                f"Host {hosts[0][:200]!r} is not a name of this server: use its address, or add "
                "the name to allowed_hosts (--allowed-host)"
            )
        origin = headers.get("origin")
        if origin is None:
            # A browser says so when a page of another site sends something without an Origin.
            site = headers.get("sec-fetch-site", "none")
            if site in ("none", "same-origin") or method in _SAFE_METHODS or self._any_origin:
                return None
            origin = "null"
        if self._allowed_origin(origin, hosts[0]):
            return None
        return PermissionDenied(
            f"pages of {origin[:200]!r} may not use this server: add the origin to cors_origins "
            "(--cors-origin)"
        )

    def _known_host(self, host: str) -> bool:
        name = _name_of(host)
        if name is None:
            return False
        if self._any_host or name in self._hosts or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _allowed_origin(self, origin: str, host: str) -> bool:
        if self._any_origin or origin.lower().rstrip("/") in self._origins:
            return True
        # A page that this host itself serves; the host has been checked.
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _name_of(host: str) -> str | None:
    """The name or address in a Host header, without its port."""
    try:
        parts = urlsplit("//" + host)
        parts.port  # noqa: B018  # raises for one that is none
    except ValueError:
        return None
    if parts.netloc != host or "@" in host or not parts.hostname:
        return None
    return parts.hostname.lower().rstrip(".")
