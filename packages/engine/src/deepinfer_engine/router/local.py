"""Engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from deepinfer_engine.backend.base import StepRunner
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.types import GenerateEvent, GenerateRequest
from deepinfer_engine.kv.store import PrefixStore
from deepinfer_engine.router.client import ModelInfo, WorkerStatus


class LocalEngine:
    """EngineClient on one runner in this process: prefill and decode, steps in their own thread."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        store: PrefixStore | None = None,
        config: EngineConfig | None = None,
        name: str = "local",
    ) -> None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...
    async def model_info(self) -> ModelInfo: ...
    async def status(self) -> list[WorkerStatus]: ...
    async def flush(self) -> None: ...
    async def close(self) -> None: ...
