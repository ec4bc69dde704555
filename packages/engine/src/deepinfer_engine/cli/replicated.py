"""`--dp`: one engine whose requests run in several processes that share a model's experts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from deepinfer_engine.cli.launch import (
    build_grammars,
    build_runner,
    build_store,
    engine_config,
    model_dir,
)
from deepinfer_engine.core.votes import Vote
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.offline.build import EngineSpec
from deepinfer_engine.offline.replicas import DEADLINE_S, ReplicaLoop, replica_group
from deepinfer_engine.parallel.ballot import GlooBallot
from deepinfer_engine.router.client import EngineClient
from deepinfer_engine.router.local import LocalEngine
from deepinfer_engine.settings import Settings


@asynccontextmanager
async def replicated(settings: Settings) -> AsyncGenerator[EngineClient, None]:
    """The engine of one process over `dp` of them: this is the first, and hears of all requests.

    From the main thread, with which the others end. Raises ConfigError, EngineLost."""
    if settings.overlap:
        raise ConfigError("dp: steps that are voted on are not planned ahead; leave out overlap")
    group = replica_group(_spec(settings), settings.dp, DEADLINE_S, settings.threads)
    try:
        runner = await asyncio.to_thread(build_runner, settings, group=group)
        engine = LocalEngine(
            runner,
            store=build_store(settings, runner),
            config=engine_config(settings, runner.layout.state_bytes),
            grammars=build_grammars(settings, runner),
            make_loop=partial(
                ReplicaLoop, ballot=GlooBallot(), vote=Vote(settings.dp, "urgent"), group=group
            ),
        )
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        group.close()


def _spec(settings: Settings) -> EngineSpec:
    """What the other processes of `dp` run. Of caches they keep what one directory, or their
    memory, holds."""
    plain = settings.cache and settings.cache_local and settings.cache_secret_file is None
    alone = not (settings.cache_shared or settings.cache_tiers or settings.cache_location)
    return EngineSpec(
        directory=str(model_dir(settings)),
        dtype=settings.dtype,
        nextn=settings.nextn,
        cache_quant=settings.cache_quant,
        replay=settings.replay,
        cache_dir=str(settings.cache_dir) if plain and alone else None,
        prefix_cache_bytes=settings.cache_memory_bytes if settings.cache else 0,
        max_num_seqs=settings.max_num_seqs,
        num_blocks=settings.num_blocks,
        device=settings.device,
        batch_invariant=settings.batch_invariant,
        coupled=settings.coupled,
        replay_keep=settings.replay_keep,
    )
