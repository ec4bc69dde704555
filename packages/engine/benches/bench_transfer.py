"""KV transfer with digests and coverage checks, through shared memory and over loopback TCP, in
clear and sealed, beside copying the bytes once and beside bare sockets; and the hand-over's wait.

    python packages/engine/benches/bench_transfer.py [MiB]

Both sides of a run share this process, and all runs move the same number of bytes; a ratio is what
asyncio, framing, two digests, sealing and landing in block memory cost. Rates are GB for
each second of CPU time of sender and receiver together, so that other work on the machine does not
count. Then, for prompts of 1 to 64 blocks through a whole router, prefill and decode worker: the
time from the end of the last prefill step to the first decode step, as the two runners see it.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from itertools import chain

import numpy as np
import uvloop

from deepinfer_engine import __version__
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import (
    CacheLayout,
    Caps,
    DecodeRow,
    PrefillChunk,
    StepOutput,
)
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.core.windows import Prefix
from deepinfer_engine.pd import transport, wire
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.messages import cached_body, pack_tokens, request_body, xid_body
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.sending import Outgoing, Unit
from deepinfer_engine.pd.shared import SendRing
from deepinfer_engine.pd.wire import FrameType, Xid
from deepinfer_engine.router.remote import RemoteEngine

BLOCK_TOKENS, BLOCK_BYTES, STATE_BYTES = 128, 113_920, 2_830_080
ROUNDS = 5
HAND_OVERS = 9
KEY = b"the key of this bench"


class Memory:
    """A runner that has memory of a realistic layout and says 1 whatever is in it."""

    def __init__(self, blocks: int) -> None:
        self.caps = Caps(1000, 1 << 20, 0, 0, (), blocks + 2, 4)
        self.layout = CacheLayout(BLOCK_TOKENS, BLOCK_BYTES, STATE_BYTES, (), (), "bench")
        self._blocks = np.ones((blocks + 2, BLOCK_BYTES), dtype=np.uint8)
        self._states = np.ones((4, STATE_BYTES), dtype=np.uint8)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        return [StepOutput((1,)) if chunk.sample else None for chunk in chunks]

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        return [StepOutput((1,)) for _ in rows]

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        return self.prefill(chunks), self.decode(rows)

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(self._blocks[block_id])

    def state_bytes(self, slot: int) -> memoryview:
        return memoryview(self._states[slot])

    def clear_state(self, slot: int) -> None:
        self._states[slot] = 0


def bare(total: int, chunk: int) -> float:
    """GB a CPU second of `sendall` and `recv_into` by two threads with nothing in between."""
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()

    def receive() -> None:
        left, buffer = total, memoryview(bytearray(chunk))
        while left:
            left -= receiver.recv_into(buffer[: min(chunk, left)])

    data = memoryview(bytes(chunk))
    began = time.process_time()
    thread = threading.Thread(target=receive)
    thread.start()
    for start in range(0, total, chunk):
        sender.sendall(data[: min(chunk, total - start)])
    thread.join()
    seconds = time.process_time() - began
    for sock in (sender, receiver, server):
        sock.close()
    return total / seconds / 1e9


def copied(total: int) -> float:
    """GB a CPU second of copying bytes once, from memory to memory."""
    source, target = (np.ones(total, dtype=np.uint8) for _ in range(2))  # touched, both
    began = time.process_time()
    np.copyto(target, source)
    return total / (time.process_time() - began) / 1e9


async def ours(source: Memory, blocks: int, way: str) -> tuple[float, int]:
    """GB a CPU second from RESERVE to RELEASED, and the bytes sent."""
    key = None if way == "tcp" else KEY
    service = DecodeService(Memory(blocks), None, EngineConfig(decode_reserve_tokens=0), key)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        service.serve("127.0.0.1:0", ready=ready.set_result, stop=stop, drain_timeout_s=5)
    )
    address, hash_ = await ready, source.layout.layout_hash
    me = {"engine_id": "bench", "epoch": 1, "version": __version__, "layout_hash": hash_}
    router = await transport.connect(address, {"role": "router", **me}, key)
    prefill = await transport.connect(address, {"role": "prefill", **me}, key)
    ring = None
    if way == "shared memory":
        ring = SendRing(prefill)
        prefill.send(FrameType.SHARED, ring.offer())
        await expect(prefill, FrameType.SHARED_OPEN)
    xid, tokens = Xid("r", 1), [1] * (blocks * BLOCK_TOKENS)
    request = GenerateRequest("r", (), SamplingParams(temperature=0.0, max_tokens=2, seed=1))
    body = {**xid_body(xid), **request_body(request), "prompt_len": len(tokens)}
    router.send(FrameType.RESERVE, {**body, "layout_hash": hash_, "epoch": service.epoch})
    grant = (await expect(router, FrameType.RESERVED))["grant_id"]
    began = time.process_time()
    out = Outgoing(source, grant, 1, len(tokens))
    for unit in chain(out.blocks(list(range(1, blocks + 1)), blocks), out.state(1)):
        if ring is None:
            prefill.send_unit(unit.header, unit.views)
        else:
            await put(ring, prefill, unit)
        await prefill.drain()
    commit = {
        **xid_body(xid),
        "n_units": len(out.units),
        "digest": out.digest,
        "tokens": pack_tokens(tokens),
        "first_token": 1,
        "first_logprobs": [],
        "cached": cached_body(Prefix()),
    }
    prefill.send(FrameType.COMMIT, commit)
    await expect(prefill, FrameType.RELEASED)
    seconds = time.process_time() - began
    total = sum(unit.header.nbytes for unit in out.units)
    if ring is not None:
        ring.close()
    router.close()
    prefill.close()
    stop.set()
    await serving
    return total / seconds / 1e9, total


async def expect(peer: transport.Connection, kind: FrameType) -> wire.Body:
    while (frame := await peer.receive()) is not None:
        if frame.type == kind:
            return frame.body()
        if frame.type == FrameType.ABORT:
            raise RuntimeError(f"refused: {frame.body()}")
    raise RuntimeError(f"the worker closed the connection before {kind.name}")


async def put(ring: SendRing, prefill: transport.Connection, unit: Unit) -> None:
    """Into the ring; while there is no room, hear what decode has read."""
    sending = asyncio.ensure_future(ring.send(unit.header, unit.views))
    await asyncio.sleep(0)
    while not sending.done():
        ring.read((await expect(prefill, FrameType.UNITS_READ))["count"])
        await asyncio.sleep(0)
    await sending


class Timed(Memory):
    """Keeps when its last prefill step ended and its first decode step began."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.ended = self.began = 0.0

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        out = super().prefill(chunks)
        self.ended = time.perf_counter()
        return out

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        self.began = self.began or time.perf_counter()
        return super().decode(rows)


