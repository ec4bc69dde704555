"""Who may use a bounded resource next, so that no client and no site can take all of it.

`FairSlots` counts places; `WorkThreads` is such places with a thread behind each of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from deepinfer_search_fetch.errors import LimitError

P = ParamSpec("P")
R = TypeVar("R")

CLIENT: ContextVar[str] = ContextVar("search_fetch_client", default="")
"""Whose work this is: the id of an API key in the service, "" in a library's process."""

_HALF_LIFE_SECONDS = 30.0
# Who held a place for more than a tenth of the time lately is busy, while another client is there.
_BUSY_SECONDS = 0.1 * _HALF_LIFE_SECONDS / 0.693
_THERE_SECONDS = 10.0
_MAX_REMEMBERED = 10_000


@dataclass(eq=False, slots=True)
class Ticket:
    """One place, waited for or held. since: when it was granted."""

    client: str
    host: str
    number: int
    loop: asyncio.AbstractEventLoop
    granted: asyncio.Future[None]
    since: float = 0.0
    held: bool = False


class FairSlots:
    """`size` places. A client holds at most `per_client` of them, a host `per_host`; who used the
    least lately comes first. The client "" (a library's own process) has no limit of its own but
    `per_process`.

    what: names the resource in errors. waiting: tickets of one client that may wait at once.
    kept: places that busy clients leave to the others, so that these find one free at once. A
    client is busy by the time it held places lately, or where `modest` does not say the contrary:
    where processors are short, holding a place for long is no sign of having used much.
    """

    def __init__(
        self,
        what: str,
        size: int,
        *,
        per_client: int | None = None,
        per_host: int | None = None,
        per_process: int | None = None,
        waiting: int = 64,
        kept: int = 0,
        modest: Callable[[str], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._free = self._size = max(1, size)
        self._per_client = min(self._size, per_client or self._size)
        self._per_host = min(self._size, per_host or self._size)
        self._per_process = min(self._size, per_process or self._size)
        self._waiting_per_client = waiting
        self._kept = min(kept, self._size - 1)
        self._modest = modest
        self._clock = clock
        self._guard = threading.Lock()  # work ends on threads of any kind
        self._waiting: list[Ticket] = []
        self._clients: Counter[str] = Counter()
        self._hosts: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}
        self._numbers = 0

    async def take(self, host: str = "") -> Ticket:
        """Wait for a place. Raises LimitError(rate_limited) when too many of this client wait."""
        client = CLIENT.get()
        loop = asyncio.get_running_loop()
        with self._guard:
            ahead = sum(t.client == client for t in self._waiting)
            if client and ahead >= self._waiting_per_client:
                raise LimitError(
                    "rate_limited",
                    f"{ahead} requests of this client already wait for {self._what}",
                    details={"limit": f"waiting for {self._what}", "value": ahead},
                )
            self._numbers += 1
            ticket = Ticket(client, host, self._numbers, loop, loop.create_future())
            self._waiting.append(ticket)
            self._grant()
        try:
            await ticket.granted
        except BaseException:
            self.give(ticket)
            raise
        return ticket

    def take_now(self, client: str, host: str = "") -> Ticket | None:
        """A place if there is one for this client at once."""
        loop = asyncio.get_running_loop()
        with self._guard:
            self._numbers += 1
            ticket = Ticket(client, host, self._numbers, loop, loop.create_future())
            if not self._free or not self._may(ticket, self._busy(client, self._clock())):
                return None
            self._hold(ticket)
            return ticket

    def give(self, ticket: Ticket) -> None:
        """Give a place back, or stop waiting for one; from any thread, more than once too."""
        with self._guard:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif ticket.held:
                ticket.held = False
                self._free += 1
                self._leave(self._clients, ticket.client)
                self._leave(self._hosts, ticket.host)
                now = self._clock()
                self._spent[ticket.client] = (
                    self._spent_by(ticket.client, now) + now - ticket.since,
                    now,
                )
                self._forget(now)
                self._grant()

    @asynccontextmanager
    async def slot(self, host: str = "") -> AsyncGenerator[Ticket]:
        """Hold one place."""
        ticket = await self.take(host)
        try:
            yield ticket
        finally:
            self.give(ticket)

    def crowded(self, client: str, places: int) -> bool:
        """Whether another client waits, or holds one of more than so many places."""
        with self._guard:
            if any(t.client != client for t in self._waiting):
                return True
            held = sum(self._clients.values())
            return places < held > self._clients[client]

    def holds(self, client: str) -> bool:
        """Whether this client holds a place."""
        with self._guard:
            return self._clients[client] > 0

    def audit(self) -> None:
        """Raise if a place is neither free nor held."""
        held = sum(self._clients.values())
        if held + self._free != self._size or held != sum(self._hosts.values()):
            raise AssertionError(f"{self._what}: {held} held + {self._free} free of {self._size}")

    def _grant(self) -> None:
        while self._free:
            now = self._clock()
            busy = {c: self._busy(c, now) for c in {t.client for t in self._waiting}}
            able = [t for t in self._waiting if self._may(t, busy[t.client])]
            if not able:
                return
            ticket = min(able, key=lambda t: (self._load(t.client, now), t.number))
            self._waiting.remove(ticket)
            self._hold(ticket)
            with suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                ticket.loop.call_soon_threadsafe(_wake, ticket.granted)

    def _may(self, ticket: Ticket, busy: bool) -> bool:
        most = self._per_client if ticket.client else self._per_process
        client_ok = self._clients[ticket.client] < most
        if busy and self._free <= self._kept:
            return False
        return client_ok and (not ticket.host or self._hosts[ticket.host] < self._per_host)

    def _hold(self, ticket: Ticket) -> None:
        ticket.held, ticket.since = True, self._clock()
        self._free -= 1
        self._clients[ticket.client] += 1
        self._hosts[ticket.host] += 1

    def _busy(self, client: str, now: float) -> bool:
        if not self._kept or not client:
            return False
        if self._modest is not None and self._modest(client):
            return False
        if self._modest is None and self._load(client, now) < _BUSY_SECONDS:
            return False
        return (
            any(other != client for other in self._clients)
            or any(t.client != client for t in self._waiting)
            or any(c != client and now - at < _THERE_SECONDS for c, (_, at) in self._spent.items())
        )

    def _load(self, client: str, now: float) -> float:
        return self._clients[client] + self._spent_by(client, now)

    def _spent_by(self, client: str, now: float) -> float:
        seconds, at = self._spent.get(client, (0.0, now))
        return seconds * 0.5 ** ((now - at) / _HALF_LIFE_SECONDS)

    def _forget(self, now: float) -> None:
        if len(self._spent) > _MAX_REMEMBERED:
            for client in [c for c in self._spent if self._spent_by(c, now) < 0.001]:
                del self._spent[client]

    @staticmethod
    def _leave(counter: Counter[str], name: str) -> None:
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


def _wake(granted: asyncio.Future[None]) -> None:
    if not granted.done():
        granted.set_result(None)


class WorkThreads:
    """Blocking calls on threads of their own, admitted by `FairSlots`."""

    def __init__(
        self,
        what: str,
        threads: int,
        *,
        per_client: int | None = None,
        per_host: int | None = None,
        kept: int = 0,
    ) -> None:
        self._slots = FairSlots(what, threads, per_client=per_client, per_host=per_host, kept=kept)
        self._executor = ThreadPoolExecutor(threads, f"search-fetch-{what.replace(' ', '-')}")

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `call`; the place is free when the call ended, not when the caller left."""
        return await self.run_for("", call, *args, **kwargs)

    async def run_for(
        self, host: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The same for work that belongs to a host."""
        ticket = await self._slots.take(host)
        try:
            future = self._executor.submit(call, *args, **kwargs)
        except BaseException:
            self._slots.give(ticket)
            raise

        def ended(_: Future[R]) -> None:
            self._slots.give(ticket)

        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Take no further calls; those at work end by themselves."""
        self._executor.shutdown(wait=False, cancel_futures=True)
