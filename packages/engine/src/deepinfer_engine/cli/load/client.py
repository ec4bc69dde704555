"""Clients that run a workload against a server over HTTP, and what they saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from deepinfer_engine.cli.client import raise_for
from deepinfer_engine.cli.load.workload import Session, Turn, Words
from deepinfer_engine.cli.options import bearer
from deepinfer_engine.errors import EngineUnavailable

_TEXT = (
    "The quick brown fox jumps over the lazy dog while a small boat crosses the river; one, two, "
    "three bells ring at noon, and nobody in the old town of Lisbon knows why the lamp was green."
)
COUNTERS = {
    "answers": "deepinfer_requests_total",
    "prompt_tokens": "deepinfer_prompt_tokens_total",
    "cached_tokens": "deepinfer_cached_tokens_total",
    "output_tokens": "deepinfer_generated_tokens_total",
}
"""What client and server both count."""


@dataclass(slots=True)
class Seen:
    """One request. Times in seconds; `at` since the load began. `error` is empty for an answer that
    came whole. `gaps`: between the arrivals of its tokens."""

    at: float
    first: float | None = None
    whole: float = 0.0
    gaps: list[float] = field(default_factory=list[float])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what prompts for it are made of."""

    url: str
    headers: dict[str, str]
    model: str
    max_model_len: int
    words: Words


async def meet(url: str, api_key: str | None, model: str | None) -> Target:
    """Ask a server what it is. Raises EngineUnavailable, RequestError."""
    headers = bearer(api_key)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        try:
            models = await client.get("/v1/models")
            text = await client.post("/tokenize", json={"prompt": _TEXT})
        except httpx.HTTPError as exc:
            raise EngineUnavailable(f"no server answers at {url}: {exc}") from exc
    for answer in (models, text):
        raise_for(answer.status_code, answer.content)
    first = models.json()["data"][0]
    told = text.json()
    return Target(
        url, headers, model or first["id"], int(told["max_model_len"]), Words(told["tokens"])
    )


async def counted(target: Target) -> dict[str, float] | None:
    """The server's own counters; None where it does not tell them."""
    async with httpx.AsyncClient(base_url=target.url, headers=target.headers, timeout=30) as client:
        answer = await client.get("/metrics")
    if answer.status_code != 200:
        return None
    sums = dict.fromkeys(COUNTERS, 0.0)
    for line in answer.text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        for key, wanted in COUNTERS.items():
            if name == wanted:
                sums[key] += float(line.rpartition(" ")[2])
    return sums


class Load:
    """A workload in progress. `seen` grows as answers end."""

    def __init__(self, target: Target, told: Callable[[Seen], None] = lambda seen: None) -> None:
        self.target = target
        self.seen: list[Seen] = []
        self.cut = 0
        """Prompts that were shortened to the model's context."""
        self._told = told
        self._began = 0.0

    async def closed(self, sessions: Iterable[Session], concurrency: int) -> float:
        """So many sessions at a time, the next when one ends; returns the seconds it took."""
        waiting = iter(sessions)
        async with self._client() as client:

            async def worker() -> None:
                for session in waiting:
                    await self._session(client, session)

            self._began = time.monotonic()
            await asyncio.gather(*(worker() for _ in range(concurrency)))
        return time.monotonic() - self._began

    async def open(self, sessions: Sequence[Session], rate: float | None, seed: int) -> float:
        """Sessions begin at their own times, or at random with a rate a second, however many run.

        Returns the seconds it took.
        """
        chosen = random.Random(seed)
        at, starts = 0.0, list[float]()
        for session in sessions:
            if rate is not None:
                at += chosen.expovariate(rate)
            starts.append(at if rate is not None else session.at_s or 0.0)
        first = min(starts, default=0.0) if rate is None else 0.0
        async with self._client() as client:
            self._began = time.monotonic()

            async def later(session: Session, start: float) -> None:
                await asyncio.sleep(max(0.0, self._began + start - time.monotonic()))
                await self._session(client, session)

            await asyncio.gather(
                *(later(s, start - first) for s, start in zip(sessions, starts, strict=True))
            )
        return time.monotonic() - self._began

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(30.0, read=None, pool=None)
        target = self.target
        return httpx.AsyncClient(
            base_url=target.url, headers=target.headers, limits=limits, timeout=timeout
        )

    async def _session(self, client: httpx.AsyncClient, session: Session) -> None:
        before: tuple[int, ...] = ()
        for turn in session.turns:
            if turn.pause_s:
                await asyncio.sleep(turn.pause_s)
            tokens = (*before, *turn.tokens) if turn.grows else turn.tokens
            room = max(1, self.target.max_model_len - turn.output_tokens - 1)
            if len(tokens) > room:
                self.cut += 1
                tokens = tokens[:room]
            seen, answer = await self._request(client, turn, tokens)
            self.seen.append(seen)
            self._told(seen)
            if seen.error:
                return  # nothing follows an answer that did not come
            # An answer comes as text: of its tokens the number is kept, not which they were.
            before = (*tokens, *self.target.words.write(answer, seen.output_tokens))

    async def _request(
        self, client: httpx.AsyncClient, turn: Turn, tokens: Sequence[int]
    ) -> tuple[Seen, str]:
        body = {
            "model": self.target.model,
            "prompt": list(tokens),
            "max_tokens": turn.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent = time.monotonic()
        seen = Seen(sent - self._began)
        text: list[str] = []
        last = sent
        done = False
        try:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    seen.error = _code(reply.status_code, await reply.aread())
                    return seen, ""
                async for line in reply.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        done = True
                        break
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        seen.error = str(chunk["error"].get("code") or "error")
                        return seen, ""
                    if chunk["choices"]:
                        now = time.monotonic()
                        if seen.first is None:
                            seen.first = now - sent
                        else:
                            seen.gaps.append(now - last)
                        last = now
                        text.append(chunk["choices"][0]["text"])
                    _read_usage(seen, chunk.get("usage"))
        except httpx.HTTPError as exc:
            seen.error = type(exc).__name__
        finally:
            seen.whole = time.monotonic() - sent
        if not done and not seen.error:
            seen.error = "cut off"
        return seen, "".join(text)


def _read_usage(seen: Seen, usage: dict[str, Any] | None) -> None:
    if usage is not None:
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        seen.output_tokens = usage["completion_tokens"]


def _code(status: int, content: bytes) -> str:
    try:
        return f"{status} {json.loads(content)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return str(status)
