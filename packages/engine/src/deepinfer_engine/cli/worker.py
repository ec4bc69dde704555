"""`deepinfer prefill`, `deepinfer decode` and `deepinfer encode`: one role in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import uvloop

from deepinfer_engine.cli.launch import (
    build_encoder,
    build_grammars,
    build_runner,
    build_store,
    engine_config,
    expert_group,
    model_identity,
)
from deepinfer_engine.cli.logs import setup_logging
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.pd.announcing import Announcing, WorkerRole
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

if TYPE_CHECKING:
    from deepinfer_engine.parallel.leader import ExpertGroup

Serve = Callable[..., Coroutine[Any, Any, None]]


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


def run_worker(role: WorkerRole, settings: Settings, listen: str) -> int:
    """Load the model, serve until SIGTERM, drain. The bound address is told on standard output."""
    if supervised():
        die_with_parent()
    setup_logging(settings.log_level)
    key = cluster_key_from_environ(os.environ)
    writes = None if role == "encode" else remote_writes(settings, listen)
    notify("loading", role=role, pid=os.getpid())

    def looked(trouble: str) -> None:
        if supervised():
            beat(trouble)

    def ready(address: str) -> None:
        notify("ready", role=role, pid=os.getpid(), address=address)

    with ExitStack() as stack:
        if role == "encode":
            serve = _encode(settings, listen)
        else:
            group = stack.enter_context(expert_group(settings))
            serve = partial(_step(role, settings, listen, group), writes=writes)
        uvloop.run(
            serve(
                cluster_key=key,
                identity=model_identity(settings),
                announcing=announcing(settings),
                looked=looked,
                ready=ready,
                drain_timeout_s=settings.drain_timeout_s,
            )
        )
    return 0


def _encode(settings: Settings, listen: str) -> Serve:
    from deepinfer_engine.pd.encode import serve_encode

    return partial(
        serve_encode,
        build_encoder(settings),
        listen,
        shares_memory=settings.transfer != "tcp",
        cache_bytes=settings.encode_cache_bytes,
        patches=settings.encode_patches,
    )


def _step(
    role: Literal["prefill", "decode"], settings: Settings, listen: str, group: ExpertGroup | None
) -> Serve:
    encoding = settings.encoded_by
    tower = encoding != "workers"
    runner = build_runner(settings, sees=role == "prefill", tower=tower, group=group)
    store = build_store(settings, runner, listen=listen)
    config = engine_config(settings, runner.layout.state_bytes)
    if role == "prefill":
        from deepinfer_engine.pd.prefill import serve_prefill

        way = settings.transfer
        return partial(
            serve_prefill,
            runner,
            store,
            listen,
            config=config,
            helpers=group,
            shares_memory=way != "tcp",
            loads_stored=way == "store",
            encoding=encoding,
        )
    from deepinfer_engine.pd.decode import serve_decode

    grammars = build_grammars(settings, runner)
    return partial(
        serve_decode, runner, store, listen, config=config, helpers=group, grammars=grammars
    )
