"""How many windows 2,000 agent and chat turns on two prefill workers find in memory or at a peer.

    python packages/engine/benches/window_workload.py [--turns 2000] [--scale 10] [--seed 1]

Real processes, sockets and caches: two prefill workers, one decode worker, a router, one cache
directory, windows in memory alone. The model is the engine's toy, whose text is right only if it
was computed from the right bytes; some answers are computed again without a cache and compared.
Time is scaled: windows live 180 s / scale, and so long are the pauses between turns.

Traffic: of five turns four are an agent's (three system prompts of 900 tokens, 8 to 30 turns, 60 to
400 tokens of tool output a turn, a pause with median 4 s), one is a chat's (80 tokens of system
prompt, 2 to 8 turns, 20 to 120 tokens, a pause with median 30 s). Pauses are log-normal, sigma 1:
one chat turn in thirty comes after more than three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from deepinfer_engine.adapters.kvtier import StoreSettings, WindowExchange, open_store
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.core.types import (
    FinishEvent,
    GenerateRequest,
    SamplingParams,
    TokensEvent,
    TrafficClass,
)
from deepinfer_engine.core.windows import Recovery
from deepinfer_engine.pd.decode import serve_decode
from deepinfer_engine.pd.prefill import serve_prefill
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.router.local import LocalEngine
from deepinfer_engine.router.remote import RemoteEngine

TTL_S = 180.0
LIVE = 48
"""Conversations at a time."""
KEY = bytes(range(32))
VOCAB = 250
GOAL = 0.98
SOURCES = ("local", "peer", "stored", "exact_replay", "bounded_replay", "miss")


def runner() -> ToyRunner:
    return ToyRunner(num_blocks=4096, num_state_slots=128, max_model_len=16384)


# -- one worker ------------------------------------------------------------------------------------


def work(role: str, directory: str, ttl_s: float) -> None:
    made = runner()
    store = open_store(
        StoreSettings(
            Path(directory),
            window_ttl_s=ttl_s,
            # The toy's replay is short; what one is worth is weighed as of the released model.
            recovery=Recovery("exact", 2560, 128),
            exchange=WindowExchange(KEY, deadline_s=1.0),
        ),
        made.layout,
    )
    serve = {"prefill": serve_prefill, "decode": serve_decode}[role]
    config = EngineConfig(max_num_seqs=64, persist_state="none", prompt_windows=64)
    asyncio.run(
        serve(
            made,
            store,
            "127.0.0.1:0",
            config=config,
            cluster_key=KEY,
            ready=lambda address: print(address, flush=True),
        )
    )


@contextmanager
def worker(role: str, directory: str, ttl_s: float) -> Iterator[str]:
    argv = [sys.executable, __file__, "--worker", role, directory, str(ttl_s)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


# -- traffic ---------------------------------------------------------------------------------------


@dataclass
class Told:
    """What came of all turns."""

    turns: Counter[str] = field(default_factory=Counter[str])
    windows: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    samples: list[tuple[GenerateRequest, list[int]]] = field(default_factory=list)


class Traffic:
    """Conversations on an engine until the turns are used up."""

    def __init__(self, engine: RemoteEngine, turns: int, scale: float, seed: int) -> None:
        self.engine = engine
        self.left = turns
        self.scale = scale
        self.rng = np.random.default_rng(seed)
        self.told = Told()
        self.systems = [self.tokens(900) for _ in range(3)]
        self.names = 0

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, VOCAB, count).tolist()

    async def run(self) -> None:
        await asyncio.gather(*(self.place(i) for i in range(LIVE)))

    async def place(self, index: int) -> None:
        """One conversation after the other."""
        while self.left > 0:
            # A chat's pauses are long: of eight places five are theirs.
            kind: TrafficClass = "chat" if index % 8 < 5 else "agent"
            await self.converse(kind)

    async def converse(self, kind: TrafficClass) -> None:
        rng = self.rng
        agent = kind == "agent"
        history = list(self.systems[rng.integers(3)]) if agent else self.tokens(80)
        for _ in range(int(rng.integers(8, 31) if agent else rng.integers(2, 9))):
            if self.left <= 0:
                return
            self.left -= 1
            history += self.tokens(int(rng.integers(60, 401) if agent else rng.integers(20, 121)))
            history += await self.turn(kind, history)
            pause = (4.0 if agent else 30.0) * float(rng.lognormal(0.0, 1.0))
            await asyncio.sleep(pause / self.scale)

    async def turn(self, kind: TrafficClass, history: list[int]) -> list[int]:
        self.names += 1
        sampling = SamplingParams(
            temperature=0.0, seed=0, max_tokens=int(self.rng.integers(20, 61)), ignore_eos=True
        )
        request = GenerateRequest(f"t{self.names}", tuple(history), sampling, traffic_class=kind)
        said: list[int] = []
        async for event in self.engine.generate(request):
            if isinstance(event, TokensEvent):
                said += event.token_ids
            elif isinstance(event, FinishEvent):
                told = self.told
                told.turns[kind] += 1
                told.windows[event.usage.window or "first"] += 1
                told.prompt_tokens += event.usage.prompt_tokens
                told.cached_tokens += event.usage.cached_tokens
        if self.names % 200 == 0:
            self.told.samples.append((request, said))
        return said


async def wrong(samples: list[tuple[GenerateRequest, list[int]]]) -> int:
    """How many of these answers are not those of an engine without a cache."""
    engine = LocalEngine(runner(), config=EngineConfig())
    count = 0
    for request, said in samples:
        again: list[int] = []
        async for event in engine.generate(request):
            if isinstance(event, TokensEvent):
                again += event.token_ids
        count += again != said
    await engine.close()
    return count


async def measure(turns: int, scale: float, seed: int) -> float:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        roles = ("prefill", "prefill", "decode")
        one, two, decode = (
            stack.enter_context(worker(role, directory, TTL_S / scale)) for role in roles
        )
        engine = await RemoteEngine.connect(
            prefill=[one, two], decode=[decode], cluster_key=KEY, ready_timeout_s=60.0
        )
        traffic = Traffic(engine, turns, scale, seed)
        started = time.monotonic()
        await traffic.run()
        seconds = time.monotonic() - started
        await asyncio.sleep(1.5)  # the workers' last report
        status = await engine.status()
        await engine.close()
    return tell(traffic.told, status, seconds, scale, await wrong(traffic.told.samples))


def of_exchange(status: list[WorkerStatus]) -> str:
    """What the workers' exchanges count: pulls by outcome, lookups without an answer."""
    prefix = "store_windows_"
    found: Counter[str] = Counter()
    for one in status:
        for name, value in one.gauges.items():
            if name.startswith((f"{prefix}pulls_", f"{prefix}lookup_errors", f"{prefix}client_")):
                found[name.removeprefix(prefix)] += int(value)
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "none"


