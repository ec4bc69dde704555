"""`EngineClient`: how the HTTP server and the command line reach the engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from deepinfer_engine.core.types import GenerateEvent, GenerateRequest


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the router sees it now. `counters` only grow within an epoch, `gauges` are
    current."""

    name: str
    role: str
    """`prefill`, `decode` or `single`."""
    ready: bool
    detail: str = ""
    pid: int | None = None
    epoch: int = 0
    draining: bool = False
    """It takes nothing new; what it runs may end."""
    running: int = 0
    """Requests of this router that it has."""
    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    gauges: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the served engine can do; `max_model_len` bounds prompt + output tokens."""

    max_model_len: int
    vocab_size: int
    nextn: int
    layout_hash: str


@runtime_checkable
class Fleet(Protocol):
    """An engine whose workers come, go and can be emptied one by one."""

    def hear(self, body: bytes, signed: str) -> str:
        """The announcement of a worker; returns its address. Raises TransferError where it is not
        to be believed."""
        ...

    async def drain(self, worker: str, *, on: bool = True, move: bool = False) -> None:
        """Have a worker take nothing new, or with `on` False take requests again.

        move: what it runs goes on with others, from where it is. Raises RequestError for an
        unknown worker, EngineUnavailable where no other one could take its place.
        """
        ...


class EngineClient(Protocol):
    """Submit prompts, get tokens."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Yield TokensEvent... then one FinishEvent.

        Closing the iterator early (client gone) aborts the request everywhere within one step and
        frees its resources. Raises EngineUnavailable before the first event when no worker can take
        it, EngineLost mid-stream when the worker died, RequestError when the request can never be
        served.
        """
        ...

    async def model_info(self) -> ModelInfo: ...

    async def status(self) -> list[WorkerStatus]: ...

    async def problems(self) -> list[str]:
        """Pairs of workers that cannot serve a request together, and why."""
        ...

    async def flush(self) -> None:
        """Return when everything published so far would survive `kill -9` of every process."""
        ...

    async def close(self) -> None: ...
