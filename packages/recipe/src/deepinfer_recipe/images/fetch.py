"""Fetching pictures by URL, only from addresses that a rule allows.

The name is resolved once, every address is put to the rule, and the connection is made to the
very address that was allowed: a name that resolves differently the second time gains nothing.
Redirects are followed by hand and checked in the same way. Proxies are never used.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urljoin, urlsplit

from deepinfer_recipe.base.errors import ImageError
from deepinfer_recipe.images.destination import (
    DestinationFilter,
    allows,
    is_public_address,
    is_usual_port,
)
from deepinfer_recipe.images.source import MAX_IMAGE_BYTES

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_READ_BYTES = 65536


class _PinnedConnection(http.client.HTTPConnection):
    """A connection to one vetted address, speaking to the host by its name."""

    def __init__(self, host: str, port: int, address: str, timeout: float, tls: bool) -> None:
        super().__init__(host, port, timeout=timeout)
        self._address = address
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host)

    def cut(self) -> None:
        """End the connection from another thread: a read that waits returns."""
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


class ImageFetcher:
    """Downloads external image URLs.

    Without a filter of its own it connects only to public addresses, and only to the usual ports
    of the web; a filter decides about addresses alone, and `allows_any_port` opens the ports.
    Size and time are limited: `max_bytes` a picture, `timeout_s` for the whole fetch with its
    redirects.
    """

    __slots__ = ("_any_port", "_clock", "_filter", "_max_bytes", "_timeout_s")

    def __init__(
        self,
        *,
        max_bytes: int = MAX_IMAGE_BYTES,
        destination_filter: DestinationFilter = is_public_address,
        allows_any_port: bool = False,
        timeout_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not callable(destination_filter):
            raise TypeError("destination_filter must be callable: (host, address) -> bool")
        self._max_bytes = max_bytes
        self._filter = destination_filter
        self._any_port = allows_any_port
        self._timeout_s = timeout_s
        self._clock = clock

    @staticmethod
    def with_max_bytes(max_bytes: int) -> ImageFetcher:
        """A fetcher with this size limit."""
        return ImageFetcher(max_bytes=max_bytes)

    def with_destination_filter(self, destination_filter: DestinationFilter) -> ImageFetcher:
        """Return a fetcher with this size limit that connects only to allowed addresses.

        `destination_filter(host, address)` is asked for every resolved address of the URL and
        of each redirect. A host with no allowed address raises `ImageError` with kind
        `DestinationRejected`. Raises `TypeError` when the filter is not callable.
        """
        return ImageFetcher(
            max_bytes=self._max_bytes,
            destination_filter=destination_filter,
            allows_any_port=self._any_port,
            timeout_s=self._timeout_s,
            clock=self._clock,
        )

    def fetch(self, url: str) -> bytes:
        """Download one picture. Raises `ImageError`; `is_retryable` on network trouble."""
        deadline = self._clock() + self._timeout_s
        for _ in range(_MAX_REDIRECTS + 1):
            found = self._get(url, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise ImageError("Fetch", f"more than {_MAX_REDIRECTS} redirects", is_retryable=True)

    def _remaining(self, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise ImageError("Fetch", f"no answer in {self._timeout_s} s", is_retryable=True)
        return left

    def _get(self, url: str, deadline: float) -> bytes | str:
        """The picture, or where a redirect leads."""
        parts, host, port = _checked(url)
        if not self._any_port and not is_usual_port(port):
            raise ImageError("DestinationRejected", f"port {port} may not be connected to")
        address = self._vetted_address(host, port)
        connection = _PinnedConnection(
            host, port, address, self._remaining(deadline), parts.scheme == "https"
        )
        target = parts.path or "/"
        if parts.query:
            target += f"?{parts.query}"
        # Every read has a timeout of its own; this bounds their sum, when a server drips.
        watchdog = threading.Timer(self._remaining(deadline), connection.cut)
        watchdog.start()
        try:
            connection.request("GET", target, headers={"Accept": "image/*"})
            with connection.getresponse() as response:
                location = response.getheader("Location")
                if response.status in _REDIRECTS and location:
                    return location
                if response.status != 200:
                    raise ImageError(
                        "Fetch", f"{host} answered with status {response.status}", is_retryable=True
                    )
                return self._body(response, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ImageError(
                "Fetch", f"cannot fetch from {host}: {error}", is_retryable=True
            ) from None
        finally:
            watchdog.cancel()
            connection.close()

    def _body(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        pieces: list[bytes] = []
        size = 0
        # `read1` gives what has come: `read` would wait for the whole piece, however slowly it
        # drips, and never look at the deadline.
        while piece := response.read1(_READ_BYTES):
            size += len(piece)
            if size > self._max_bytes:
                raise ImageError("ImageTooLarge", f"an image may have {self._max_bytes} bytes")
            self._remaining(deadline)
            pieces.append(piece)
        if response.length:
            raise ImageError(
                "Fetch", f"the image ended {response.length} bytes early", is_retryable=True
            )
        self._remaining(deadline)
        return b"".join(pieces)

    def _vetted_address(self, host: str, port: int) -> str:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ImageError(
                "Fetch", f"cannot resolve {host}: {error}", is_retryable=True
            ) from None
        for *_, sockaddr in found:
            address = str(sockaddr[0])
            if allows(self._filter, host, address):
                return address
        raise ImageError("DestinationRejected", f"no address of {host} may be connected to")


def _checked(url: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ImageError("InvalidUrl", f"not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ImageError("InvalidUrl", "an image URL is http or https with a host")
    if any(ch <= " " or ch == "\x7f" for ch in url):
        raise ImageError("InvalidUrl", "an image URL holds no spaces or control characters")
    return parts, parts.hostname, port or (443 if parts.scheme == "https" else 80)


ReqwestImageFetcher = ImageFetcher
"""The reference's name of the fetcher."""
