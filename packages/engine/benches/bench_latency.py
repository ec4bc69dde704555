"""Where the time to the first token goes, and what a burst of long prompts does to running answers.

    python packages/engine/benches/bench_latency.py [--turns 20] [--tokens 77000]

First: turns of a long session, of which 96 % is cached, through router, prefill and decode worker
on loopback with the released model's record sizes and a prompt cache on disk; the model itself
takes no time, so this is what everything around it costs, beside the published 400 ms (mean) and
1,000 ms (P99) of a whole first token. Then: gaps between tokens of running answers while long
prompts arrive, in one process and disaggregated, on a model whose steps sleep (a simulated device:
5 ms a decode step, 40,000 prompt tokens a second).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import CacheLayout, Caps, DecodeRow, PrefillChunk, StepOutput
from deepinfer_engine.core.types import GenerateRequest, SamplingParams, TokensEvent
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.service import WorkerService
from deepinfer_engine.router.local import LocalEngine
from deepinfer_engine.router.remote import RemoteEngine

KEY = b"the key of this bench"
BLOCK_TOKENS, BLOCK_BYTES, STATE_BYTES = 128, 113_920, 2_830_080
HIT = 0.96
STEP_S, PREFILL_RATE = 0.005, 40_000.0


class Model:
    """Memory of the released layout, and steps that take the time they are told to."""

    def __init__(self, blocks: int, *, takes_time: bool = False) -> None:
        self.caps = Caps(1000, 1 << 18, 0, 0, (), blocks, 64)
        self.layout = CacheLayout(BLOCK_TOKENS, BLOCK_BYTES, STATE_BYTES, (), (), "latency")
        self._blocks = np.ones((blocks, BLOCK_BYTES), dtype=np.uint8)
        self._states = np.ones((64, STATE_BYTES), dtype=np.uint8)
        self._takes_time = takes_time
        self.log: dict[str, list[float]] = defaultdict(list)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        self._sleep(sum(len(chunk.token_ids) for chunk in chunks), 0)
        self.log["prefilled"].append(time.perf_counter())
        return [StepOutput((1,)) if chunk.sample else None for chunk in chunks]

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        self.log["decoding"].append(time.perf_counter())
        self._sleep(0, len(rows))
        return [StepOutput((1,)) for _ in rows]

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        self._sleep(sum(len(chunk.token_ids) for chunk in chunks), len(rows))
        outputs = [StepOutput((1,)) if chunk.sample else None for chunk in chunks]
        return outputs, [StepOutput((1,)) for _ in rows]

    def _sleep(self, tokens: int, rows: int) -> None:
        if self._takes_time:
            time.sleep(tokens / PREFILL_RATE + (STEP_S if rows else 0.0))

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self._blocks[block_id])

    def state_bytes(self, slot: int) -> memoryview:
        return memoryview(self._states[slot])

    def clear_state(self, slot: int) -> None:
        self._states[slot] = 0


@contextlib.asynccontextmanager
async def disaggregated(*services: WorkerService) -> AsyncIterator[RemoteEngine]:
    stop, tasks = asyncio.Event(), list[asyncio.Task[None]]()
    places: dict[str, list[str]] = {"prefill": [], "decode": []}
    for service in services:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = service.serve("127.0.0.1:0", ready=ready.set_result, stop=stop, drain_timeout_s=5)
        tasks.append(asyncio.create_task(serving))
        places[service.role].append(await ready)
    engine = await RemoteEngine.connect(
        prefill=places["prefill"], decode=places["decode"], cluster_key=KEY, ready_timeout_s=60
    )
    try:
        yield engine
    finally:
        await engine.close()
        stop.set()
        await asyncio.gather(*tasks)


def timed(owner: Any, name: str, log: list[float]) -> None:
    """Have a method's times in seconds be kept."""
    inner: Callable[..., Any] = getattr(owner, name)

    def outer(*args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args, **more)
        finally:
            log.append(time.perf_counter() - began)

    setattr(owner, name, outer)


