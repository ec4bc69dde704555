"""Engine over prefill and decode workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from deepinfer_engine.core.types import GenerateEvent, GenerateRequest
from deepinfer_engine.router.client import ModelInfo, WorkerStatus


class RemoteEngine:
    """EngineClient over prefill and decode workers."""

    @classmethod
    async def connect(
        cls,
        *,
        prefill: Sequence[str],
        decode: Sequence[str],
        cluster_key: bytes | None = None,
        ready_timeout_s: float = 0.0,
    ) -> RemoteEngine:
        """Links to "host:port" workers; each is (re)connected in the background with backoff.

        Waits up to `ready_timeout_s` until one prefill and one decode worker are there, then raises
        EngineUnavailable; 0 returns at once, and requests raise EngineUnavailable until they are.
        """
        return cls()

    def set_workers(self, *, prefill: Sequence[str], decode: Sequence[str]) -> None:
        """Replace the addresses (a restarted worker has another port)."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]: ...
    async def model_info(self) -> ModelInfo: ...
    async def status(self) -> list[WorkerStatus]: ...
    async def flush(self) -> None: ...
    async def close(self) -> None: ...
