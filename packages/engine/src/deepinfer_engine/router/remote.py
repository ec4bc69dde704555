"""`RemoteEngine`: an EngineClient over prefill and decode workers in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace

from deepinfer_engine.core.types import (
    FinishEvent,
    GenerateEvent,
    GenerateRequest,
    TokensEvent,
    Usage,
)
from deepinfer_engine.errors import (
    CapacityError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
    TransferError,
)
from deepinfer_engine.pd.messages import MAX_PIXEL_BYTES
from deepinfer_engine.pd.wire import FrameType, Xid
from deepinfer_engine.router.attempt import Placement, Retry, run_attempt
from deepinfer_engine.router.breaker import RetryBudget
from deepinfer_engine.router.changes import Changes
from deepinfer_engine.router.choose import affinity_key, by_room
from deepinfer_engine.router.client import ModelInfo, WorkerStatus
from deepinfer_engine.router.discovery import Directory, Members
from deepinfer_engine.router.encoders import encoders_of, without_encoder
from deepinfer_engine.router.index import PrefixIndex
from deepinfer_engine.router.link import WorkerLink
from deepinfer_engine.router.pairs import Pairs
from deepinfer_engine.router.scoring import PrefillChoice

log = logging.getLogger(__name__)

RETRIES = 2
"""Further attempts without a new token."""
BACKOFF_S = 0.05
RECOVERY_S = 60.0
"""How long a request that lost its workers waits for others."""
FIRST_WAIT_S = 20.0
"""... and a new one, when the workers that were there are gone."""


class RemoteEngine:
    """EngineClient over prefill and decode workers. Belongs to one event loop."""

    def __init__(
        self,
        cluster_key: bytes | None,
        recovery_s: float = RECOVERY_S,
        ttft_shed_s: float | None = None,
        ttft_target_s: float | None = None,
    ) -> None:
        """Use `connect`."""
        self._recovery_s = recovery_s
        self._index = PrefixIndex()
        self._prefill_choice = PrefillChoice(self._index, ttft_shed_s, ttft_target_s)
        self._cluster_key = cluster_key
        self._links: dict[tuple[str, str], WorkerLink] = {}
        self._changed = Changes()
        self._closing: dict[asyncio.Task[None], WorkerLink] = {}
        """Links that end when what runs over them does."""
        self._directory: Directory | None = None
        self._watching: asyncio.Task[None] | None = None
        self._running: set[str] = set()
        self._budget = RetryBudget()
        self._pairs = Pairs(self._changed)
        self._probing: asyncio.Task[None] | None = None
        self._introducing: asyncio.Task[None] | None = None
        self._was_ready = False
        """Whether a pair was ever usable: before, nobody waits for one to come back."""
        self.migrations = 0
        """Answers that went on with another worker."""

    @classmethod
    async def connect(
        cls,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        encode: Sequence[str] = (),
        cluster_key: bytes | None = None,
        ready_timeout_s: float = 0.0,
        recovery_s: float = RECOVERY_S,
        ttft_shed_s: float | None = None,
        ttft_target_s: float | None = None,
    ) -> RemoteEngine:
        """Links to "host:port" workers; each is (re)connected in the background with backoff.

        Waits up to `ready_timeout_s` until one prefill and one decode worker are there, then raises
        EngineUnavailable; 0 returns at once, and requests raise EngineUnavailable until they are.
        `recovery_s`: how long a request that lost its workers waits for others. `ttft_shed_s`:
        requests whose first token would take longer are not taken. `ttft_target_s`: how long it
        shall take; workers where it does are told apart by the work that the prompt makes there.
        """
        engine = cls(cluster_key, recovery_s, ttft_shed_s, ttft_target_s)
        engine.set_workers(prefill=prefill, decode=decode, encode=encode)
        if ready_timeout_s > 0:
            try:
                async with asyncio.timeout(ready_timeout_s):
                    await engine._wait_ready()
            except TimeoutError:
                status = [
                    f"{s.role} {s.name}: {s.detail or 'ready'}" for s in await engine.status()
                ]
                await engine.close()
                raise EngineUnavailable(
                    f"workers not ready after {ready_timeout_s} s ({'; '.join(status)})"
                ) from None
        return engine

    def set_workers(
        self, *, prefill: Sequence[str], decode: Sequence[str], encode: Sequence[str] = ()
    ) -> None:
        """Replace the addresses; links to workers that stay are kept. One that goes gets nothing
        more, and what it runs may end."""
        roles = {"prefill": prefill, "decode": decode, "encode": encode}
        wanted = [(role, address) for role, addresses in roles.items() for address in addresses]
        for key in [key for key in self._links if key not in wanted]:
            link = self._links.pop(key)
            link.leaving = True  # before its task begins: `status` may be asked at once
            task = asyncio.get_running_loop().create_task(link.retire())
            self._closing[task] = link
            task.add_done_callback(self._closing.pop)
        for role, address in wanted:
            if (role, address) not in self._links:
                link = WorkerLink(
                    address, role, self._cluster_key, self._changed, index=self._index
                )
                self._links[role, address] = link
                link.start()
        if self._links and self._probing is None:
            loop = asyncio.get_running_loop()
            self._probing = loop.create_task(
                self._pairs.probing(lambda: list(self._links.values()))
            )
            self._introducing = loop.create_task(self._introduce())

    def follow(self, directory: Directory) -> None:
        """Have the workers be those of a directory, now and whenever they change."""
        self._directory = directory
        self._take_members(directory.members())
        self._watching = asyncio.get_running_loop().create_task(directory.run(self._take_members))

    def _take_members(self, members: Members) -> None:
        self.set_workers(**members)

    def hear(self, body: bytes, signed: str) -> str:
        """See `Fleet.hear`."""
        if self._directory is None:
            raise TransferError("the workers of this router are given, and it takes no others")
        return self._directory.hear(body, signed).address

    async def drain(self, worker: str, *, on: bool = True, move: bool = False) -> None:
        """See `Fleet.drain`."""
        links = [link for link in self._links.values() if link.address == worker]
        if not links:
            known = ", ".join(sorted(link.address for link in self._links.values())) or "none"
            raise RequestError(f"there is no worker {worker!r}; there are: {known}", param="worker")
        for link in links:
            if link.connection is None:
                raise EngineUnavailable(f"{link.role} worker {worker} is not connected")
            if move and not self._candidates(link.role, links):
                raise EngineUnavailable(
                    f"no other {link.role} worker is ready to go on with what {worker} runs"
                )
        for link in links:
            link.ask_to_drain(on)
            if on and move:
                link.move_streams()

    def start_trouble(self, address: str, text: str) -> None:
        """Why the process of a worker cannot be started; empty when it could."""
        for link in self._links.values():
            if link.address == address:
                link.start_trouble = text

    # -- EngineClient ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """See `EngineClient.generate`. What loses its workers goes on elsewhere."""
        if request.request_id in self._running:
            raise RequestError(
                f"request {request.request_id} runs already; every request needs its own id"
            )
        self._running.add(request.request_id)
        try:
            async with aclosing(self._attempts(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._running.discard(request.request_id)

    async def model_info(self) -> ModelInfo:
        """What the connected workers agree on; EngineUnavailable while none is connected."""
        links = [
            link
            for link in self._links.values()
            if link.connection is not None and link.role != "encode"
        ]
        infos = [link.info for link in links if link.info is not None]
        if not infos:
            raise EngineUnavailable("no worker is connected yet")
        decode = next((x.info for x in links if x.role == "decode" and x.info), infos[0])
        return ModelInfo(
            max_model_len=min(info.max_model_len for info in infos),
            vocab_size=decode.vocab_size,
            nextn=decode.nextn,
            layout_hash=decode.layout_hash,
        )

    async def status(self) -> list[WorkerStatus]:
        found: list[WorkerStatus] = []
        links = list(self._links.values())
        for link in (*links, *self._closing.values()):
            status = link.status()
            if status.ready and (text := self._pairs.isolation(link, links)):
                status = replace(status, ready=False, detail=text)
            found.append(status)
        return found

    async def problems(self) -> list[str]:
        """Workers that cannot serve a request together, and why."""
        links = list(self._links.values())
        return self._pairs.problems(links) + without_encoder(links)

    async def flush(self) -> None:
        await asyncio.gather(*(link.flush() for link in self._links.values()))

    async def close(self) -> None:
        tasks = [t for t in (self._watching, self._probing, self._introducing) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watching = self._probing = self._introducing = None
        self.set_workers(prefill=(), decode=())
        await asyncio.gather(*(link.close() for link in self._closing.values()))
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- inside ---------------------------------------------------------------------------------

    async def _attempts(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        """The request on one pair of workers after the other, from where the last one stopped.

        What was emitted goes along as the end of the prompt; tokens are drawn by their position,
        so the answer is the one that the lost worker would have given.
        """
        loop = asyncio.get_running_loop()
        refused: set[WorkerLink] = set()
        failed: set[WorkerLink] = set()
        emitted: list[int] = []
        first: TokensEvent | None = None
        deadline = None if request.timeout_s is None else loop.time() + request.timeout_s
        self._budget.earn()
        tries = 0
        last: Retry | None = None
        for number in itertools.count(1):
            now = (
                replace(
                    request,
                    token_ids=(*request.token_ids, *emitted),
                    resumed=len(emitted),
                    prompt_logprobs=None,  # they came before the first token did
                )
                if emitted
                else request
            )
            try:
                placement = await self._placed(now, refused, failed, last, deadline)
            except (RequestError, EngineUnavailable) as error:
                if not emitted:
                    raise
                raise EngineLost(f"the answer cannot be continued: {error}") from None
            except TimeoutError:
                usage = Usage(len(request.token_ids), len(emitted), 0)
                yield FinishEvent("abort", _cached_as(first, usage))
                return
            before = len(emitted)
            try:
                events = run_attempt(now, Xid(request.request_id, number), placement, deadline)
                async with aclosing(events):
                    async for event in events:
                        if isinstance(event, TokensEvent):
                            emitted += event.token_ids
                            first = event if first is None else first
                        elif before:
                            event = replace(event, usage=_cached_as(first, event.usage))
                        yield event
            except Retry as retry:
                last = retry
                retry.failed.failures += not (retry.planned or retry.starved)
                if retry.refused or retry.starved:
                    retry.failed.breaker.gave_nothing_away()
                else:
                    retry.failed.breaker.failed()
                tries = 1 if len(emitted) > before else tries + 1
                if not retry.planned and (tries > RETRIES or not self._budget.spend()):
                    raise retry.final from None
                if retry.starved and not any(x.role == "encode" for x in self._links.values()):
                    raise retry.final from None
                if not retry.starved:
                    (refused if retry.refused else failed).update((retry.failed, retry.told_by))
                if retry.refused and not self._candidates(retry.failed.role, refused):
                    raise retry.final from None
                if emitted:
                    self.migrations += 1
                    retry.failed.migrations += 1
                    log.warning(
                        "%s goes on elsewhere after %d tokens: %s",
                        request.request_id, len(emitted), retry.final,
                    )  # fmt: skip
            else:
                placement.prefill.breaker.succeeded()
                placement.decode.breaker.succeeded()
                return
            finally:
                for link in (placement.prefill, placement.decode):
                    link.breaker.gave_nothing_away()

    async def _placed(
        self,
        request: GenerateRequest,
        refused: Collection[WorkerLink],
        failed: Collection[WorkerLink],
        last: Retry | None,
        deadline: float | None,
    ) -> Placement:
        """A pair for a request; one that lost its workers waits a while for others."""
        if last is not None and not last.refused:
            await asyncio.sleep(BACKOFF_S * (0.5 + random.random()))
        loop = asyncio.get_running_loop()
        longest = self._recovery_s if last is not None else min(self._recovery_s, FIRST_WAIT_S)
        patience = loop.time() + longest
        async with asyncio.timeout_at(deadline):
            while True:
                try:
                    starved = last is not None and last.starved
                    return self._place(request, refused, failed, wants_encoder=starved)
                except EngineUnavailable:
                    left = patience - loop.time()
                    if left <= 0 or not self._was_ready:
                        if last is None:
                            raise
                        raise last.final from None
                # Not longer than a second: a breaker closes without a word.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(left, 1.0)):
                        await self._changed.wait()

    async def _introduce(self) -> None:
        """Tell all workers where the others' windows are, whenever one came or went."""
        told: dict[tuple[str, int], tuple[str, ...]] = {}
        while True:
            here = [link for link in self._links.values() if link.connection is not None]
            windows = {link.info.windows for link in here if link.info is not None}
            members = tuple(sorted(windows - {""}))
            for link in here:
                run = (link.address, 0 if link.info is None else link.info.epoch)
                if members and told.get(run) != members:
                    link.send(FrameType.MEMBERS, {"addresses": members})
                    told[run] = members
            await self._changed.wait()

    async def _wait_ready(self) -> None:
        while not self._usable_pairs():
            await self._changed.wait()

    def _candidates(self, role: str, refused: Collection[WorkerLink] = ()) -> list[WorkerLink]:
        return [
            link
            for link in self._links.values()
            if link.role == role and link.ready and link not in refused and link.breaker.allows()
        ]

    def _usable_pairs(self) -> bool:
        return any(
            self._pairs.problem(p, d) is None
            for p in self._links.values()
            for d in self._links.values()
            if p.role == "prefill" and d.role == "decode" and p.ready and d.ready
        )

    def _place(
        self,
        request: GenerateRequest,
        refused: Collection[WorkerLink],
        failed: Collection[WorkerLink],
        *,
        wants_encoder: bool = False,
    ) -> Placement:
        """Decode first, by what it holds; then prefill that can send to it, by its first token.

        Workers that failed this request before are taken only where there is no other.
        """
        decodes = self._candidates("decode", refused)
        prefills = self._candidates("prefill", refused)
        if not decodes or not prefills:
            missing = "decode" if not decodes else "prefill"
            raise EngineUnavailable(f"no {missing} worker is ready; try again in a second")
        tokens = len(request.token_ids)
        self._check_fits(tokens, decodes)
        self._check_fits(tokens, prefills)
        pixels = sum(len(p.pixels) for p in request.pictures)
        if pixels > MAX_PIXEL_BYTES:
            raise RequestError(
                f"the pictures of the prompt have {pixels} bytes of pixels, and a worker takes "
                f"{MAX_PIXEL_BYTES}; send fewer or smaller ones"
            )
        reach = {
            d: found
            for d in decodes
            if (found := [p for p in prefills if self._pairs.problem(p, d) is None])
        }
        if not reach:
            raise EngineUnavailable(self._pairs.summary(prefills, decodes))
        key = affinity_key(request)
        decode = by_room([d for d in reach if d not in failed] or list(reach), tokens, key)
        alike = reach[decode]
        fresh = [p for p in alike if p not in failed] or alike
        self._was_ready = True
        best = self._prefill_choice.choose(request, fresh)
        encoders = encoders_of(best.worker, self._links.values()) if request.pictures else ()
        if wants_encoder and not encoders:
            raise EngineUnavailable("no encode worker is ready; try again in a second")
        placement = Placement(best.worker, decode, best.cost_ms, encoders)
        placement.prefill.breaker.begin()
        placement.decode.breaker.begin()
        return placement

    def _check_fits(self, tokens: int, links: Sequence[WorkerLink]) -> None:
        infos = [link.info for link in links if link.info is not None]
        longest = max(info.max_model_len for info in infos)
        if tokens >= longest:
            raise PromptTooLong(tokens, longest - 1)
        room = max(info.capacity_tokens for info in infos)
        if tokens + 1 > room:
            raise CapacityError(
                f"the prompt has {tokens} tokens, and the largest {links[0].role} worker holds "
                f"{room} tokens at all; shorten it, or start the worker with more blocks"
            )


def _cached_as(first: TokensEvent | None, usage: Usage) -> Usage:
    """The usage of an answer that went on elsewhere: of the cache it says what the first said."""
    if first is None:
        return usage
    return replace(
        usage,
        cached_tokens=first.cached_tokens or 0,
        replayed_tokens=first.replayed_tokens,
        window=first.window,
    )
