"""The runner, cache and loop of an offline engine, in its own process or in each of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.device import Device
from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.runner import BLOCK_TOKENS, StepRunner
from deepinfer_engine.core.votes import VotePolicy
from deepinfer_engine.kv.connector import KVConnector
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.model.family import CacheQuant, ExpertLeader, ReplayMode
from deepinfer_engine.model.runner import build_runner

_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What `LLM` was asked for, with the model's directory."""

    directory: str
    dtype: str
    nextn: int | None
    cache_quant: str
    replay: str
    cache_dir: str | None
    prefix_cache_bytes: int
    max_num_seqs: int
    num_blocks: int | None
    device: str
    vote_policy: VotePolicy = "urgent"
    vision: bool = True
    batch_invariant: bool = False
    coupled: bool | None = None
    replay_keep: int | None = None

    def body(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(body: dict[str, Any]) -> EngineSpec:
        """Raises pydantic's ValidationError."""
        return TypeAdapter(EngineSpec).validate_python(body)

    @property
    def config(self) -> EngineConfig:
        """Nobody watches a stream here: prompts are read in large steps."""
        return EngineConfig(max_num_seqs=self.max_num_seqs, max_queue=_UNLIMITED, max_gap=0.0)

    @property
    def num_state_slots(self) -> int:
        return self.max_num_seqs + self.config.max_num_batched_tokens // BLOCK_TOKENS + 2


MakeLoop = Callable[..., EngineLoop]


def build_engine(
    spec: EngineSpec, make_loop: MakeLoop, leader: ExpertLeader | None = None, /, **options: Any
) -> tuple[StepRunner, KVConnector | None, EngineLoop]:
    """make_loop: called with the arguments of `EngineLoop` and `options`."""
    config = spec.config
    runner = build_runner(
        Path(spec.directory),
        dtype=spec.dtype,
        nextn=spec.nextn,
        num_blocks=spec.num_blocks,
        num_state_slots=spec.num_state_slots,
        cache_quant=cast("CacheQuant", spec.cache_quant),
        replay=cast("ReplayMode", spec.replay),
        keep=spec.replay_keep,
        device=Device.parse(spec.device),
        vision=spec.vision,
        batch_invariant=spec.batch_invariant,
        coupled=spec.coupled,
        group=leader,
    )
    store = None
    if spec.cache_dir is not None:
        from deepinfer_engine.adapters.kvtier import StoreSettings, open_store

        recovery = runner.caps.recovery("exact")
        store = open_store(StoreSettings(Path(spec.cache_dir), recovery=recovery), runner.layout)
    elif spec.prefix_cache_bytes:
        store = MemoryStore(runner.layout, limit_bytes=spec.prefix_cache_bytes)
    connector = None if store is None else KVConnector(store, runner)
    parking = HostParking(runner, config.park_bytes)
    loop = make_loop(runner, config, "both", parking=parking, link=connector, **options)
    return runner, connector, loop
