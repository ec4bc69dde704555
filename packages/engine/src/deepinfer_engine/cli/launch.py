"""Building what a command runs on: a runner, an engine in this process, or workers in others."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from deepinfer_engine.core.config import ALL_WINDOWS, EngineConfig
from deepinfer_engine.core.device import Device
from deepinfer_engine.core.runner import BLOCK_TOKENS
from deepinfer_engine.errors import ConfigError, ConstraintsUnavailable
from deepinfer_engine.pd.announcing import WORKER_ROLES, WorkerRole
from deepinfer_engine.pd.peers import ModelIdentity
from deepinfer_engine.pd.supervise import (
    CLUSTER_KEY_ENV,
    ChildSpec,
    Supervisor,
    cluster_key_from_environ,
)
from deepinfer_engine.pd.transport import check_key, is_loopback
from deepinfer_engine.settings import Settings, split_address

if TYPE_CHECKING:
    from deepinfer_engine.adapters.kvtier import WindowExchange
    from deepinfer_engine.codec.recipe_codec import RecipeCodec
    from deepinfer_engine.core.grammars import GrammarCompiler
    from deepinfer_engine.core.prefix_store import PrefixStore
    from deepinfer_engine.core.runner import StepRunner
    from deepinfer_engine.core.web_search import WebSearch
    from deepinfer_engine.model.encoder import PictureEncoder
    from deepinfer_engine.parallel.leader import ExpertGroup
    from deepinfer_engine.router.client import EngineClient

log = logging.getLogger(__name__)


# What a worker needs to know; the rest of the settings is the HTTP process's business.
_WORKER_SETTINGS = (
    "model",
    "device",
    "dtype",
    "cache_quant",
    "replay",
    "replay_keep",
    "nextn",
    "max_num_seqs",
    "max_num_batched_tokens",
    "overlap",
    "coupled",
    "batch_invariant",
    "num_blocks",
    "threads",
    "xgrammar_timeout",
    "xgrammar_cache_limit_bytes",
    "cache",
    "cache_dir",
    "cache_local",
    "cache_shared",
    "cache_location",
    "cache_tiers",
    "cache_secret_file",
    "cache_memory_bytes",
    "prefill_rate",
    "persist_state",
    "window_recovery",
    "window_memory_bytes",
    "window_ttl_s",
    "window_exchange",
    "window_listen",
    "window_directory",
    "window_deadline_ms",
    "vision",
    "ep",
    "ep_redundant",
    "ep_rebalance_steps",
    "ep_timeout_s",
    "transfer",
    "transfer_rdma",
    "trust_transfer_network",
    "drain_timeout_s",
    "log_level",
)
_PREFILL_SETTINGS = (*_WORKER_SETTINGS, "ttft_target_ms", "encoding")
_DECODE_SETTINGS = (*_WORKER_SETTINGS, "token_target_ms")
# It has a tower, and neither a cache nor a grammar.
_ENCODE_SETTINGS = (
    "model",
    "device",
    "dtype",
    "batch_invariant",
    "threads",
    "transfer",
    "encode_cache_bytes",
    "encode_patches",
    "drain_timeout_s",
    "log_level",
)
_SETTINGS = {"prefill": _PREFILL_SETTINGS, "decode": _DECODE_SETTINGS, "encode": _ENCODE_SETTINGS}
_FLAGS = {"cache_tiers": "--cache-tier"}
# Flags with a form for yes, too; the others are there for no alone.
_TOLD_EITHER_WAY = frozenset(
    {
        "overlap",
        "coupled",
        "batch_invariant",
        "cache_local",
        "cache_shared",
        "window_exchange",
        "trust_transfer_network",
    }
)


def model_dir(settings: Settings) -> Path:
    """The checkpoint directory; the embedded one when none is named."""
    from deepinfer_engine.model.names import model_directory

    return model_directory(settings.model)


_SAMPLE_BYTES = 64 * 1024


def model_identity(settings: Settings) -> ModelIdentity:
    """What workers compare: a digest over the checkpoint's files (name, size, both ends of each),
    and the arithmetic. Reading every weight would take as long as loading it again."""
    digest = hashlib.sha256()
    for path in sorted(p for p in model_dir(settings).iterdir() if p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            if size > _SAMPLE_BYTES:
                file.seek(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return ModelIdentity(digest.hexdigest()[:16], settings.dtype)


@asynccontextmanager
async def opened_search(settings: Settings) -> AsyncGenerator[WebSearch | None, None]:
    """The web search that the settings name, while the body runs. Raises ConfigError."""
    if settings.search is None:
        yield None
        return
    try:
        from deepinfer_engine.adapters.search_fetch import open_search
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"search needs {exc.name}, which is not installed: pip install "
            "./packages/search_fetch './packages/engine[search]'"
        ) from exc
    async with open_search(settings.search, settings.search_home, os.environ) as web:
        yield web


def build_codec(
    settings: Settings, *, serves: bool = False, web: WebSearch | None = None
) -> RecipeCodec:
    """The prompt codec with the checkpoint's tokenizer. No torch.

    One that `serves` also opens the store of responses and takes the keys of sealed reasoning.
    """
    directory = model_dir(settings)
    from deepinfer_engine.codec.choose import open_codec
    from deepinfer_engine.codec.recipe_codec import PicturePolicy
    from deepinfer_engine.codec.responses import open_responses, read_sealer

    policy = None
    if settings.vision:
        policy = PicturePolicy(settings.max_images, fetches_urls=settings.fetch_images)
    return open_codec(
        directory,
        settings.model_names,
        own_defaults=settings.generation_config,
        default_thinking=settings.default_thinking,
        pictures=policy,
        responses=open_responses(settings.responses_store) if serves else None,
        sealer=read_sealer(os.environ) if serves else None,
        web=web,
    )


def num_state_slots(settings: Settings) -> int:
    """One for each sequence, one for each snapshot of a prefill step, and the scratch slot."""
    return settings.max_num_seqs + settings.max_num_batched_tokens // BLOCK_TOKENS + 2


def build_runner(
    settings: Settings,
    *,
    sees: bool = True,
    tower: bool = True,
    group: ExpertGroup | None = None,
) -> StepRunner:
    """Load the checkpoint and allocate its pools; imports torch.

    sees: False for a decode worker, which never gets a picture. tower: False where others encode
    them. group: see `expert_group`.
    """
    directory = model_dir(settings)
    import torch

    from deepinfer_engine.model import runner as backend

    threads = settings.threads if group is None else group.threads
    if threads is not None:
        torch.set_num_threads(threads)
    return backend.build_runner(
        directory,
        dtype=settings.dtype,
        nextn=settings.nextn,
        num_blocks=settings.num_blocks,
        num_state_slots=num_state_slots(settings),
        cache_quant=settings.cache_quant,
        replay=settings.replay,
        keep=settings.replay_keep,
        vision=settings.vision and sees,
        tower=tower,
        device=Device.parse(settings.device),
        group=group,
        coupled=settings.coupled,
        batch_invariant=settings.batch_invariant,
    )


def build_encoder(settings: Settings) -> PictureEncoder:
    """The vision tower of the checkpoint alone; imports torch. Raises as `build_runner`."""
    directory = model_dir(settings)
    import torch

    from deepinfer_engine.model import encoder

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return encoder.build_encoder(
        directory,
        dtype=settings.dtype,
        device=Device.parse(settings.device),
        batch_invariant=settings.batch_invariant,
    )


@contextmanager
def expert_group(settings: Settings) -> Generator[ExpertGroup | None]:
    """The other processes of a worker with `ep` above 1, while the body runs; else None.

    From the main thread: they end when the thread does that started them. Raises ConfigError.
    """
    if settings.ep == 1:
        yield None
        return
    from deepinfer_engine.parallel.leader import ExpertGroup, threads_each
    from deepinfer_engine.parallel.messages import Balancing, Setup

    spare = settings.ep if settings.ep_redundant is None else settings.ep_redundant
    group = ExpertGroup(
        Setup(
            rank=0,
            size=settings.ep,
            model=str(model_dir(settings)),
            dtype=settings.dtype,
            cache_quant=settings.cache_quant,
            replay=settings.replay,
            keep=settings.replay_keep,
            num_blocks=settings.num_blocks,
            num_slots=num_state_slots(settings),
            threads=threads_each(settings.ep, settings.threads),
            store="",
            deadline_s=settings.ep_timeout_s,
            pools={},
            balancing=Balancing(settings.ep_rebalance_steps, spare),
            batch_invariant=settings.batch_invariant,
        )
    )
    try:
        yield group
    finally:
        group.close()


def build_store(
    settings: Settings, runner: StepRunner, *, listen: str | None = None
) -> PrefixStore | None:
    """The prompt cache, None when it is switched off.

    listen: of a worker that others may pull windows from; None for an engine that is alone.
    """
    if not settings.cache:
        return None
    from deepinfer_engine.adapters.kvtier import StoreSettings, open_store

    directory = settings.cache_dir if settings.cache_local else None
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as exc:
            raise ConfigError(
                f"cannot create the cache directory {directory}: {exc.strerror}; "
                "choose another with --cache-dir, or --no-cache"
            ) from exc
    return open_store(
        StoreSettings(
            directory,
            shared=settings.cache_shared,
            location=settings.cache_location,
            tiers=settings.cache_tiers,
            secret=read_cache_secret(settings.cache_secret_file),
            memory_bytes=settings.cache_memory_bytes,
            window_bytes=settings.window_memory_bytes,
            window_ttl_s=settings.window_ttl_s,
            recovery=runner.caps.recovery(settings.window_recovery),
            prefill_rate=settings.prefill_rate,
            exchange=None if listen is None else window_exchange(settings, listen),
        ),
        runner.layout,
    )


_SECRET_BYTES = 32


def read_cache_secret(path: Path | None) -> bytes | None:
    """The 32 bytes of a secret file: 64 hexadecimal digits. Raises ConfigError."""
    if path is None:
        return None
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cache_secret_file {path}: wanted 64 hexadecimal digits: {exc}") from exc
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(f"cache_secret_file {path}: wanted 64 hexadecimal digits")
    return secret


def window_exchange(settings: Settings, listen: str) -> WindowExchange | None:
    """How a worker and its peers find each other's windows; None where they must not.

    Its bytes are authenticated and not sealed, so beyond this machine it is asked for by address,
    and wants the cluster key. Raises ConfigError.
    """
    from deepinfer_engine.adapters.kvtier import WindowExchange, shared_key

    if not settings.window_exchange:
        return None
    own = settings.window_listen
    if own is None:
        if not is_loopback(split_address(listen)[0]):
            log.info("windows are not exchanged: name the address with window_listen")
            return None
        own = "127.0.0.1:0"
    key = cluster_key_from_environ(os.environ)
    check_key(split_address(own)[0], key)
    return WindowExchange(
        # Without a key all peers are on this machine, where a digest has to be known as well.
        key=shared_key(key or b"this machine", "windows"),
        listen=own,
        directory=settings.window_directory,
        deadline_s=settings.window_deadline_ms / 1000,
    )


def build_grammars(settings: Settings, runner: StepRunner) -> GrammarCompiler | None:
    """The compiler of constraints, None where xgrammar is not installed. Loads nothing yet."""
    from deepinfer_engine.codec.choose import open_grammars

    try:
        return open_grammars(
            model_dir(settings),
            runner.caps.vocab_size,
            timeout_s=settings.xgrammar_timeout,
            cache_bytes=settings.xgrammar_cache_limit_bytes,
        )
    except ConstraintsUnavailable as exc:
        log.info("answers are not held to schemas: %s", exc)
        return None


def engine_config(settings: Settings, state_bytes: int = 0) -> EngineConfig:
    """The scheduler's part of the settings; `state_bytes`: of one window state of the model."""
    return EngineConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_gap=settings.max_gap,
        token_target_s=(settings.token_target_ms or 0.0) / 1000,
        ttft_target_s=(settings.ttft_target_ms or 0.0) / 1000,
        overlap=settings.overlap,
        persist_state=settings.persisted_states,
        prompt_windows=_prompt_windows(settings, state_bytes),
    )


