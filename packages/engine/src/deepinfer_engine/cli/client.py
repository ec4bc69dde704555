"""Chat Completions chunks, from a server over HTTP or from an engine in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from deepinfer_engine.cli.options import bearer
from deepinfer_engine.errors import EngineLost, EngineUnavailable, RequestError
from deepinfer_engine.settings import Settings

Body = dict[str, Any]
Chunks = AsyncGenerator[dict[str, Any], None]


@dataclass(frozen=True, slots=True)
class ChatSource:
    """`model` is the name to put into a body; `stream` yields its answer's chunks."""

    model: str
    stream: Callable[[Body], Chunks]


@asynccontextmanager
async def http_source(url: str, api_key: str | None) -> AsyncGenerator[ChatSource, None]:
    """A running server. Raises EngineUnavailable when there is none."""
    headers = bearer(api_key)
    timeout = httpx.Timeout(10.0, read=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout) as client:
        try:
            answer = await client.get("/v1/models")
        except httpx.HTTPError as exc:
            raise EngineUnavailable(f"no server answers at {url}: {exc}") from exc
        raise_for(answer.status_code, answer.content)
        models = answer.json()["data"]

        async def stream(body: Body) -> Chunks:
            try:
                async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                    if reply.status_code != 200:
                        raise_for(reply.status_code, await reply.aread())
                    async for line in reply.aiter_lines():
                        if line.startswith("data: ") and line != "data: [DONE]":
                            yield _checked(json.loads(line.removeprefix("data: ")))
            except httpx.HTTPError as exc:
                raise EngineLost(f"the connection to {url} broke: {exc}") from exc

        yield ChatSource(models[0]["id"], stream)


@asynccontextmanager
async def local_source(settings: Settings) -> AsyncGenerator[ChatSource, None]:
    """The model in this process, without a socket."""
    from deepinfer_engine.cli.launch import build_codec, launched_engine
    from deepinfer_engine.server.clock import SystemClock
    from deepinfer_engine.server.generation import Generation
    from deepinfer_engine.server.metrics import Metrics

    codec, metrics, clock = build_codec(settings), Metrics(), SystemClock()
    async with AsyncExitStack() as stack:
        alone = settings.model_copy(update={"single_process": True, "ep": 1, "prefill_ep": 1})
        engine = await stack.enter_async_context(launched_engine(alone))
        limit = (await engine.model_info()).max_model_len

        async def stream(body: Body) -> Chunks:
            prepared = codec.prepare("chat", json.dumps(body).encode(), limit)
            generation = Generation(engine, prepared, "chat", metrics, clock)
            async with aclosing(generation.events()) as batches:
                async for batch in batches:
                    for event in batch:
                        if event.data != "[DONE]":
                            yield _checked(json.loads(event.data))

        yield ChatSource(codec.model_names[0], stream)


def _checked(chunk: dict[str, Any]) -> dict[str, Any]:
    if "error" in chunk:
        raise EngineLost(str(chunk["error"].get("message", chunk["error"])))
    return chunk


def raise_for(status: int, content: bytes) -> None:
    """Nothing for 200; else RequestError, or EngineUnavailable, in the words of a server's error
    body."""
    if status == 200:
        return
    try:
        message = str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace") or "no body"
    kind = EngineUnavailable if status in (503, 529) else RequestError
    raise kind(f"the server answered {status}: {message}")
