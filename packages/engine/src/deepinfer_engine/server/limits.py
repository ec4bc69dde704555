"""What a client may ask at most: bytes of body, requests at once and in a minute, identifiers.

Whatever all callers share has a share per key, so that one of them fills its own part alone.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import Counter, deque
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from deepinfer_engine.codec.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    Draining,
    LimitExceeded,
    Protocol,
)
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.server.clock import Clock

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


MAX_JSON_MARKS = 4_000_000
"""Commas and opening brackets of a body: a list of as many numbers takes some 150 MB and half a
second to parse, with the interpreter's lock held."""


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """How long a body may be; `context`: what bounds it is the model's context, in tokens."""

    size: int
    context: int | None = None

    def error(self, got: str) -> BodyTooLarge | ContextLengthExceeded:
        if self.context is not None:
            return ContextLengthExceeded(
                f"the body has {got} bytes, and a request whose prompt fits this model's context "
                f"of {self.context} tokens has at most {self.size}; shorten the conversation",
                param="messages",
            )
        return BodyTooLarge(f"the body has {got} bytes, and the limit is {self.size}")


def check_declared_length(content_length: str | None, limit: BodyLimit) -> None:
    """Raise for a body that says itself that it is too large."""
    if content_length and content_length.isdigit() and int(content_length[:20]) > limit.size:
        raise limit.error(content_length[:20])


