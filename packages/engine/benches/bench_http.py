"""What the HTTP layer alone can carry, against the same web server answering a constant.

    python packages/engine/benches/bench_http.py [--seconds 4] [--clients 16]

No model runs: an engine that always has the next tokens ready stands behind the real application in
a process of its own, and a bare asyncio client in this one asks over loopback. Prints requests and
streamed tokens per second, per second of the wall and of the server's CPU (which a busy machine
does not distort), and the time to the first byte, beside those of the constant answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import Response

from deepinfer_engine.codec.recipe_codec import RecipeCodec
from deepinfer_engine.core.types import FinishEvent, GenerateRequest, TokensEvent, Usage
from deepinfer_engine.demo import demo_path
from deepinfer_engine.router.client import ModelInfo, WorkerStatus
from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.run import bind, listening
from deepinfer_engine.settings import Settings

STEP_TOKENS = 4  # an anchor and three accepted drafts
WHOLE_TOKENS = 32
STREAM_TOKENS = 256
CONSTANT, CHAT = "/constant", "/v1/chat/completions"


class ReadyEngine:
    """Never waits: every step's tokens are there when they are asked for."""

    def __init__(self, token_ids: list[int]) -> None:
        self._ids = token_ids

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokensEvent | FinishEvent]:
        total = request.sampling.max_tokens
        for index in range(0, total, STEP_TOKENS):
            ids = tuple(self._ids[(index + k) % len(self._ids)] for k in range(STEP_TOKENS))
            yield TokensEvent(index, ids, cached_tokens=0)
            await asyncio.sleep(0)
        yield FinishEvent("length", Usage(len(request.token_ids), total, 0))

    async def model_info(self) -> ModelInfo:
        return ModelInfo(8192, 1536, 3, "")

    async def status(self) -> list[WorkerStatus]:
        return [WorkerStatus("w", "single", ready=True)]

    async def problems(self) -> list[str]:
        return []

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


async def serve() -> None:
    """The server's process: tells its port on standard output, ends at end of file on its input."""
    codec = RecipeCodec.from_directory(demo_path(), ("demo",))
    words = codec.tokenize("Once there was a fox who lived near the river. ")
    app = create_app(ReadyEngine(words), codec, Settings(log_level="error"))
    answer = json.dumps({"choices": [{"message": {"content": "x" * 200}}]}).encode()

    @app.post(CONSTANT)
    async def constant() -> Response:
        return Response(answer, media_type="application/json")

    sock = bind("127.0.0.1", 0)
    async with listening(app, sock, 0):
        print(sock.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Client:
    """HTTP/1.1 with keep-alive and nothing else, so that the client is not what is measured."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def post(self, path: str, body: bytes) -> float:
        """One request, its answer read to the end; seconds to the first byte of the body."""
        host = f"127.0.0.1:{self._port}"
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        began = time.perf_counter()
        self._writer.write(head.encode() + body)
        headers = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert headers.startswith(b"http/1.1 200"), headers
        if b"transfer-encoding: chunked" not in headers:
            length = int(headers.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await self._reader.readexactly(length)
            return time.perf_counter() - began
        first = 0.0
        while True:
            size = int(await self._reader.readline(), 16)
            first = first or time.perf_counter() - began
            await self._reader.readexactly(size + 2)
            if size == 0:
                return first

    def close(self) -> None:
        self._writer.close()


async def measure(
    port: int, path: str, body: bytes, clients: int, seconds: float
) -> tuple[int, float]:
    """(requests, median seconds to the first byte) of `clients` that ask back to back."""
    firsts: list[float] = []
    end = time.perf_counter() + seconds

    async def one() -> None:
        client = Client(port)
        await client.open()
        while time.perf_counter() < end:
            firsts.append(await client.post(path, body))
        client.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return len(firsts), statistics.median(firsts)


def cpu_seconds(pid: int) -> float:
    """User and system time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def body_of(max_tokens: int, *, stream: bool) -> bytes:
    messages = [{"role": "user", "content": "Tell me a story about a fox. " * 8}]
    body = {"model": "demo", "messages": messages, "max_tokens": max_tokens, "stream": stream}
    return json.dumps({**body, "thinking": {"type": "disabled"}}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve())
        return
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=pipe, stdout=pipe)
    port = int(process.stdout.readline())

    def run(path: str, body: bytes, clients: int) -> tuple[float, float, float]:
        """Requests per wall second, per CPU second of the server, seconds to the first byte."""
        used, began = cpu_seconds(process.pid), time.perf_counter()
        count, first = asyncio.run(measure(port, path, body, clients, args.seconds))
        wall, cpu = time.perf_counter() - began, cpu_seconds(process.pid) - used
        return count / wall, count / cpu, first

    whole, stream = body_of(WHOLE_TOKENS, stream=False), body_of(STREAM_TOKENS, stream=True)
    run(CONSTANT, whole, args.clients)
    rows = {
        "constant answer": (run(CONSTANT, whole, args.clients), 0),
        f"whole, {WHOLE_TOKENS} tokens": (run(CHAT, whole, args.clients), WHOLE_TOKENS),
        f"stream, {STREAM_TOKENS} tokens": (run(CHAT, stream, args.clients), STREAM_TOKENS),
    }
    idle, first = run(CONSTANT, whole, 1)[2], run(CHAT, stream, 1)[2]
    process.communicate()
    ceiling = rows["constant answer"][0][1]
    for name, ((wall, cpu, _), tokens) in rows.items():
        print(f"{name:19}{wall:7.0f} requests/s{cpu:8.0f} /CPU-s", end="")
        print(f"{cpu / ceiling:7.2f} of the constant{tokens * cpu:9.0f} tokens/CPU-s")
    print(
        f"first byte of a stream, one client: {1000 * first:.2f} ms, constant {1000 * idle:.2f} ms"
    )


if __name__ == "__main__":
    main()
