"""`RemoteEngine`: an EngineClient over prefill and decode workers in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import aclosing

from deepinfer_engine.core.types import GenerateEvent, GenerateRequest
from deepinfer_engine.errors import CapacityError, EngineUnavailable, PromptTooLong, RequestError
from deepinfer_engine.pd.messages import MAX_PIXEL_BYTES
from deepinfer_engine.pd.wire import Xid
from deepinfer_engine.router.attempt import Placement, Retry, run_attempt
from deepinfer_engine.router.choose import affinity_key, by_affinity, by_load
from deepinfer_engine.router.client import ModelInfo, WorkerStatus
from deepinfer_engine.router.link import WorkerLink

RETRIES = 2
"""Further attempts at a request that has not emitted anything."""


class RemoteEngine:
    """EngineClient over prefill and decode workers. Belongs to one event loop."""

    def __init__(self, cluster_key: bytes | None) -> None:
        """Use `connect`."""
        self._cluster_key = cluster_key
        self._links: dict[tuple[str, str], WorkerLink] = {}
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._running: set[str] = set()

    @classmethod
    async def connect(
        cls,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        cluster_key: bytes | None = None,
        ready_timeout_s: float = 0.0,
    ) -> RemoteEngine:
        """Links to "host:port" workers; each is (re)connected in the background with backoff.

        Waits up to `ready_timeout_s` until one prefill and one decode worker are there, then raises
        EngineUnavailable; 0 returns at once, and requests raise EngineUnavailable until they are.
        """
        engine = cls(cluster_key)
        engine.set_workers(prefill=prefill, decode=decode)
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

    def set_workers(self, *, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Replace the addresses; links to workers that stay are kept."""
        wanted = [("prefill", a) for a in prefill] + [("decode", a) for a in decode]
        for key in [key for key in self._links if key not in wanted]:
            task = asyncio.get_running_loop().create_task(self._links.pop(key).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for role, address in wanted:
            if (role, address) not in self._links:
                link = WorkerLink(address, role, self._cluster_key, self._changed)
                self._links[role, address] = link
                link.start()

    # -- EngineClient ---------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """See `EngineClient.generate`. What emitted nothing is tried again elsewhere."""
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
        links = [link for link in self._links.values() if link.connection is not None]
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
        return [link.status() for link in self._links.values()]

    async def flush(self) -> None:
        await asyncio.gather(*(link.flush() for link in self._links.values()))

    async def close(self) -> None:
        self.set_workers(prefill=(), decode=())
        await asyncio.gather(*self._closing, return_exceptions=True)

    # -- inside ---------------------------------------------------------------------------------

    async def _attempts(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent]:
        """The request on one pair of workers after the other, until it has emitted something."""
        refused: set[WorkerLink] = set()
        failed: set[WorkerLink] = set()
        deadline = None
        if request.timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + request.timeout_s
        for number in range(1, RETRIES + 2):
            placement = self._place(request, refused, failed)
            xid = Xid(request.request_id, number)
            try:
                async with aclosing(run_attempt(request, xid, placement, deadline)) as events:
                    async for event in events:
                        yield event
            except Retry as retry:
                retry.failed.failures += 1
                if number > RETRIES:
                    raise retry.final from None
                (refused if retry.refused else failed).add(retry.failed)
                if retry.refused and not self._candidates("decode", refused):
                    raise retry.final from None
            else:
                return

    async def _wait_ready(self) -> None:
        while not (self._candidates("prefill") and self._candidates("decode")):
            self._changed.clear()
            await self._changed.wait()

    def _candidates(self, role: str, refused: Collection[WorkerLink] = ()) -> list[WorkerLink]:
        return [
            link
            for link in self._links.values()
            if link.role == role and link.ready and link not in refused
        ]

    def _place(
        self,
        request: GenerateRequest,
        refused: Collection[WorkerLink],
        failed: Collection[WorkerLink],
    ) -> Placement:
        """Decode first, by load; then prefill with the same cache layout, by affinity.

        Workers that failed this request before are taken only where there is no other.
        """
        decodes = self._candidates("decode", refused)
        prefills = self._candidates("prefill")
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
        key = affinity_key(request)
        decode = by_load([d for d in decodes if d not in failed] or decodes, key)
        alike = [p for p in prefills if _layout(p) == _layout(decode)]
        if not alike:
            raise EngineUnavailable(
                "prefill and decode workers run different models, dtypes or cache formats; "
                "start them with the same model and options"
            )
        fresh = [p for p in alike if p not in failed] or alike
        return Placement(by_affinity(fresh, key, tokens), decode)

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


def _layout(link: WorkerLink) -> str | None:
    return link.info.layout_hash if link.info is not None else None
