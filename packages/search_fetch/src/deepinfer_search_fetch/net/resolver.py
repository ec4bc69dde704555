"""Name look-up: exactly one per hop, all records at once."""

from __future__ import annotations

import _thread
import asyncio
import socket
from contextlib import suppress
from typing import Any, Protocol

from deepinfer_search_fetch.admission import FairSlots, Ticket
from deepinfer_search_fetch.errors import UpstreamError
from deepinfer_search_fetch.urls import registrable_domain

_NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_NODATA)
LOOKUPS = 64
LOOKUPS_PER_CLIENT = 16
LOOKUPS_PER_DOMAIN = 8


class Resolver(Protocol):
    """Anything that turns a host name into numeric addresses (A and AAAA together)."""

    async def resolve(self, host: str) -> list[str]: ...


class SystemResolver:
    """The C library's resolver, with a time limit.

    It blocks, and for many seconds where a name server is silent. So every look-up has a thread of
    its own, which ends nobody's process and keeps its place until the C library lets go of it; the
    places are shared fairly between clients and domains.
    """

    def __init__(self, timeout_seconds: float = 3.0, *, lookups: int = LOOKUPS) -> None:
        self._timeout_seconds = timeout_seconds
        self._slots = FairSlots(
            "name look-ups",
            lookups,
            per_client=LOOKUPS_PER_CLIENT,
            per_host=LOOKUPS_PER_DOMAIN,
        )

    async def resolve(self, host: str) -> list[str]:
        """Numeric addresses in the system's order, without duplicates.

        Raises UpstreamError(dns_failure) when there are none or the time is over.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                ticket = await self._slots.take(registrable_domain(host))
                records = await self._look_up(host, ticket)
        except TimeoutError:
            raise UpstreamError(
                "dns_failure",
                "the name look-up timed out",
                details={"limit": "dns_seconds", "value": self._timeout_seconds},
            ) from None
        except (OSError, UnicodeError) as error:
            # A name that does not exist now will not exist in a second; a silent server may speak.
            final = isinstance(error, UnicodeError) or error.errno in _NO_SUCH_NAME
            raise UpstreamError(
                "dns_failure", "the host name does not resolve", retryable=not final
            ) from None
        addresses = dict.fromkeys(str(record[4][0]).partition("%")[0] for record in records)
        if not addresses:
            raise UpstreamError("dns_failure", "the host name does not resolve")
        return list(addresses)

    async def _look_up(self, host: str, ticket: Ticket) -> list[Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Any]] = loop.create_future()

        def tell(records: list[Any] | None, error: BaseException | None) -> None:
            if not answer.done():
                if error is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(records or [])

        def work() -> None:
            records, problem = None, None
            try:
                records = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            except BaseException as error:
                problem = error
            self._slots.give(ticket)
            with suppress(RuntimeError):  # the loop is closed, nobody waits
                loop.call_soon_threadsafe(tell, records, problem)

        try:
            # `threading.Thread.start` waits, on the event loop, for the thread's first turn.
            _thread.start_new_thread(work, ())
        except RuntimeError as error:  # no more threads
            self._slots.give(ticket)
            raise UpstreamError("dns_failure", f"no thread for a name look-up: {error}") from None
        return await answer