async def read_body(receive: Receive, limit: BodyLimit, held: Held) -> bytes:
    """The whole body, counted while it arrives, never more of it in memory than the limit.

    held: where its bytes are counted until the caller lets them go. Raises BodyTooLarge,
    ContextLengthExceeded, ClientDisconnect, and what `Held.add` raises.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        if len(body) + len(part) > limit.size:
            raise limit.error(f"more than {limit.size}")
        held.add(len(part))
        body += part
        more = message.get("more_body", False)
    marks = body.count(b",") + body.count(b"[") + body.count(b"{")
    if marks > MAX_JSON_MARKS:
        raise BodyTooLarge(
            f"the body holds {marks} JSON values, and {MAX_JSON_MARKS} are taken at most"
        )
    return bytes(body)


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

    def check_open(self) -> None:
        """Raises Draining when nothing new is taken."""
        if self.draining:
            raise Draining("this server is shutting down; send the request again", retry_after_s=5)

    @contextmanager
    def enter(self, caller: str | None) -> Generator[None]:
        """Hold one place; raises Draining, EngineUnavailable or LimitExceeded.

        `caller` None: nobody was asked for a key, so only the total counts.
        """
        self.check_open()
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
    """Memory that requests in flight may hold together, and the part of it one key may take."""

    def __init__(self, limit: int, what: str, share: float = 1.0) -> None:
        """share: the part of the limit that the requests of one key may hold."""
        self._limit = limit
        self._share = max(1, int(limit * share))
        self._what = what
        self._by_key: Counter[str] = Counter()
        self.held = 0

    def add(self, caller: str | None, size: int) -> None:
        """Raises BodyTooLarge for more than could ever be held, LimitExceeded beyond the key's
        share, EngineUnavailable for now."""
        name = caller or ""
        most = self._limit if caller is None else self._share
        if size > most:
            raise BodyTooLarge(f"{self._what}: {size} bytes in one request; the limit is {most}")
        if self._by_key[name] + size > most and caller is not None:
            raise LimitExceeded(
                f"{self._what} of this key's running requests take {self._by_key[name]} bytes of "
                f"its {most}, and this one needs {size} more"
            )
        if self.held + size > self._limit:
            raise EngineUnavailable(
                f"{self._what} of running requests take {self.held} of {self._limit} bytes, and "
                f"this one needs {size}; send it again in a second"
            )
        self.held += size
        self._by_key[name] += size

    def give_back(self, caller: str | None, size: int) -> None:
        name = caller or ""
        self.held -= size
        self._by_key[name] -= size
        if not self._by_key[name]:
            del self._by_key[name]

    @contextmanager
    def holding(self, caller: str | None, size: int = 0) -> Generator[Held]:
        """Hold `size` bytes, and what is added, until left or let go."""
        held = Held(self, caller)
        try:
            held.add(size)
            yield held
        finally:
            held.let_go()


@dataclass(slots=True)
class Held:
    """What one request holds of a budget."""

    budget: ByteBudget
    caller: str | None
    size: int = 0

    def add(self, size: int) -> None:
        """See `ByteBudget.add`."""
        if size:
            self.budget.add(self.caller, size)
            self.size += size

    def let_go(self) -> None:
        if self.size:
            self.budget.give_back(self.caller, self.size)
            self.size = 0


class FairSlots:
    """Places for work that is costly: each goes to the waiting key that has fewest of them, and
    among those to the one that was served longest ago."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        """When each key was served last, as a count of turns."""
        self._turn = 0

    @asynccontextmanager
    async def hold(self, caller: str | None) -> AsyncGenerator[None]:
        key = caller or ""
        await self._take(key)
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            self._free += 1
            self._serve()

    async def _take(self, key: str) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(place)
        self._serve()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._running[key] -= 1
                self._free += 1
                self._serve()
            raise

    def _serve(self) -> None:
        while self._free and self._waiting:
            key = min(self._waiting, key=lambda k: (self._running[k], self._served.get(k, 0)))
            queue = self._waiting[key]
            place = queue.popleft()
            if not queue:
                del self._waiting[key]
            if not place.done():
                self._free -= 1
                self._running[key] += 1
                self._remember(key)
                place.set_result(None)

    def _remember(self, key: str) -> None:
        self._turn += 1
        self._served[key] = self._turn
        if len(self._served) > 4096:
            self._served = {k: turn for k, turn in self._served.items() if k in self._waiting}


@dataclass(slots=True)
class Bucket:
    """So many a minute: fills evenly, holds a minute's worth at most, may go into debt."""

    per_minute: int
    level: float
    filled_at: float

    def fill(self, now: float) -> float:
        """What is in it now."""
        rate = self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + (now - self.filled_at) * rate)
        self.filled_at = now
        return self.level

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there; after `fill`."""
        return max(0.0, (amount - self.level) * 60 / self.per_minute)


class Rates:
    """Requests and tokens of each key in a minute.

    Tokens are charged when they are known: a key in debt waits until it is paid.
    """

    def __init__(self, requests: int | None, tokens: int | None, clock: Clock) -> None:
        self._limits = {
            name: limit
            for name, limit in (("requests", requests), ("tokens", tokens))
            if limit is not None
        }
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def take(self, caller: str | None) -> None:
        """Count a request; raises LimitExceeded with the time to wait."""
        now = self._clock.monotonic()
        for kind, limit in self._limits.items():
            bucket = self._bucket(caller, kind)
            bucket.fill(now)
            wait = bucket.wait_s(1.0)
            if wait:
                raise LimitExceeded(f"{limit} {kind} a minute are this key's limit", wait)
        if "requests" in self._limits:
            self._bucket(caller, "requests").level -= 1

    def charge(self, caller: str | None, tokens: int) -> None:
        """Count the tokens of a prompt or an answer."""
        if "tokens" in self._limits:
            self._bucket(caller, "tokens").level -= tokens

    def headers(self, caller: str | None, protocol: Protocol) -> dict[str, str]:
        """What is left, in the headers that the protocol's clients read."""
        now, out = self._clock.monotonic(), dict[str, str]()
        for kind, limit in self._limits.items():
            bucket = self._bucket(caller, kind)
            left, reset = max(0, int(bucket.fill(now))), bucket.wait_s(limit)
            if protocol == "messages":
                prefix = f"anthropic-ratelimit-{kind}-"
                out |= {prefix + "limit": str(limit), prefix + "remaining": str(left)}
            else:
                out |= {
                    f"x-ratelimit-limit-{kind}": str(limit),
                    f"x-ratelimit-remaining-{kind}": str(left),
                    f"x-ratelimit-reset-{kind}": f"{reset:.3f}s",
                }
        return out

    def _bucket(self, caller: str | None, kind: str) -> Bucket:
        key = (caller or "", kind)
        if key not in self._buckets:
            limit = self._limits[kind]
            self._buckets[key] = Bucket(limit, float(limit), self._clock.monotonic())
        return self._buckets[key]


def request_id(offered: str | None) -> str:
    """The client's `X-Request-Id` where it is well formed, else a fresh one."""
    return offered if offered and _REQUEST_ID.fullmatch(offered) else f"req_{uuid.uuid4().hex}"