# Of the memory for windows, what the borders of one prompt may fill.
_PROMPT_SHARE = 8


def _prompt_windows(settings: Settings, state_bytes: int) -> int:
    """Borders at the end of a prompt whose windows are kept: all where all are stored, else as
    many as leave the windows of other prompts in memory."""
    if settings.persisted_states == "all" or not state_bytes:
        return ALL_WINDOWS
    return max(2, settings.window_memory_bytes // _PROMPT_SHARE // state_bytes)


def worker_argv(role: str, settings: Settings) -> list[str]:
    """The command line of one worker, complete but for `--listen`."""
    argv = [sys.executable, "-m", "deepinfer_engine.cli.main", role]
    for name in _SETTINGS[role]:
        value = settings.encoded_by if name == "encoding" else getattr(settings, name)
        if name == "ep" and role == "prefill":
            value = settings.prefill_ep
        if name == "model" and value is not None:
            value = model_dir(settings)  # resolved once, for all
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        if isinstance(value, bool):
            off = [] if value else [f"--no-{flag.removeprefix('--')}"]
            argv += [flag] if value and name in _TOLD_EITHER_WAY else off
        elif isinstance(value, tuple):
            argv += [text for one in value for text in (flag, str(one))]
        elif value is not None:
            argv += [flag, str(value)]
    return argv


def worker_roles(settings: Settings) -> dict[str, WorkerRole]:
    """Name -> role of the workers that a server of its own starts."""
    roles: dict[str, WorkerRole] = {}
    wanted: tuple[tuple[WorkerRole, int], ...] = (
        ("prefill", settings.prefill_workers),
        ("decode", settings.decode_workers),
        ("encode", settings.encode_workers),
    )
    for role, number in wanted:
        for i in range(1, number + 1):
            roles[role if number == 1 else f"{role}-{i}"] = role
    return roles


@asynccontextmanager
async def launched_engine(
    settings: Settings,
    on_notice: Callable[[str, dict[str, Any]], None] = lambda name, notice: None,
) -> AsyncGenerator[EngineClient, None]:
    """The engine these settings describe: in process, over given workers, or over workers of its
    own.
    """
    given = settings.prefill or settings.decode or settings.finds_workers
    own = not (settings.single_process or given)
    if max(settings.ep, settings.prefill_ep) > 1 and not own:
        raise ConfigError(
            f"ep {settings.ep} and prefill_ep {settings.prefill_ep} are about workers that this "
            "server starts: leave out single_process, prefill and decode, or give --ep to "
            "`deepinfer prefill` and `deepinfer decode`"
        )
    if settings.encode_workers and not (own and settings.vision):
        raise ConfigError(
            f"encode_workers {settings.encode_workers} are workers that this server starts for "
            "pictures: leave out single_process, prefill, decode and no_vision, or start "
            "`deepinfer encode` and name it with --encode"
        )
    if settings.dp > 1 and not settings.single_process:
        raise ConfigError(
            f"dp {settings.dp} is about one process: add --single-process, or give --ep to "
            "workers, whose processes share experts too"
        )
    if settings.dp > 1:
        from deepinfer_engine.cli.replicated import replicated

        async with replicated(settings) as engine:
            yield engine
    elif settings.single_process:
        async with _local(settings) as engine:
            yield engine
    elif given:
        async with _over_workers(settings) as engine:
            yield engine
    else:
        async with _with_children(settings, on_notice) as engine:
            yield engine


@asynccontextmanager
async def _local(settings: Settings) -> AsyncGenerator[EngineClient, None]:
    from deepinfer_engine.router.local import LocalEngine

    runner = await asyncio.to_thread(build_runner, settings)
    engine = LocalEngine(
        runner,
        store=build_store(settings, runner),
        config=engine_config(settings, runner.layout.state_bytes),
        grammars=build_grammars(settings, runner),
    )
    try:
        yield engine
    finally:
        await engine.close()


class _FirstTokens(TypedDict):
    ttft_shed_s: float | None
    ttft_target_s: float | None


def _first_tokens(settings: Settings) -> _FirstTokens:
    """What the router is told of them."""
    target = settings.ttft_target_ms
    return {
        "ttft_shed_s": settings.ttft_shed_s,
        "ttft_target_s": None if target is None else target / 1000,
    }


@asynccontextmanager
async def _over_workers(settings: Settings) -> AsyncGenerator[EngineClient, None]:
    from deepinfer_engine.router.remote import RemoteEngine

    if settings.finds_workers:
        async with _over_found_workers(settings) as engine:
            yield engine
        return
    if not (settings.prefill and settings.decode):
        raise ConfigError("wanted both --prefill and --decode addresses, got only one of them")
    engine = await RemoteEngine.connect(
        prefill=settings.prefill,
        decode=settings.decode,
        encode=settings.encode,
        cluster_key=cluster_key_from_environ(os.environ),
        ready_timeout_s=settings.start_timeout_s,
        **_first_tokens(settings),
    )
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _over_found_workers(settings: Settings) -> AsyncGenerator[EngineClient, None]:
    """Over workers that come and go; the server listens before the first of them is there."""
    from deepinfer_engine.router.discovery import Announced, Directory
    from deepinfer_engine.router.remote import RemoteEngine

    key = cluster_key_from_environ(os.environ)
    if settings.accept_workers and key is None:
        raise ConfigError(
            "accept_workers wants DEEPINFER_CLUSTER_KEY, which the workers sign with: 64 "
            "hexadecimal digits, `openssl rand -hex 32`"
        )
    directory = Directory(
        {"prefill": settings.prefill, "decode": settings.decode, "encode": settings.encode},
        file=settings.workers_file,
        announced=Announced(key) if settings.accept_workers and key is not None else None,
    )
    engine = await RemoteEngine.connect(
        prefill=(), decode=(), cluster_key=key, **_first_tokens(settings)
    )
    try:
        engine.follow(directory)
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def _with_children(
    settings: Settings, on_notice: Callable[[str, dict[str, Any]], None]
) -> AsyncGenerator[EngineClient, None]:
    from deepinfer_engine.router.remote import RemoteEngine

    key = secrets.token_bytes(32)
    engine: RemoteEngine | None = None
    addresses: dict[str, str] = {}
    roles = worker_roles(settings)

    def told() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {role: [] for role in WORKER_ROLES}
        for name, address in addresses.items():
            found[roles[name]].append(address)
        return found

    def hear(name: str, notice: dict[str, Any]) -> None:
        on_notice(name, notice)
        if notice["event"] == "ready" and addresses.get(name) != notice["address"]:
            addresses[name] = notice["address"]
            if engine is not None:
                engine.set_workers(**told())

    def in_trouble(name: str, address: str, text: str) -> None:
        if engine is not None:
            engine.start_trouble(address, text)

    supervisor = Supervisor(
        [ChildSpec(name, worker_argv(role, settings)) for name, role in roles.items()],
        environ={**os.environ, CLUSTER_KEY_ENV: key.hex()},
        on_notice=hear,
        on_trouble=in_trouble,
    )
    await supervisor.start(settings.start_timeout_s)
    try:
        found = told()
        engine = await RemoteEngine.connect(
            prefill=found["prefill"],
            decode=found["decode"],
            encode=found["encode"],
            cluster_key=key,
            ready_timeout_s=settings.start_timeout_s,
            **_first_tokens(settings),
        )
        try:
            yield engine
        finally:
            await engine.close()
    except BaseException:
        # Told to end at once, or broken: nobody waits for what the workers still run.
        await supervisor.kill()
        raise
    await supervisor.stop(settings.drain_timeout_s + 5)
