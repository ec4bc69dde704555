"""`deepinfer prefill` and `deepinfer decode`: one role in this process."""

from __future__ import annotations

import os
from functools import partial
from typing import Literal

import uvloop

from deepinfer_engine.cli.launch import (
    build_grammars,
    build_runner,
    build_store,
    engine_config,
    expert_group,
    model_identity,
)
from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.pd.announcing import Announcing
from deepinfer_engine.pd.remote_writes import RemoteWrites
from deepinfer_engine.pd.supervise import (
    beat,
    cluster_key_from_environ,
    die_with_parent,
    notify,
    supervised,
)
from deepinfer_engine.pd.transport import parse_address
from deepinfer_engine.settings import Settings


def announcing(settings: Settings) -> Announcing | None:
    """The routers that a worker registers with, if there are any."""
    if not settings.register_at:
        return None
    return Announcing(settings.register_at, settings.advertise)


def remote_writes(settings: Settings, listen: str) -> RemoteWrites | None:
    """What --transfer mooncake moves units with. Raises ConfigError."""
    if settings.transfer != "mooncake":
        return None
    if not settings.trust_transfer_network:
        raise ConfigError(
            "--transfer mooncake moves prompts' KV without asking for a key and unsealed, and its "
            "library listens on every interface: where all who reach this machine are trusted, say "
            "--trust-transfer-network; else leave --transfer out"
        )
    host, _ = parse_address(settings.advertise or listen)
    return RemoteWrites(host, rdma=settings.transfer_rdma)


def run_worker(role: Literal["prefill", "decode"], settings: Settings, listen: str) -> int:
    """Load the model, serve until SIGTERM, drain. The bound address is told on standard output."""
    if supervised():
        die_with_parent()
    setup_logging(settings.log_level)
    key = cluster_key_from_environ(os.environ)
    writes = remote_writes(settings, listen)
    notify("loading", role=role, pid=os.getpid())
    with expert_group(settings) as group:
        runner = build_runner(settings, tower=role == "prefill", group=group)
        store = build_store(settings, runner, listen=listen)
        if role == "prefill":
            from deepinfer_engine.pd.prefill import serve_prefill

            way = settings.transfer
            serve = partial(serve_prefill, shares_memory=way != "tcp", loads_stored=way == "store")
        else:
            from deepinfer_engine.pd.decode import serve_decode

            serve = partial(serve_decode, grammars=build_grammars(settings, runner))
        uvloop.run(
            serve(
                runner,
                store,
                listen,
                config=engine_config(settings, runner.layout.state_bytes),
                cluster_key=key,
                identity=model_identity(settings),
                helpers=group,
                announcing=announcing(settings),
                writes=writes,
                looked=beat if supervised() else lambda trouble: None,
                ready=lambda address: notify("ready", role=role, pid=os.getpid(), address=address),
                drain_timeout_s=settings.drain_timeout_s,
            )
        )
    return 0