async def hand_over(blocks: int, *, shares_memory: bool) -> float:
    """Median milliseconds from the last prefill step to the first decode step."""
    source, target = Timed(blocks), Timed(blocks)
    wide = EngineConfig(max_num_batched_tokens=2048)
    prefill = PrefillService(source, None, wide, KEY)
    prefill.units.shares_memory = shares_memory
    decode = DecodeService(target, None, EngineConfig(decode_reserve_tokens=0), KEY)
    stop, addresses, tasks = asyncio.Event(), list[str](), list[asyncio.Task[None]]()
    for service in (prefill, decode):
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        tasks.append(
            asyncio.create_task(
                service.serve("127.0.0.1:0", ready=ready.set_result, stop=stop, drain_timeout_s=5)
            )
        )
        addresses.append(await ready)
    engine = await RemoteEngine.connect(
        prefill=addresses[:1], decode=addresses[1:], cluster_key=KEY, ready_timeout_s=30
    )
    waits: list[float] = []
    for number in range(HAND_OVERS):
        target.began = 0.0
        tokens = (1,) * (blocks * BLOCK_TOKENS)
        sampling = SamplingParams(temperature=0.0, max_tokens=3, seed=1)
        async for _ in engine.generate(GenerateRequest(f"r{number}", tokens, sampling)):
            pass
        waits.append(target.began - source.ended)
    await engine.close()
    stop.set()
    await asyncio.gather(*tasks)
    return 1000 * statistics.median(waits)


WAYS = ("shared memory", "tcp", "tcp, sealed")


async def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    blocks = (mib << 20) // BLOCK_BYTES
    source = Memory(blocks)
    rates: dict[str, list[float]] = {way: [] for way in (*WAYS, "bare sockets", "one copy")}
    total = 0
    for _ in range(ROUNDS):
        for way in WAYS:
            rate, total = await ours(source, blocks, way)
            rates[way].append(rate)
        rates["bare sockets"].append(bare(total, wire.MAX_DATA_BYTES))
        rates["one copy"].append(copied(total))
    middle = {way: statistics.median(found) for way, found in rates.items()}
    print(f"{total / 2**20:.0f} MiB, {blocks} blocks, {ROUNDS} alternating rounds, medians")
    print(f"{'':16}GB/CPU-s   of bare sockets   of one copy")
    for way, rate in middle.items():
        sockets, copy = rate / middle["bare sockets"], rate / middle["one copy"]
        print(f"{way:16}{rate:8.2f}{sockets:15.2f}{copy:15.2f}")
    print("last prefill step to first decode step, whole engine, idle machine")
    print(f"{'blocks':>8}{'MB':>8}{'shared memory':>16}{'tcp, sealed':>14}")
    for count in (1, 8, 64):
        ways = [await hand_over(count, shares_memory=shared) for shared in (True, False)]
        size = (count * BLOCK_BYTES + STATE_BYTES) / 1e6
        print(f"{count:8}{size:8.1f}{ways[0]:13.1f} ms{ways[1]:11.1f} ms")


if __name__ == "__main__":
    uvloop.run(main())  # as workers run
