"""What a client may ask at most: bytes of body, requests at once, identifiers."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from deepinfer_engine.codec.errors import BodyTooLarge, Draining, LimitExceeded
from deepinfer_engine.errors import EngineUnavailable

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def check_declared_length(content_length: str | None, limit: int) -> None:
    """Raise BodyTooLarge for a body that says itself that it is too large."""
    if content_length and content_length.isdigit() and int(content_length) > limit:
        raise BodyTooLarge(f"the body has {content_length} bytes, and the limit is {limit}")


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body, counted while it arrives, never more of it in memory than `limit` bytes.

    Raises BodyTooLarge or ClientDisconnect.
    """
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes, which is the limit")
        more = message.get("more_body", False)
    return b"".join(parts)


class Gate:
    """Counts requests in flight; decides who may enter, and knows when the last one left."""

    def __init__(self, total: int, per_caller: int) -> None:
        self._total = total
        self._per_caller = per_caller
        self._inside: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()
        self._ending = asyncio.Event()
        self.draining = False

    @property
    def in_flight(self) -> int:
        """Requests inside now."""
        return self._inside.total()

    async def drain(self, seconds: float) -> bool:
        """Take nothing new and wait for those inside; after `seconds` tell them to end. True: none
        was cut.
        """
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            self._ending.set()
            return False
        return True

    async def ending(self) -> None:
        """Returns when those inside must end."""
        await self._ending.wait()

    @contextmanager
    def enter(self, caller: str | None) -> Generator[None]:
        """Hold one place; raises Draining, EngineUnavailable or LimitExceeded.

        `caller` None: nobody was asked for a key, so only the total counts.
        """
        if self.draining:
            raise Draining("this server is shutting down; send the request again", retry_after_s=5)
        if self.in_flight >= self._total:
            raise EngineUnavailable(f"{self._total} requests are running, which is the limit")
        if caller is not None and self._inside[caller] >= self._per_caller:
            raise LimitExceeded(f"{self._per_caller} requests of this key are running, its limit")
        name = caller or ""
        self._inside[name] += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside[name] -= 1
            if not self._inside[name]:
                del self._inside[name]
            if not self._inside:
                self._empty.set()


class ByteBudget:
    """Memory that requests in flight may hold together."""

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self.held = 0

    @contextmanager
    def hold(self, size: int) -> Generator[None]:
        """Raises BodyTooLarge for more than could ever be held, EngineUnavailable for now."""
        if size > self._limit:
            raise BodyTooLarge(
                f"{self._what}: {size} bytes in one request, and the limit is {self._limit}"
            )
        if self.held + size > self._limit:
            raise EngineUnavailable(
                f"{self._what} of running requests take {self.held} of {self._limit} bytes, and "
                f"this one needs {size}; send it again in a second"
            )
        self.held += size
        try:
            yield
        finally:
            self.held -= size


def request_id(offered: str | None) -> str:
    """The client's `X-Request-Id` where it is well formed, else a fresh one."""
    return offered if offered and _REQUEST_ID.fullmatch(offered) else f"req_{uuid.uuid4().hex}"
