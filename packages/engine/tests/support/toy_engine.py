"""The toy runner as oracle and engine: one request alone, a hand-stepped loop, clusters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine import __version__
from deepinfer_engine.adapters.kvtier import StoreSettings
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.loops import engine_loop
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.prefix_store import PrefixStore
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk, StepOutput
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.core.types import (
    FinishEvent,
    GenerateRequest,
    SamplingParams,
    TokensEvent,
    Usage,
)
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.service import WorkerService
from deepinfer_engine.router.remote import RemoteEngine

BLOCK = 8
TOY: dict[str, Any] = {
    "block_tokens": BLOCK,
    "num_blocks": 256,
    "num_state_slots": 64,
    "window": 12,
}
KEY = b"the key of this test cluster"
PATIENCE_S = 60.0


LONG_TOKENS = 3000
LONG_STEP_S = 0.01


class PacedRunner(ToyRunner):
    """A toy whose steps take as long as a model's while a long request runs.

    Without that a fast machine has finished the request before the test can cut it off.
    """

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        if any(row.sampling.max_tokens >= LONG_TOKENS for row in rows):
            time.sleep(LONG_STEP_S)
        return super().decode(rows)


def toy(**options: Any) -> ToyRunner:
    """A toy with small blocks, so that short prompts cross many borders."""
    return PacedRunner(**{**TOY, **options})


def gated(**options: Any) -> GatedRunner:
    return GatedRunner(**{**TOY, **options})


class GatedRunner(PacedRunner):
    """A toy whose steps wait until the test opens the gate; `entered` tells that one does.

    With a `ration` the gate falls by itself after so many decode steps: however fast the toy is,
    what it was asked for is then not finished.
    """

    def __init__(self, *, ration: int | None = None, **options: Any) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self._ration, self._lock = ration, threading.Lock()
        super().__init__(**options)

    def open(self) -> None:
        with self._lock:
            self._ration = None
            self.gate.set()

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S), "the test never opened the gate"

    def prefill(self, chunks: Any) -> Any:
        self._wait()
        return super().prefill(chunks)

    def decode(self, rows: Any) -> Any:
        with self._lock:
            if self._ration == 0:
                self.gate.clear()
            elif self._ration is not None:
                self._ration -= 1
        self._wait()
        return super().decode(rows)


def patient(path: Path | None) -> StoreSettings:
    """A cache that loads what it has, however slow the disk of a busy machine was before."""
    return StoreSettings(path, prefill_rate=1.0)


def greedy(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, **options)


def request(
    name: str, prompt: Sequence[int], sampling: SamplingParams | None = None, **options: Any
) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), sampling or greedy(), **options)


def prompt(seed: int, length: int, vocab: int = 250) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab, length).tolist())


def alone(tokens: Sequence[int], sampling: SamplingParams, **options: Any) -> list[int]:
    """The oracle: one request, one chunk, one token a step, no scheduler, no drafts, no cache."""
    runner = toy(**{**options, "nextn": 0})
    table, slot = list(range(1, runner.caps.num_blocks)), 1
    runner.clear_state(slot)
    chunk = PrefillChunk(
        token_ids=np.asarray(tokens),
        start=0,
        lookback=(),
        block_table=table,
        state_slot=slot,
        sampling=sampling,
        sample=True,
    )
    (first,) = runner.prefill([chunk])
    assert first is not None
    history = [*tokens, first.tokens[0]]
    stops = {
        *sampling.stop_token_ids,
        *(() if sampling.ignore_eos else runner.caps.eos_token_ids),
    }

    def over() -> bool:
        n = len(history) - len(tokens)
        stopped = history[-1] in stops and n > sampling.min_tokens
        return stopped or n >= sampling.max_tokens or len(history) >= runner.caps.max_model_len

    while not over():
        row = DecodeRow(history, len(tokens), table, slot, sampling, 0)
        (step,) = runner.decode([row])
        history += step.tokens
    return history[len(tokens) :]


@dataclass
class Recorder:
    """A `Sink` that keeps what it is told."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[Progress]] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)

    def chunk_done(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def progress(self, progress: Progress) -> None:
        key = progress.seq.key
        said = self.tokens.setdefault(key, [])
        assert key not in self.ends, f"{key} goes on after its end"
        assert not progress.tokens or progress.index == len(said)
        said.extend(progress.tokens)
        if progress.finish is not None:
            self.ends[key] = [progress]


def hand_loop(
    runner: ToyRunner | None = None, role: str = "both", **config: Any
) -> tuple[EngineLoop, Recorder]:
    """A loop without threads: the test calls `step`."""
    runner = runner or toy()
    settings = EngineConfig(**config)
    sink = Recorder()
    parking = HostParking(runner, settings.park_bytes)
    return engine_loop(runner, settings, role, parking=parking, link=None, sink=sink), sink  # type: ignore[arg-type]


def run_dry(loop: EngineLoop, *, limit: int = 10_000) -> int:
    """Step until nothing is left; returns how many steps it took."""
    for n in range(limit):
        if loop.step(float(n)) is None and not loop.unfinished:
            return n
    raise AssertionError(f"{loop.unfinished} sequences are still there after {limit} steps")


@dataclass
class Answer:
    tokens: list[int]
    reason: str
    usage: Usage
    cached: int | None
    steps: int


async def ask(engine: Any, req: GenerateRequest) -> Answer:
    """Collect a whole answer and check what every stream promises: order, no gaps, one end."""
    tokens: list[int] = []
    end: FinishEvent | None = None
    cached: int | None = None
    steps = 0
    async for event in engine.generate(req):
        assert end is None, "an event after the end"
        if isinstance(event, TokensEvent):
            assert event.index == len(tokens)
            assert (event.cached_tokens is None) == (event.index > 0)
            if event.index == 0:
                cached = event.cached_tokens
            tokens += event.token_ids
            steps += 1
        else:
            end = event
    assert end is not None
    assert end.usage.completion_tokens == len(tokens)
    assert end.usage.prompt_tokens == len(req.token_ids)
    return Answer(tokens, end.reason, end.usage, cached, steps)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a test body; a hang becomes a failure."""

    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await coroutine

    asyncio.run(bounded())


async def hear(stream: AsyncIterator[Any], tokens: int) -> list[Any]:
    """The next events of a stream, until they carry at least so many tokens."""
    said: list[Any] = []
    while sum(len(event.token_ids) for event in said) < tokens:
        said.append(await anext(stream))
    return said


async def until(condition: Callable[[], object]) -> None:
    """Wait for another task or thread to get there; the test's patience is the limit."""
    while not condition():
        await asyncio.sleep(0.002)


def identity(role: str, **more: Any) -> dict[str, Any]:
    """What a peer that a test plays says of itself."""
    return {"engine_id": "test", "role": role, "epoch": 5, "version": __version__, **more}


@dataclass
class Worker:
    service: WorkerService
    task: asyncio.Task[None]
    address: str
    stop: asyncio.Event

    async def end(self) -> None:
        """Drain and wait."""
        self.stop.set()
        await asyncio.gather(self.task, return_exceptions=True)

    async def kill(self) -> None:
        """Without goodbye: every connection is cut, nothing is drained."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def start_worker(service: WorkerService, listen: str = "127.0.0.1:0") -> Worker:
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    task = asyncio.create_task(
        service.serve(listen, ready=bound.set_result, stop=stop, drain_timeout_s=10.0)
    )
    done, _ = await asyncio.wait([task, bound], return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
    return Worker(service, task, bound.result(), stop)


@dataclass
class Cluster:
    engine: RemoteEngine
    prefills: list[Worker]
    decodes: list[Worker]

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    def idle(self) -> bool:
        """Nothing is owed, held or leaked anywhere."""
        for worker in self.workers:
            _, gauges = worker.service.load()
            if worker.service.unfinished() or worker.service.loop.unfinished:
                return False
            if gauges["blocks_free"] != gauges["blocks_capacity"]:
                return False
            if gauges["state_slots_free"] != gauges["state_slots_capacity"]:
                return False
            worker.service.loop.audit()
        return all(link.load == 0 for link in self.engine._links.values())


@contextlib.asynccontextmanager
async def cluster(
    *,
    prefills: int = 1,
    decodes: int = 1,
    store: Callable[[ToyRunner], PrefixStore] | None = None,
    prefill_runner: Callable[[], ToyRunner] = toy,
    decode_runner: Callable[[], ToyRunner] = toy,
    prefill_config: EngineConfig | None = None,
    decode_config: EngineConfig | None = None,
    grammars: Callable[[], Any] = lambda: None,
    recovery_s: float = 0.0,
    ready_timeout_s: float = PATIENCE_S,
) -> AsyncIterator[Cluster]:
    """Workers and a router over real loopback sockets, all in this event loop."""

    def made(
        role: type[PrefillService] | type[DecodeService],
        runner: ToyRunner,
        config: Any,
        **more: Any,
    ):
        its_store = store(runner) if store is not None else None
        return role(runner, its_store, config or EngineConfig(), KEY, **more)

    ps = [
        await start_worker(made(PrefillService, prefill_runner(), prefill_config))
        for _ in range(prefills)
    ]
    ds = [
        await start_worker(made(DecodeService, decode_runner(), decode_config, grammars=grammars()))
        for _ in range(decodes)
    ]
    engine = await RemoteEngine.connect(
        prefill=[w.address for w in ps],
        decode=[w.address for w in ds],
        cluster_key=KEY,
        ready_timeout_s=ready_timeout_s,
        recovery_s=recovery_s,
    )
    it = Cluster(engine, ps, ds)
    try:
        yield it
    finally:
        await engine.close()
        for worker in it.workers:
            await worker.end()
