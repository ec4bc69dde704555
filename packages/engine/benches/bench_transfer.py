"""KV transfer over loopback TCP with digests and coverage checks, against a bare sockets.

    python packages/engine/benches/bench_transfer.py [MiB]

Both sides of a run share this process, and both runs move the same number of bytes; the ratio is
what asyncio, framing, two passes of xxh64 and landing in block memory cost.
Rates are GB for each second of CPU time of sender and receiver together, so that other work on the
machine does not count.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np

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
from deepinfer_engine.pd.sending import Outgoing
from deepinfer_engine.pd.wire import FrameType, Xid

BLOCK_TOKENS, BLOCK_BYTES, STATE_BYTES = 128, 113_920, 2_830_080
ROUNDS = 5


class Memory:
    """A runner that has memory of a realistic layout and says 1 whatever is in it."""

    def __init__(self, blocks: int) -> None:
        self.caps = Caps(1000, 1 << 20, 0, 0, (), blocks + 2, 4)
        self.layout = CacheLayout(BLOCK_TOKENS, BLOCK_BYTES, STATE_BYTES, (), (), "bench")
        self._blocks = np.ones((blocks + 2, BLOCK_BYTES), dtype=np.uint8)
        self._states = np.ones((4, STATE_BYTES), dtype=np.uint8)

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        return [StepOutput((1,)) for _ in chunks]

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


async def ours(source: Memory, blocks: int) -> tuple[float, int]:
    """GB a CPU second from RESERVE to RELEASED, and the bytes sent."""
    service = DecodeService(Memory(blocks), None, EngineConfig(decode_reserve_tokens=0), None)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(
        service.serve("127.0.0.1:0", ready=ready.set_result, stop=stop, drain_timeout_s=5)
    )
    address, hash_ = await ready, source.layout.layout_hash
    me = {"engine_id": "bench", "epoch": 1, "version": __version__, "layout_hash": hash_}
    router = await transport.connect(address, {"role": "router", **me}, None)
    prefill = await transport.connect(address, {"role": "prefill", **me}, None)
    xid, tokens = Xid("r", 1), [1] * (blocks * BLOCK_TOKENS)
    request = GenerateRequest("r", (), SamplingParams(temperature=0.0, max_tokens=2, seed=1))
    body = {**xid_body(xid), **request_body(request), "prompt_len": len(tokens)}
    router.send(FrameType.RESERVE, {**body, "layout_hash": hash_, "epoch": service.epoch})
    grant = (await expect(router, FrameType.RESERVED))["grant_id"]
    began = time.process_time()
    out = Outgoing(source, grant, 1, len(tokens))
    for unit in (*out.blocks(list(range(1, blocks + 1)), blocks), *out.state(1)):
        prefill.send_unit(unit.header, unit.views)
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


async def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 128
    blocks = (mib << 20) // BLOCK_BYTES
    source = Memory(blocks)
    mine, raw = list[float](), list[float]()
    for _ in range(ROUNDS):
        rate, total = await ours(source, blocks)
        mine.append(rate)
        raw.append(bare(total, wire.MAX_DATA_BYTES))
    a, b = statistics.median(mine), statistics.median(raw)
    print(f"{total / 2**20:.0f} MiB, {blocks} blocks, {ROUNDS} alternating rounds, medians")
    print(f"transfer with digests and coverage: {a:.2f} GB/CPU-s; bare sockets: {b:.2f}")
    print(f"ratio to bare sockets: {a / b:.2f}")


if __name__ == "__main__":
    asyncio.run(main())