async def stages(turns: int, tokens: int) -> None:
    fresh = int(tokens * (1 - HIT))
    blocks = (tokens + fresh * turns) // BLOCK_TOKENS + 40
    source, target = Model(blocks), Model(blocks)
    log: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(Path(folder), source.layout, host_bytes=4 << 30)
        wide = EngineConfig(max_num_batched_tokens=4096, prompt_windows=2)
        prefill = PrefillService(source, store, wide, KEY)
        decode = DecodeService(target, None, EngineConfig(decode_reserve_tokens=0), KEY)
        assert prefill.connector is not None
        timed(prefill.connector, "_look_up", log["cache: find and load the hit"])
        async with disaggregated(prefill, decode) as engine:
            timed(engine._prefill_choice, "choose", log["router: hash the prompt, choose"])
            chance = np.random.default_rng(1)
            prompt = tuple(chance.integers(0, 1000, tokens - fresh * (turns // 2 + 1)).tolist())
            hits: list[float] = []
            for turn in range(turns + 1):
                prompt = (*prompt, *chance.integers(0, 1000, fresh).tolist())
                sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=3)
                asked = GenerateRequest(f"t{turn}", prompt, sampling)
                target.log.clear()
                began, first = time.perf_counter(), 0.0
                async for event in engine.generate(asked):
                    if isinstance(event, TokensEvent) and not first:
                        first = time.perf_counter()
                        hits.append((event.cached_tokens or 0) / len(prompt))
                log["first token at the router"].append(first - began)
                log["first decode step, from the last of prefill"].append(
                    target.log["decoding"][0] - source.log["prefilled"][-1]
                )
    share = statistics.fmean(hits[1:])
    print(f"{turns} turns of {tokens:,} tokens in the mean, {share:.1%} cached; ms")
    print(f"{'stage':46}{'mean':>8}{'P99':>8}")
    for name, found in log.items():
        kept = sorted(1000 * one for one in found[1:])
        p99 = kept[min(len(kept) - 1, int(0.99 * len(kept)))]
        print(f"{name:46}{statistics.fmean(kept):8.1f}{p99:8.1f}")
    print("published for a whole first token, the model's time included: mean 400, P99 1,000")


async def gaps(engine: Any, answers: int, prompts: int, length: int) -> list[float]:
    """Milliseconds between tokens of running answers, from when long prompts arrive."""
    found: list[float] = []
    busy, over = asyncio.Event(), asyncio.Event()

    async def answer(number: int) -> None:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=100_000, ignore_eos=True)
        last = 0.0
        stream = engine.generate(GenerateRequest(f"a{number}", (number,) * 64, sampling))
        async for event in stream:
            now = time.perf_counter()
            if busy.is_set() and last:
                found.append(1000 * (now - last))
            last = now
            if over.is_set():
                break
            assert event
        await stream.aclose()

    async def read(number: int) -> None:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=1)
        prompt = (number + 100,) * length
        async for _ in engine.generate(GenerateRequest(f"p{number}", prompt, sampling)):
            pass

    running = [asyncio.create_task(answer(number)) for number in range(answers)]
    await asyncio.sleep(1.0)
    busy.set()
    await asyncio.gather(*(read(number) for number in range(prompts)))
    over.set()
    await asyncio.gather(*running)
    return sorted(found)


async def burst(answers: int = 8, prompts: int = 5, length: int = 16_384) -> None:
    blocks = (answers + prompts + 2) * length // BLOCK_TOKENS // 2
    rows: dict[str, list[float]] = {}
    for name, gap in (("one process, prompts first", 0.0), ("one process, --max-gap 3.5", 3.5)):
        local = LocalEngine(Model(blocks, takes_time=True), config=EngineConfig(max_gap=gap))
        rows[name] = await gaps(local, answers, prompts, length)
        await local.close()
    async with disaggregated(
        PrefillService(Model(blocks, takes_time=True), None, EngineConfig(), KEY),
        DecodeService(Model(blocks, takes_time=True), None, EngineConfig(), KEY),
    ) as engine:
        rows["disaggregated"] = await gaps(engine, answers, prompts, length)
    print(f"\n{answers} answers while {prompts} prompts of {length:,} tokens are read; gap in ms")
    print(f"{'':34}{'P50':>8}{'P99':>8}{'most':>8}")
    for name, found in rows.items():
        middle, late = found[len(found) // 2], found[int(0.99 * len(found))]
        print(f"{name:34}{middle:8.1f}{late:8.1f}{found[-1]:8.1f}")


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=77_000)
    args = parser.parse_args()
    await stages(args.turns, args.tokens)
    await burst()


if __name__ == "__main__":
    asyncio.run(main())
