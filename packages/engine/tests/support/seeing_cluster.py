"""A router, a prefill worker that gets pictures encoded by others, a decode worker, and those."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seeing_toy import IMAGE, SAME, SeeingToy
from toy_engine import (
    BLOCK,
    KEY,
    PATIENCE_S,
    Cluster,
    Worker,
    ask,
    prompt,
    request,
    run,
    start_worker,
    until,
)

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.encode import EncodeService
from deepinfer_engine.pd.peers import ModelIdentity
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.router.local import LocalEngine
from deepinfer_engine.router.remote import RemoteEngine


def toy() -> SeeingToy:
    return SeeingToy(block_tokens=BLOCK, num_blocks=256, num_state_slots=64, window=12)


def toy_with_tower() -> SeeingToy:
    return SeeingToy(tower=True, block_tokens=BLOCK, num_blocks=256, num_state_slots=64, window=12)


@dataclass
class Seeing(Cluster):
    encoders: list[Worker]

    def encode(self, i: int = 0) -> EncodeService:
        return self.encoders[i].service

    def counters(self, i: int = 0) -> dict[str, float]:
        """Of an encode worker."""
        return self.encode(i).load()[0]

    def gauges(self, i: int = 0) -> dict[str, float]:
        return self.encode(i).load()[1]

    def asked(self) -> dict[str, float]:
        """Counters of the prefill worker."""
        return self.prefills[0].service.load()[0]


@contextlib.asynccontextmanager
async def seeing(
    *encoders: Any,
    runner: Callable[[], Any] = toy,
    decode_runner: Callable[[], Any] = toy,
    store: Any = None,
    encoding: str = "workers",
    same: ModelIdentity = SAME,
    identity: ModelIdentity | None = None,
    shares_memory: bool = True,
    key: bytes | None = KEY,
    addresses: Sequence[str] = (),
    recovery_s: float = 0.0,
    **options: Any,
) -> AsyncIterator[Seeing]:
    """encoders: towers, each of a worker of its own; addresses: of others. identity: of the encode
    workers, where it is not that of all."""
    prefill = PrefillService(runner(), store, EngineConfig(), key, identity=same, encoding=encoding)
    decode = DecodeService(decode_runner(), None, EngineConfig(), key, identity=same)
    workers = [await start_worker(prefill), await start_worker(decode)]
    encode = []
    for encoder in encoders:
        service = EncodeService(encoder, key, identity=identity or same, **options)
        service.units.shares_memory = shares_memory
        encode.append(await start_worker(service))
    engine = await RemoteEngine.connect(
        prefill=[workers[0].address],
        decode=[workers[1].address],
        encode=[*(one.address for one in encode), *addresses],
        cluster_key=key,
        ready_timeout_s=PATIENCE_S,
        recovery_s=recovery_s,
    )
    await until(lambda: all(link.connection for link in engine._links.values()))
    it = Seeing(engine, workers[:1], workers[1:], encode)
    try:
        yield it
        for encoder in encoders:
            if hasattr(encoder, "gate"):
                encoder.gate.set()
        await until(it.idle)
        await until(lambda: not any(one.service.unfinished() for one in encode))
        held = {} if prefill.pictures is None else prefill.pictures.gauges()
        assert held.get("picture_bytes_held", 0) == held.get("picture_prompts", 0) == 0
        assert not any(one.service._of_waiting for one in encode)
    finally:
        await engine.close()
        for worker in [*workers, *encode]:
            await worker.end()


def expected(*requests) -> list[list[int]]:
    """With a tower in the same process."""
    out: list[list[int]] = []

    async def body() -> None:
        engine = LocalEngine(toy_with_tower(), store=None, config=EngineConfig())
        try:
            out.extend([(await ask(engine, one)).tokens for one in requests])
        finally:
            await engine.close()

    run(body())
    return out


async def no_other_notices(it) -> None:
    """A prompt of text alone is served as ever."""
    words = tuple(t for t in prompt(2, 20) if t != IMAGE)
    assert (await ask(it.engine, request("text", words))).reason == "length"