def tell(told: Told, status: list[WorkerStatus], seconds: float, scale: float, bad: int) -> float:
    needed = sum(n for source, n in told.windows.items() if source != "first")
    near = told.windows["local"] + told.windows["peer"]
    share = near / needed if needed else 0.0
    loads = ", ".join(f"{s.role} {int(s.counters.get('router_requests', 0))}" for s in status)
    print(
        f"{sum(told.turns.values())} turns ({dict(told.turns)}) in {seconds:.0f} s, time x{scale:g}"
    )
    print(f"requests: {loads}; {os.cpu_count()} cores")
    print(
        f"{told.prompt_tokens:,} prompt tokens, {told.cached_tokens / told.prompt_tokens:.1%} of "
        f"them cached; {told.windows['first']} turns found no block and needed no window"
    )
    for source in SOURCES:
        count = told.windows[source]
        print(f"  window {source:<15} {count:>5}  {count / max(needed, 1):7.2%}")
    print(f"pulls from peers: {of_exchange(status)}")
    print(f"in memory or at a peer: {share:.2%} of {needed} (goal over {GOAL:.0%})")
    print(f"answers computed again without a cache: {len(told.samples)}, wrong: {bad}")
    return share if not bad else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--scale", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", nargs=3, metavar=("ROLE", "DIR", "TTL_S"))
    options = parser.parse_args()
    if options.worker:
        role, directory, ttl_s = options.worker
        work(role, directory, float(ttl_s))
        return 0
    share = asyncio.run(measure(options.turns, options.scale, options.seed))
    return 0 if share > GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
