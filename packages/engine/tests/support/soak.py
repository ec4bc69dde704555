"""Faults and rude clients against one server for a while; then what is left is counted.

    python packages/engine/tests/support/soak.py --seconds 600 --overlap

Workers are killed and stopped at random, those that encode pictures too; the router is spared.
Prompts and embeddings go through shared memory, what is cached is loaded by decode, streams move
between workers. Beside well-behaved
clients, whose every text is compared with the one from before, there are clients that leave, do not
read, send half headers and half bodies, prompts far too long and schemas that cost. With
`--overlap` both workers of a role may be away at once; without it one of them is always left, so
that nothing depends on how fast this machine starts processes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

from seeing_toy import SICK, SIDE, pixels

POLITE, RUDE = 6, 2
PROMPTS = 24
TOKENS = 48
BETWEEN_FAULTS = 8
"""Answers between two faults at least: how many a request meets is no matter of this machine's
speed. One that loses three workers without a token is given up, as the router promises."""
SERVER_TIMEOUT_S = 8
"""Of headers, bodies and readers: `soak_server.py` is told. The rude hold on for longer."""
HOLD_S = SERVER_TIMEOUT_S + 2


@dataclass
class Report:
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    badly_ended: int = 0
    """Streams without exactly one end."""
    hung: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    rude: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    """What the server said to those whose requests cost much."""
    cut: Counter[str] = field(default_factory=Counter)
    timed_out: Counter[str] = field(default_factory=Counter)
    """Connections that the server ended, by reason."""
    grammars: float = 0
    """Schemas that were compiled by the workers that are left."""
    leaked: dict[str, float] = field(default_factory=dict)
    rss_idle: int = 0
    rss_most: int = 0
    rss_end: int = 0
    migrations: float = 0
    shared_bytes: float = 0
    stored_bytes: float = 0
    """Of prompts, through shared memory and by decode from the cache; of the workers left."""
    encoded: float = 0
    """Pictures, and how many had to be asked for again elsewhere; of the workers left."""
    encoded_again: float = 0

    def problems(self) -> list[str]:
        found = [f"{name} is {value}" for name, value in self.leaked.items()]
        if self.wrong or self.badly_ended or self.hung:
            found.append(f"{self.wrong} wrong, {self.badly_ended} badly ended, {self.hung} hung")
        broken = sum(count for name, count in self.statuses.items() if " 500 " in name)
        if broken > max(1, 0.01 * self.statuses.total()):
            found.append(f"{broken} costly requests answered with 500")
        if len(self.failed) > max(1, 0.01 * (self.answered + len(self.failed))):
            found.append(f"{len(self.failed)} of {self.answered} failed: {self.failed[:3]}")
        if self.rss_end > 2 * self.rss_idle:
            found.append(f"the router grew from {self.rss_idle} to {self.rss_end} kB")
        return found


def rss_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(text.partition("VmRSS:")[2].split()[0])


def orphans_of(pid: int) -> list[str]:
    """Command lines of compilers that were left to the server, which takes over orphans."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            if int(parent) == pid and state != "Z" and "grammar.worker" in command:
                found.append(command)
    return found


def costly(fields: int, number: int) -> dict[str, Any]:
    """A short schema; its grammar takes most of a second a field, another one for each number."""
    pattern = f"([a-f]{{1,100}}x{number}y?){{1,90}}"
    names = [f"p{at}" for at in range(fields)]
    text = {"type": "string", "pattern": pattern}
    return {"type": "object", "properties": dict.fromkeys(names, text), "required": names[:1]}


@functools.cache
def picture(number: int, mark: bytes = b"") -> dict[str, Any]:
    """A part of a message."""
    out = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), pixels(number, mark)).save(out, "PNG")
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def body_of(number: int, *, stream: bool, **more: Any) -> dict[str, Any]:
    """A third of them has one or two pictures."""
    words = " ".join(f"word{number}x{i}" for i in range(number % 40 + 1))
    content: Any = words
    if number % 3 == 0:
        seen = [picture(number + i) for i in range(1 + number % 2)]
        content = [*seen, {"type": "text", "text": words}]
    return {
        "model": "toy",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }


