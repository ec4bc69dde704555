"""What the HTTP and router process costs for each streamed token, through the whole server.

    python packages/engine/benches/bench_router.py [--seconds 10] [--streams 1 8 32] [--idle 256]

The server of the soak test: HTTP and router in one process, two prefill and two decode workers on
the toy runner below it, over sealed links. Prints tokens per second, the time to the first token,
and the processor time of the router for each token, which a busy machine distorts least. Then, in
turns, what requests take alone and beside connections that say nothing, half a header or half a
body.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SERVER = Path(__file__).parents[1] / "tests" / "support" / "soak_server.py"
TOKENS = 256
SHORT = 16
ROUNDS = 4


@dataclass
class Measured:
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(port: int, number: int, measured: Measured, tokens: int = TOKENS) -> None:
    """One answer, read with next to no work of this process."""
    words = " ".join(f"w{number}x{i}" for i in range(12))
    body = json.dumps({
        "model": "toy", "stream": True, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "messages": [{"role": "user", "content": words}],
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
    writer.write(head % len(body) + b"Connection: close\r\n\r\n" + body)
    reply = await reader.readuntil(b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200"), reply
    first = False
    while part := await reader.read(1 << 16):
        if not first and b"content" in part:
            first = True
            measured.firsts.append(time.perf_counter() - began)
    writer.close()
    measured.tokens += tokens
    measured.wholes.append(time.perf_counter() - began)


async def measure(port: int, streams: int, seconds: float) -> Measured:
    measured, end = Measured(), time.perf_counter() + seconds

    async def one(at: int) -> None:
        number = at
        while time.perf_counter() < end:
            await stream(port, number, measured)
            number += streams

    await asyncio.gather(*(one(at) for at in range(streams)))
    return measured


HALVES = (
    b"",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Half: ",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{",
)


def half_open(port: int, count: int) -> list[socket.socket]:
    """Connections of those who say nothing, or half of what they want."""
    found: list[socket.socket] = []
    for number in range(count):
        found.append(socket.create_connection(("127.0.0.1", port)))
        found[-1].sendall(HALVES[number % len(HALVES)])
    return found


def still_open(sockets: list[socket.socket]) -> int:
    count = 0
    for one in sockets:
        one.setblocking(False)
        try:
            count += one.recv(1) != b""
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


async def ask_in_turn(port: int, seconds: float, measured: Measured) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await stream(port, len(measured.wholes), measured, SHORT)


def beside(port: int, idle: int, seconds: float) -> None:
    """Print what short answers take, without and with idle connections, a few times in turns."""
    alone, crowded, held = Measured(), Measured(), []
    for _ in range(ROUNDS):
        asyncio.run(ask_in_turn(port, seconds / ROUNDS, alone))
        sockets = half_open(port, idle)
        asyncio.run(ask_in_turn(port, seconds / ROUNDS, crowded))
        held.append(still_open(sockets))
        for one in sockets:
            one.close()
    print(f"{SHORT} tokens, one client    median   95th   first token (median)  answers")
    for name, of in (("alone", alone), (f"beside {idle} half-open", crowded)):
        middle, late = statistics.median(of.wholes), statistics.quantiles(of.wholes, n=20)[-1]
        first, count = statistics.median(of.firsts), len(of.wholes)
        print(
            f"{name:22}{1000 * middle:8.1f} ms{1000 * late:6.1f} ms{1000 * first:9.1f} ms{count:14}"
        )
    print(f"still open at the end of the rounds: {held}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--idle", type=int, default=256)
    args = parser.parse_args()
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(SERVER)], stdin=pipe, stdout=pipe, text=True)
    port = int(process.stdout.readline().rpartition(":")[2])
    asyncio.run(measure(port, 2, 1.0))
    print("streams  tokens/s  first token  router CPU a token")
    for streams in args.streams:
        used, began = cpu_seconds(process.pid), time.perf_counter()
        measured = asyncio.run(measure(port, streams, args.seconds))
        cpu, wall = cpu_seconds(process.pid) - used, time.perf_counter() - began
        first = 1000 * statistics.median(measured.firsts)
        cost = 1e6 * cpu / measured.tokens
        print(f"{streams:7}{measured.tokens / wall:10.0f}{first:10.0f} ms{cost:17.0f} us")
    beside(port, args.idle, args.seconds)
    process.stdin.close()
    process.wait(60)


if __name__ == "__main__":
    main()
