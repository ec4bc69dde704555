"""Which prefill worker can serve which decode worker: compared by what they say, and tried."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

from deepinfer_engine.router.changes import Changes
from deepinfer_engine.router.link import WorkerInfo, WorkerLink

log = logging.getLogger(__name__)

REPEAT_S = 10.0
Key = tuple[tuple[str, int], tuple[str, int]]
"""Address and epoch of both."""


class Pairs:
    """What is known of each pair. A pair nobody has tried yet is not used."""

    def __init__(self, changed: Changes) -> None:
        """changed: set when a worker came or went, and by this when a pair turns out otherwise."""
        self._changed = changed
        self._tried: dict[Key, str] = {}
        self._told: set[str] = set()

    def problem(self, prefill: WorkerLink, decode: WorkerLink) -> str | None:
        """Why these two cannot serve a request together; None where they can."""
        if prefill.info is None or decode.info is None:
            return "one of them has never been connected"
        difference = incompatibility(prefill.info, decode.info)
        if difference is not None:
            return difference
        tried = self._tried.get(_key(prefill, decode))
        if tried is None:
            return "no transfer has been tried yet"
        return tried or None

    def problems(self, links: Sequence[WorkerLink]) -> list[str]:
        """One line for each pair of connected workers that cannot work together."""
        return [
            f"prefill {p.address} and decode {d.address}: {why}"
            for p, d in _pairs(links)
            if (why := self.problem(p, d)) is not None
        ]

    def summary(self, prefills: Sequence[WorkerLink], decodes: Sequence[WorkerLink]) -> str:
        lines = self.problems([*prefills, *decodes])
        return "no prefill worker can serve a decode worker: " + "; ".join(lines[:4])

    def isolation(self, link: WorkerLink, links: Sequence[WorkerLink]) -> str:
        """Why a worker that is well gets no requests: what keeps it from every other one."""
        mine = [(p, d) for p, d in _pairs(links) if link in (p, d)]
        reasons = [self.problem(p, d) for p, d in mine]
        if not mine or not all(reasons):
            return ""
        other = mine[0][1] if mine[0][0] is link else mine[0][0]
        return f"cannot work with {other.role} {other.address}: {reasons[0]}"

    async def probing(self, links: Callable[[], Sequence[WorkerLink]]) -> None:
        """Try new pairs at once and all of them every ten seconds, until cancelled."""
        loop = asyncio.get_running_loop()
        again = loop.time() + REPEAT_S
        while True:
            due = loop.time() >= again
            pairs = [
                (p, d)
                for p, d in _pairs(links())
                if incompatibility(_info(p), _info(d)) is None
                and (due or _key(p, d) not in self._tried)
            ]
            if due:
                again = loop.time() + REPEAT_S
                known = {_key(p, d) for p, d in _pairs(links())}
                self._tried = {key: text for key, text in self._tried.items() if key in known}
            results = await asyncio.gather(
                *(self._try(p, d) for p, d in pairs), return_exceptions=True
            )
            for result in results:
                if isinstance(result, Exception):
                    log.error("a pair of workers could not be tried", exc_info=result)
            if not pairs:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(again):
                        await self._changed.wait()

    async def _try(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        key = _key(prefill, decode)
        detail = await prefill.probe(decode.address, _info(decode).epoch)
        before = self._tried.get(key)
        self._tried[key] = detail
        if before != detail:
            self._changed.set()
            if detail:
                log.warning(
                    "prefill %s cannot send to decode %s: %s",
                    prefill.address, decode.address, detail,
                )  # fmt: skip


def incompatibility(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """What differs that must not."""
    for name, what in (
        ("version", "versions"),
        ("model", "models"),
        ("dtype", "dtypes"),
        ("layout_hash", "cache layouts (model, dtype or cache formats)"),
        ("vocab_size", "vocabularies"),
    ):
        mine, theirs = getattr(prefill, name), getattr(decode, name)
        if mine != theirs:
            return f"different {what}, {str(mine)[:40]} and {str(theirs)[:40]}"
    return None


def _pairs(links: Sequence[WorkerLink]) -> Iterator[tuple[WorkerLink, WorkerLink]]:
    """Every prefill with every decode that are connected."""
    up = [link for link in links if link.connection is not None and link.info is not None]
    for prefill in up:
        for decode in up:
            if (prefill.role, decode.role) == ("prefill", "decode"):
                yield prefill, decode


def _info(link: WorkerLink) -> WorkerInfo:
    assert link.info is not None
    return link.info


def _key(prefill: WorkerLink, decode: WorkerLink) -> Key:
    return (prefill.address, _info(prefill).epoch), (decode.address, _info(decode).epoch)
