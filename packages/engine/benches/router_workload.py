"""Sessions over eight workers, whichever router stands before them: hits and balance.

    python packages/engine/benches/router_workload.py [--sglang-python PYTHON] [--slower 4]

48 sessions of 10 turns over one system prompt of 4,096 characters; each turn adds 1,000 to 5,000;
24 requests at once. A worker serves one at a time, 4 ms and 1.5 ms for each block of 512 characters
that is not among its 1,200 last used (times `--slower`, so that the machine matters less). Ours:
the router of this package over real prefill workers on loopback whose model sleeps instead of
computing, all at defaults. With `--sglang-python`, of an environment that has sglang-router 0.3.2,
that router before HTTP workers of the same kind, policy by policy, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import (
    CacheLayout,
    Caps,
    DecodeRow,
    PrefillChunk,
    StepOutput,
)
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.service import WorkerService
from deepinfer_engine.router.remote import RemoteEngine

WORKERS, SESSIONS, TURNS, AT_ONCE = 8, 48, 10, 24
BLOCK, CACHE_BLOCKS, SYSTEM = 512, 1200, 4096
KEY = b"the key of this bench"
POLICIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("round_robin", ()),
    ("power_of_two", ()),
    ("cache_aware", ()),
    (
        "cache_aware",
        ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1",
         "--cache-threshold", "0.8"),
    ),
)  # fmt: skip


@dataclass
class Served:
    """What one worker did. Busy seconds are those the service rule says, not those measured."""

    hits: int = 0
    blocks: int = 0
    busy_s: float = 0.0

    def add(self, blocks: int, hits: int, slower: float) -> float:
        seconds = slower * (0.004 + 0.0015 * (blocks - hits))
        self.blocks += blocks
        self.hits += hits
        self.busy_s += seconds
        return seconds


@dataclass
class Outcome:
    name: str
    served: list[Served]
    waits: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return sum(w.hits for w in self.served) / sum(w.blocks for w in self.served)

    @property
    def imbalance(self) -> float:
        """The busiest worker's time over the mean."""
        return max(w.busy_s for w in self.served) / statistics.fmean(w.busy_s for w in self.served)

    def line(self) -> str:
        return (
            f"{self.name:44}{self.hit_rate:7.3f}{self.imbalance:9.2f}"
            f"{1000 * statistics.fmean(self.waits):9.0f} ms{self.wall_s:8.1f} s"
        )


async def sessions(ask: Callable[[int, int, str], Awaitable[None]], seed: int) -> list[float]:
    """Run the workload; returns how long each request took."""
    chance, places = random.Random(seed), asyncio.Semaphore(AT_ONCE)
    alphabet = "abcdefghijklmnopqrstuvwxyz "
    system = "".join(chance.choices(alphabet, k=SYSTEM))
    waits: list[float] = []

    async def one(session: int) -> None:
        own = random.Random(f"{seed}/{session}")
        text = system
        for turn in range(TURNS):
            text += "".join(own.choices(alphabet, k=own.randint(1000, 5000)))
            async with places:
                began = time.perf_counter()
                await ask(session, turn, text)
                waits.append(time.perf_counter() - began)

    await asyncio.gather(*(one(session) for session in range(SESSIONS)))
    return waits


class Sleeper:
    """A model that takes as long as the rule says and answers one token; a character is a token."""

    def __init__(self, served: Served, slower: float) -> None:
        self._served, self._slower = served, slower
        blocks = 1024
        self.caps = Caps(1000, 1 << 17, 0, 0, (), blocks, 8)
        self.layout = CacheLayout(BLOCK, 64, 0, (), (), "router-workload")
        self._blocks = bytearray(64 * blocks)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        for chunk in chunks:
            end = chunk.start + len(chunk.token_ids)
            time.sleep(self._served.add(end // BLOCK, chunk.start // BLOCK, self._slower))
        return [StepOutput((1,)) for _ in chunks]

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        return [StepOutput((1,)) for _ in rows]

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        return self.prefill(chunks), self.decode(rows)

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self._blocks)[64 * block_id : 64 * (block_id + 1)]

    def state_bytes(self, slot: int) -> memoryview:
        return memoryview(b"")

    def clear_state(self, slot: int) -> None: ...


@contextlib.asynccontextmanager
async def running(service: WorkerService) -> AsyncIterator[str]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        service.serve("127.0.0.1:0", ready=ready.set_result, stop=stop, drain_timeout_s=5)
    )
    try:
        yield await ready
    finally:
        stop.set()
        await serving