class Soak:
    def __init__(self, url: str, pid: int, seed: int, overlap: bool) -> None:
        self.url = url
        self.overlap = overlap
        self.answered_at_fault = -BETWEEN_FAULTS
        self.broken: dict[str, int] = {}
        """Workers that were ended and are not back yet: address and process."""
        self.pid = pid
        self.random = random.Random(seed)
        self.report = Report()
        self.expected: dict[int, str] = {}
        self.over = False
        self.client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(
            max_connections=64, max_keepalive_connections=0))  # fmt: skip

    async def run(self, seconds: float) -> Report:
        for number in range(PROMPTS):
            self.expected[number] = await self._ask(number, stream=bool(number % 2))
        self.report.rss_idle = rss_kb(self.pid)
        polite = [asyncio.create_task(self._polite()) for _ in range(POLITE)]
        others = [
            asyncio.create_task(self._repeat(call))
            for call in (
                self._leaves, self._does_not_read, self._half_header, self._half_body,
                self._far_too_long,
            )
            for _ in range(RUDE)
        ]  # fmt: skip
        others += [
            asyncio.create_task(self._repeat(call))
            for call in (
                self._refused_schema,
                self._costly_schema,
                self._leaves_a_costly_schema,
                self._sick_picture,
            )
        ]
        breaks = asyncio.create_task(self._break_workers())
        await asyncio.sleep(seconds)
        self.over = True
        await asyncio.wait({breaks, *others}, timeout=60)
        _, late = await asyncio.wait(polite, timeout=120)
        self.report.hung += len(late)
        for task in [breaks, *others, *polite]:
            task.cancel()
        results = await asyncio.gather(breaks, *others, *polite, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        await self._settle()
        await self.client.aclose()
        return self.report

    # -- those who behave -----------------------------------------------------------------------

    async def _polite(self) -> None:
        report = self.report
        while not self.over:
            number, stream = self.random.randrange(PROMPTS), self.random.random() < 0.5
            try:
                text = await self._ask(number, stream=stream)
            except (httpx.HTTPError, RuntimeError) as error:
                report.failed.append(repr(error)[:300])
                await asyncio.sleep(0.5)
                continue
            report.answered += 1
            report.wrong += text != self.expected[number]

    async def _ask(self, number: int, *, stream: bool) -> str:
        body = body_of(number, stream=stream)
        if self.random.random() < 0.5:
            body["user"] = f"user {self.random.randrange(10**9)}"  # nothing is cached for a new one
        if not stream:
            reply = await self.client.post("/v1/chat/completions", json=body)
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code} {reply.text}")
            value = reply.json()
            if "error" in value:
                raise RuntimeError(str(value["error"]))
            message = value["choices"][0]["message"]
            return f"{message.get('reasoning_content') or ''}|{message.get('content') or ''}"
        said, ends = {"reasoning_content": "", "content": ""}, 0
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code} {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    ends += 1
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    for choice in event["choices"]:
                        for part in said:
                            said[part] += choice["delta"].get(part) or ""
        self.report.badly_ended += ends != 1
        return f"{said['reasoning_content']}|{said['content']}"

    # -- those who do not -----------------------------------------------------------------------

    async def _repeat(self, call: Any) -> None:
        while not self.over:
            name = call.__name__.strip("_")
            self.report.rude[name] += 1
            try:
                await call()
            except (httpx.HTTPError, OSError) as error:
                # They are refused, or cut off: as it should be.
                self.report.cut[f"{name} {type(error).__name__}"] += 1
            await asyncio.sleep(self.random.random())

    async def _leaves(self) -> None:
        body = body_of(self.random.randrange(PROMPTS), stream=True, max_tokens=400)
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
            events = self.random.randrange(6)
            async for _ in reply.aiter_lines():
                events -= 1
                if events < 0:
                    return

    async def _raw(self, data: bytes, seconds: float) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        sock = socket.create_connection((host, int(port)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            sock.sendall(data)
            await asyncio.sleep(seconds)
        finally:
            sock.close()

    async def _does_not_read(self) -> None:
        body = json.dumps(body_of(3, stream=True, max_tokens=1500, logprobs=True, top_logprobs=20))
        await self._raw(_head(len(body)) + body.encode(), HOLD_S)

    async def _half_header(self) -> None:
        await self._raw(_head(10)[:60], HOLD_S)

    async def _half_body(self) -> None:
        await self._raw(_head(1000) + b'{"model": ', HOLD_S)

    async def _far_too_long(self) -> None:
        body = body_of(1, stream=False)
        body["messages"][0]["content"] = "fox " * 500_000
        self._count(await self.client.post("/v1/chat/completions", json=body))

    def _count(self, reply: httpx.Response) -> None:
        code = "" if reply.status_code == 200 else str(reply.json()["error"]["code"])
        self.report.statuses[f"{reply.request.url.path} {reply.status_code} {code}"] += 1

    async def _ask_with(self, schema: dict[str, Any]) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {**body_of(2, stream=False, response_format=form), "ignore_eos": False}
        body["thinking"] = {"type": "disabled"}
        self._count(await self.client.post("/v1/chat/completions", json=body))

    async def _sick_picture(self) -> None:
        """No encode worker can encode it."""
        body = body_of(4, stream=False, max_tokens=4)
        body["messages"][0]["content"] = [picture(self.random.randrange(10**6), SICK)]
        self._count(await self.client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(1)

    async def _refused_schema(self) -> None:
        """More steps than are taken at all."""
        await self._ask_with({"type": "string", "pattern": "(a{1,3000}z{1,3000}){1,3000}"})
        await asyncio.sleep(1)

    async def _costly_schema(self) -> None:
        """Up to seconds of a compiler, which is killed when the time is over."""
        await self._ask_with(costly(self.random.randint(0, 9), self.random.randrange(10**6)))
        await asyncio.sleep(2 * self.random.random())

    async def _leaves_a_costly_schema(self) -> None:
        try:
            async with asyncio.timeout(2 * self.random.random()):
                await self._costly_schema()
        except TimeoutError:
            await asyncio.sleep(3)

    async def _break_workers(self) -> None:
        while not self.over:
            await asyncio.sleep(2 + 4 * self.random.random())
            if self.report.answered - self.answered_at_fault < BETWEEN_FAULTS:
                continue
            health = (await self.client.get("/health")).json()
            for worker in health["workers"]:
                if worker["ready"] and worker["pid"] != self.broken.get(worker["name"]):
                    self.broken.pop(worker["name"], None)
            workers = [w for w in health["workers"] if w["pid"] and self._may_break(w, health)]
            if not workers:
                continue
            kind = self.random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            worker = self.random.choice(workers)
            try:
                os.kill(worker["pid"], kind)
            except ProcessLookupError:
                continue
            self.answered_at_fault = self.report.answered
            self.broken[worker["name"]] = worker["pid"]
            self.report.faults[f"{kind.name} {worker['role']}"] += 1
            self.report.rss_most = max(self.report.rss_most, rss_kb(self.pid))

    def _may_break(self, worker: dict[str, Any], health: dict[str, Any]) -> bool:
        """Whether another of its role is there to go on with what it has."""
        if self.overlap:
            return True
        alike = [w for w in health["workers"] if w["role"] == worker["role"] and w is not worker]
        return worker["name"] not in self.broken and any(
            w["ready"] and w["name"] not in self.broken for w in alike
        )

    # -- what is left ---------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Wait until everybody is back and idle; what never gets there is a leak."""
        left: dict[str, float] = {}
        for _ in range(240):
            await asyncio.sleep(0.5)
            left = await self._left()
            if not left:
                break
        self.report.leaked = left
        self.report.rss_end = rss_kb(self.pid)

    async def _left(self) -> dict[str, float]:
        health = (await self.client.get("/health")).json()
        values: Counter[str] = Counter()
        ended = "deepinfer_http_connections_ended_total"
        for line in (await self.client.get("/metrics")).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name.partition("{")[0]] += float(value)
                if name.startswith(ended):
                    self.report.timed_out[name.removeprefix(ended)] = int(float(value))
        worker = "deepinfer_worker_"
        self.report.migrations = values[worker + "router_migrations_total"]
        self.report.shared_bytes = values[worker + "transfer_shared_bytes_total"]
        self.report.stored_bytes = values[worker + "transfer_stored_bytes_total"]
        self.report.encoded = values[worker + "encode_pictures_total"]
        self.report.encoded_again = values[worker + "pictures_failed_total"]
        self.report.grammars = values[worker + "grammar_compilations_total"]
        left = {
            "workers away": 6.0 - sum(w["ready"] for w in health["workers"]),
            "requests in flight": health["in_flight"],
            "blocks": values[worker + "blocks_capacity"] - values[worker + "blocks_free"],
            "state slots": values[worker + "state_slots_capacity"]
            - values[worker + "state_slots_free"],
            "router load": values[worker + "router_load_tokens"],
            "body bytes": values["deepinfer_http_body_bytes"],
            "compilers without a worker": float(len(orphans_of(self.pid))),
            "pictures that wait": values[worker + "encode_asks"],
            "pixels held": values[worker + "encode_pixel_bytes_held"],
            "embeddings held": values[worker + "picture_bytes_held"],
            "prompts with pictures": values[worker + "picture_prompts"],
            "grammars that wait": values[worker + "grammar_queue"],
        }
        return {name: value for name, value in left.items() if value}


def _head(length: int) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % length
    )


def soak(seconds: float, seed: int = 1, *, overlap: bool = False) -> Report:
    """Start the server, run, end it."""
    script = str(Path(__file__).parent / "soak_server.py")
    process = subprocess.Popen(
        [sys.executable, script, str(SERVER_TIMEOUT_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().strip()
        assert url, "the server did not start"
        return asyncio.run(Soak(url, process.pid, seed, overlap).run(seconds))
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overlap", action="store_true", help="both of a role may be away")
    args = parser.parse_args()
    report = soak(args.seconds, args.seed, overlap=args.overlap)
    for name, value in vars(report).items():
        told = f"{len(value)}, the first: {value[:3]}" if isinstance(value, list) else value
        print(f"{name:12} {told}")
    problems = report.problems()
    print("\n".join(problems) or "held")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