async def ours(slower: float, seed: int) -> Outcome:
    served = [Served() for _ in range(WORKERS)]
    alone = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1 << 17)
    async with contextlib.AsyncExitStack() as stack:
        prefills: list[str] = []
        for one in served:
            runner = Sleeper(one, slower)
            store = MemoryStore(runner.layout, limit_bytes=64 * CACHE_BLOCKS)
            service = PrefillService(runner, store, alone, KEY)
            prefills.append(await stack.enter_async_context(running(service)))
        decode = DecodeService(Sleeper(Served(), slower), None, EngineConfig(max_num_seqs=64), KEY)
        engine = await RemoteEngine.connect(
            prefill=prefills,
            decode=[await stack.enter_async_context(running(decode))],
            cluster_key=KEY,
            ready_timeout_s=30,
        )

        async def ask(session: int, turn: int, text: str) -> None:
            sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
            request = GenerateRequest(f"{session}-{turn}", tuple(text.encode()), sampling)
            async for _ in engine.generate(request):
                pass

        began = time.perf_counter()
        waits = await sessions(ask, seed)
        wall = time.perf_counter() - began
        await engine.close()
    return Outcome("deepinfer, defaults", served, waits, wall)


class HttpWorker:
    """One request at a time, with a cache of the blocks it saw last."""

    def __init__(self, served: Served, slower: float) -> None:
        self._served, self._slower = served, slower
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._turn = asyncio.Lock()

    async def serve(self, text: str) -> None:
        async with self._turn:
            blocks = [text[: (i + 1) * BLOCK] for i in range(len(text) // BLOCK)]
            hits = next((i for i, b in enumerate(blocks) if b not in self._cache), len(blocks))
            for block in blocks:
                self._cache[block] = None
                self._cache.move_to_end(block)
            while len(self._cache) > CACHE_BLOCKS:
                self._cache.popitem(last=False)
            await asyncio.sleep(self._served.add(len(blocks), hits, self._slower))

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(
                    (int(line.split(":")[1]) for line in head.split("\r\n")
                     if line.startswith("content-length:")), 0,
                )  # fmt: skip
                body = await reader.readexactly(length)
                if head.startswith("post /generate"):
                    await self.serve(json.loads(body)["text"])
                answer = json.dumps({"text": "x", "model_path": "m", "meta_info": {}}).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d"
                    b"\r\n\r\n%s" % (len(answer), answer)
                )
                await writer.drain()
        writer.close()


async def post(port: int, body: bytes) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    status = int((await reader.readline()).split()[1])
    await reader.read()
    writer.close()
    return status


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def theirs(
    python: str, policy: str, options: Sequence[str], slower: float, seed: int
) -> Outcome:
    served = [Served() for _ in range(WORKERS)]
    servers = [
        await asyncio.start_server(HttpWorker(one, slower).connected, "127.0.0.1", 0, limit=1 << 22)
        for one in served
    ]
    urls = [f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in servers]
    port, metrics = free_port(), free_port()
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", *urls]
    command += ["--policy", policy, "--host", "127.0.0.1", "--port", str(port), *options]
    command += ["--prometheus-port", str(metrics), "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        body = json.dumps({"text": "warm", "sampling_params": {}}).encode()
        for _ in range(300):
            with contextlib.suppress(OSError, IndexError):
                if await post(port, body) == 200:
                    break
            await asyncio.sleep(0.2)
        else:
            raise RuntimeError(f"sglang-router does not serve with {policy}")
        for one in served:
            one.hits = one.blocks = 0
            one.busy_s = 0.0

        async def ask(session: int, turn: int, text: str) -> None:
            status = await post(port, json.dumps({"text": text, "sampling_params": {}}).encode())
            assert status == 200, status

        began = time.perf_counter()
        waits = await sessions(ask, seed)
        wall = time.perf_counter() - began
    finally:
        process.terminate()
        process.wait(30)
        for server in servers:
            server.close()
    name = f"sglang-router {policy} {' '.join(o for o in options if o[0] != '-')}"
    return Outcome(name, served, waits, wall)


async def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sglang-python", help="of an environment with sglang-router 0.3.2")
    parser.add_argument("--slower", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    print(f"{'router':44}{'hits':>7}{'balance':>9}{'mean wait':>12}{'whole':>10}")
    good = True
    for seed in args.seeds:
        outcome = await ours(args.slower, seed)
        print(outcome.line(), flush=True)
        good &= outcome.hit_rate >= 0.80 and outcome.imbalance <= 1.25
        if args.sglang_python:
            for policy, options in POLICIES:
                there = await theirs(args.sglang_python, policy, options, args.slower, seed)
                print(there.line(), flush=True)
    print("hits >= 0.80 at balance <= 1.25: " + ("held" if good else "NOT held"))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
