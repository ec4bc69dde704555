"""The `deepinfer` command. Nothing heavy is imported before a command runs: `--help` stays fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_engine.cli.bench import bench
from deepinfer_engine.cli.fleet import drain
from deepinfer_engine.cli.model import model_app
from deepinfer_engine.cli.options import Json, ServerKey, server_option
from deepinfer_engine.cli.top import top
from deepinfer_engine.cli.up import down, status, up
from deepinfer_engine.cli.usage import usage
from deepinfer_engine.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    EngineLost,
    EngineUnavailable,
)

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_engine.settings import Settings

# Typer carries its own copy of click in newer versions; this base class is the same idea in all of
# them.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="deepinfer",
    help="Serve DeepSeek-V4.1 class models: one laptop core or many workers. Commands without "
    "a model use the small embedded one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Show the configuration in force.", no_args_is_help=True)


def _say_version(asked: bool) -> None:
    if asked:
        from deepinfer_engine import __version__

        print(f"deepinfer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Options in front of the command."""


app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")
app.command()(drain)
app.command()(usage)
app.command()(top)
app.command()(bench)
app.command()(up)
app.command()(status)
app.command()(down)

Model = Annotated[
    str | None,
    typer.Option(help="Model directory, .gguf file, smollm2, or org/name; default: demo."),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False),
]
Names = Annotated[
    list[str] | None, typer.Option("--served-model-name", help="Name clients use; repeatable.")
]
Config = Annotated[
    Path | None, typer.Option(help="TOML file of settings; default: ./deepinfer.toml.")
]
Device = Annotated[
    str | None, typer.Option(help="Where the model computes; the CPU alone for now.")
]
Dtype = Annotated[str | None, typer.Option(help="bfloat16, float32 or float64.")]
CacheQuant = Annotated[str | None, typer.Option(help="KV record formats: reference or none.")]
Replay = Annotated[
    str | None, typer.Option(help="off, or compact: early prompt tokens skip half the layers.")
]
ReplayKeep = Annotated[int | None, typer.Option(help="Last prompt tokens that run whole.")]
Nextn = Annotated[int | None, typer.Option(help="Draft tokens a step; 0 = no speculation.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences running at once.")]
MaxBatched = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Tokens of one step.")
]
MaxGap = Annotated[
    float | None,
    typer.Option(
        help="In one process: steps that read prompts beside answers take so many usual ones."
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option("--overlap/--no-overlap", help="Plan the next step while the model computes."),
]
Coupled = Annotated[
    bool | None,
    typer.Option("--coupled/--no-coupled", help="Sampled text follows from the seed alone."),
]
Dp = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="As so many processes, which share the experts and divide the requests.",
    ),
]
BatchInvariant = Annotated[
    bool | None,
    typer.Option(
        "--batch-invariant/--no-batch-invariant",
        help="The same bits for a token in any batch, in every dtype; slower.",
    ),
]
Priorities = Annotated[
    bool | None,
    typer.Option("--priorities", help="Requests may ask to be served before others."),
]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks of 128 tokens in each worker.")]
Threads = Annotated[int | None, typer.Option(help="Torch threads of each process.")]
GrammarTimeout = Annotated[
    float | None,
    typer.Option("--xgrammar-timeout", help="Seconds to compile the schema of one request."),
]
GrammarCache = Annotated[
    int | None,
    typer.Option("--xgrammar-cache-limit-bytes", help="Memory for compiled schemas, each worker."),
]
CacheDir = Annotated[Path | None, typer.Option(help="Directory of the prompt cache.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Keep no prompt cache.")]
CacheLocal = Annotated[
    bool | None,
    typer.Option(
        "--cache-local/--no-cache-local", help="Keep blocks in --cache-dir, or in memory and tiers."
    ),
]
CacheShared = Annotated[
    bool | None,
    typer.Option(
        "--cache-shared/--no-cache-shared", help="--cache-dir is a folder other machines mount."
    ),
]
CacheLocation = Annotated[
    list[str] | None,
    typer.Option(help="Location service of a shared --cache-dir: redis:// or tcp://; repeatable."),
]
CacheTiers = Annotated[
    list[str] | None,
    typer.Option("--cache-tier", help="Store below: s3:// or mooncake:// URL; repeatable."),
]
CacheSecret = Annotated[
    Path | None,
    typer.Option("--cache-secret-file", help="64 hex digits, the same on all machines."),
]
CacheMemory = Annotated[
    int | None, typer.Option("--cache-memory-bytes", help="Blocks in memory, each worker.")
]
PrefillRate = Annotated[
    float | None, typer.Option(help="Tokens a second computed; slower loads are left alone.")
]
Persist = Annotated[
    str | None,
    typer.Option("--persist-state", help="Window states below memory: last, none or all."),
]
WindowRecovery = Annotated[
    str | None, typer.Option(help="A lost window: exact, bounded (approximate) or none.")
]
WindowMemory = Annotated[
    int | None, typer.Option("--window-memory-bytes", help="Window states in memory, each worker.")
]
WindowTtl = Annotated[
    float | None, typer.Option("--window-ttl-s", help="... this long after their last use.")
]
WindowSwitch = Annotated[
    bool | None,
    typer.Option(
        "--window-exchange/--no-window-exchange", help="Workers pull each other's window states."
    ),
]
WindowListen = Annotated[
    str | None, typer.Option(help="ip:port windows are pulled from; default: loopback.")
]
WindowDirectory = Annotated[
    str | None, typer.Option(help="Who has which window: peers, or redis://host:port/0.")
]
WindowDeadline = Annotated[
    float | None, typer.Option("--window-deadline-ms", help="Of one lookup and of one pull.")
]
NoVision = Annotated[
    bool, typer.Option("--no-vision", help="Text alone: leave the vision tower out.")
]
NoGenerationConfig = Annotated[
    bool,
    typer.Option(
        "--no-generation-config", help="Ignore the sampling defaults in the model's files."
    ),
]
FetchImages = Annotated[
    bool | None,
    typer.Option("--fetch-images", help="Fetch http(s) image URLs, from public addresses only."),
]
Drain = Annotated[
    float | None, typer.Option("--drain-timeout-s", help="Seconds to finish on SIGTERM.")
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
Search = Annotated[
    str | None,
    typer.Option(help="Run web searches on: embedded, or the URL of a search-fetch service."),
]
SearchHome = Annotated[Path | None, typer.Option(help="Folder of the embedded search index.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 = any free one.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", help="Accepted API keys, `key` or `id:key` a line.")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="One accepted API key; whoever lists processes sees it."),
]
AdminKeyFile = Annotated[
    Path | None, typer.Option("--admin-key-file", help="First line: the key of the admin routes.")
]
OpenToAll = Annotated[
    bool | None,
    typer.Option("--open-to-all", help="Listen beyond this machine although no key is asked for."),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", help="Name this server is called by; repeatable."),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", help="Origin of web pages that may use it; repeatable."),
]
ResponsesStore = Annotated[
    str | None,
    typer.Option(help="Keep Responses answers: memory or sqlite:PATH; default: nowhere."),
]
Prices = Annotated[
    str | None, typer.Option(help="Price table: published (DeepSeek's list), or a TOML file.")
]
PricedAs = Annotated[
    str | None, typer.Option("--priced-as", help="Model of that table; default: the served name.")
]
Ledger = Annotated[Path | None, typer.Option(help="SQLite file that gets a row for every answer.")]
MetricsCompat = Annotated[
    list[str] | None,
    typer.Option("--metrics-compat", help="Metrics by these names too: vllm, sglang; repeatable."),
]
Traces = Annotated[
    str | None, typer.Option(help="OpenTelemetry: URL of an OTLP/HTTP collector, or console.")
]
Prefill = Annotated[
    list[str] | None, typer.Option(help="host:port of a running prefill worker; repeatable.")
]
Decode = Annotated[
    list[str] | None, typer.Option(help="host:port of a running decode worker; repeatable.")
]
Encode = Annotated[
    list[str] | None, typer.Option(help="host:port of a running encode worker; repeatable.")
]
EncodeWorkers = Annotated[
    int | None, typer.Option(help="Encode workers to start; 0: prefill encodes pictures itself.")
]
EncodingWay = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        help="Who encodes pictures: own, workers, or either (its own tower where none is ready).",
    ),
]
EncodeCache = Annotated[
    int | None, typer.Option("--encode-cache-bytes", help="Embeddings in memory, each worker.")
]
EncodePatches = Annotated[
    int | None, typer.Option("--encode-patches", help="Patches of pictures encoded at once.")
]
TransferWay = Annotated[
    str | None,
    typer.Option(
        "--transfer",
        help="auto: shared memory on one machine; tcp: sockets always; store: decode workers load "
        "what is cached themselves; mooncake: its transfer engine's one-sided writes.",
    ),
]
TransferRdma = Annotated[
    str | None, typer.Option(help="RDMA device of --transfer mooncake; default: its TCP.")
]
TrustTransfer = Annotated[
    bool | None,
    typer.Option(
        "--trust-transfer-network/--no-trust-transfer-network",
        help="Allow --transfer mooncake: without keys, unsealed, listening on all interfaces.",
    ),
]
TtftShed = Annotated[
    float | None,
    typer.Option("--ttft-shed-s", help="Send requests away whose first token takes longer."),
]
TtftTarget = Annotated[
    float | None,
    typer.Option("--ttft-target-ms", help="What a first token shall take: choice and order."),
]
TokenTarget = Annotated[
    float | None,
    typer.Option("--token-target-ms", help="What a token of a running answer may take."),
]
WorkersFile = Annotated[
    Path | None, typer.Option(help="TOML file of worker addresses, followed as it changes.")
]
AcceptWorkers = Annotated[
    bool | None,
    typer.Option("--accept-workers", help="Take workers that register here (cluster key)."),
]
RegisterAt = Annotated[
    list[str] | None,
    typer.Option("--register-at", help="http://host:port of a router to register with."),
]
Advertise = Annotated[str | None, typer.Option(help="host:port that routers connect to.")]
PrefillWorkers = Annotated[
    int | None, typer.Option(help="Prefill workers to start; they share the prompt cache.")
]
DecodeWorkers = Annotated[int | None, typer.Option(help="Decode workers to start.")]
Ep = Annotated[
    int | None, typer.Option("--ep", help="Processes of a decode worker that share the experts.")
]
OwnEp = Annotated[
    int | None, typer.Option("--ep", help="Processes of this worker, which share the experts.")
]
PrefillEp = Annotated[
    int | None, typer.Option("--prefill-ep", help="Processes of a prefill worker, likewise.")
]
EpRedundant = Annotated[
    int | None, typer.Option(help="Expert slots beside one each; default: one a process.")
]
EpRebalance = Annotated[
    int | None,
    typer.Option("--ep-rebalance-steps", help="Steps between plans of where experts lie; 0 = off."),
]
EpTimeout = Annotated[
    float | None, typer.Option("--ep-timeout-s", help="A process silent for this long is lost.")
]
Listen = Annotated[str, typer.Option(help="host:port for the router to reach; port 0 = any.")]


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command; every failure is one line on standard error and an exit code."""
    try:
        args = list(argv) or ["--help"]
        result = app(args=args, standalone_mode=False, prog_name="deepinfer")
    except typer.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # `deepinfer ... | head` closed our output; there is nobody to complain to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as exc:
        if os.environ.get("DEEPINFER_DEBUG"):
            raise
        return _tell(exc)
    return result if isinstance(result, int) else 0


def exit_code(exc: Exception) -> int:
    """0 ok, 1 other, 2 usage, 3 configuration, 4 not ready, 5 engine lost, 6 check failed."""
    codes: tuple[tuple[type[Exception], int], ...] = (
        (_UsageError, 2),
        (ConfigError, 3),
        (CheckpointError, 3),
        (EngineUnavailable, 4),
        (EngineLost, 5),
    )
    return next((code for kind, code in codes if isinstance(exc, kind)), 1)


def _tell(exc: Exception) -> int:
    from deepinfer_engine.pd.supervise import notify, supervised

    expected = isinstance(exc, EngineError | OSError | _UsageError)
    text = exc.format_message() if isinstance(exc, _UsageError) else str(exc)  # type: ignore[attr-defined]
    text = " ".join(text.split()) or type(exc).__name__
    if not expected:
        text = f"internal error: {type(exc).__name__}: {text} (DEEPINFER_DEBUG=1 shows where)"
    if supervised():
        # The parent has the terminal, and tells it once.
        notify("failed", kind=type(exc).__name__, message=text)
    else:
        print(f"deepinfer: error: {text}", file=sys.stderr)
    return exit_code(exc)


def _settings(config: Path | None, **flags: Any) -> Settings:
    from deepinfer_engine.core.device import Device
    from deepinfer_engine.settings import load_settings

    for name in ("cache", "vision", "generation_config"):
        if flags.pop(f"no_{name}", False):
            flags[name] = False
    lists = ("prefill", "decode", "encode", "served_model_name", "allowed_hosts", "cors_origins")
    for name in (*lists, "cache_tiers", "cache_location", "register_at", "metrics_compat"):
        flags[name] = flags.get(name) or None
    settings = load_settings(flags, config=config)
    Device.parse(settings.device)
    return settings


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


@app.command()
def serve(
    name: ModelArgument = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    single_process: Annotated[
        bool | None,
        typer.Option("--single-process", help="Prefill, decode and HTTP in one process."),
    ] = None,
    prefill_workers: PrefillWorkers = None,
    decode_workers: DecodeWorkers = None,
    encode_workers: EncodeWorkers = None,
    encoding: EncodingWay = None,
    encode_cache_bytes: EncodeCache = None,
    encode_patches: EncodePatches = None,
    ep: Ep = None,
    prefill_ep: PrefillEp = None,
    ep_redundant: EpRedundant = None,
    ep_rebalance_steps: EpRebalance = None,
    ep_timeout_s: EpTimeout = None,
    prefill: Prefill = None,
    decode: Decode = None,
    encode: Encode = None,
    workers_file: WorkersFile = None,
    accept_workers: AcceptWorkers = None,
    ttft_target_ms: TtftTarget = None,
    token_target_ms: TokenTarget = None,
    ttft_shed_s: TtftShed = None,
    transfer: TransferWay = None,
    transfer_rdma: TransferRdma = None,
    trust_transfer_network: TrustTransfer = None,
    served_model_name: Names = None,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    cache_local: CacheLocal = None,
    cache_shared: CacheShared = None,
    cache_location: CacheLocation = None,
    cache_tiers: CacheTiers = None,
    cache_secret_file: CacheSecret = None,
    cache_memory_bytes: CacheMemory = None,
    prefill_rate: PrefillRate = None,
    persist_state: Persist = None,
    window_recovery: WindowRecovery = None,
    window_memory_bytes: WindowMemory = None,
    window_ttl_s: WindowTtl = None,
    window_exchange: WindowSwitch = None,
    window_listen: WindowListen = None,
    window_directory: WindowDirectory = None,
    window_deadline_ms: WindowDeadline = None,
    no_vision: NoVision = False,
    fetch_images: FetchImages = None,
    no_generation_config: NoGenerationConfig = False,
    device: Device = None,
    dtype: Dtype = None,
    cache_quant: CacheQuant = None,
    replay: Replay = None,
    replay_keep: ReplayKeep = None,
    nextn: Nextn = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatched = None,
    max_gap: MaxGap = None,
    priorities: Priorities = None,
    overlap: Overlap = None,
    coupled: Coupled = None,
    dp: Dp = None,
    batch_invariant: BatchInvariant = None,
    num_blocks: NumBlocks = None,
    threads: Threads = None,
    xgrammar_timeout: GrammarTimeout = None,
    xgrammar_cache_limit_bytes: GrammarCache = None,
    responses_store: ResponsesStore = None,
    search: Search = None,
    search_home: SearchHome = None,
    api_key: ApiKey = None,
    api_key_file: KeyFile = None,
    admin_key_file: AdminKeyFile = None,
    open_to_all: OpenToAll = None,
    allowed_hosts: AllowedHosts = None,
    cors_origins: CorsOrigins = None,
    prices: Prices = None,
    priced_as: PricedAs = None,
    ledger: Ledger = None,
    metrics_compat: MetricsCompat = None,
    traces: Traces = None,
    drain_timeout_s: Drain = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> int:
    """Serve the three chat protocols over HTTP: a router, prefill and decode processes."""
    flags = _without(locals(), "name", "config") | {"model": _one_model(name, model)}
    settings = _settings(config, **flags)
    from deepinfer_engine.cli.serve import run_serve

    return run_serve(settings, _console())


@app.command()
def router(
    prefill: Prefill = None,
    decode: Decode = None,
    encode: Encode = None,
    workers_file: WorkersFile = None,
    accept_workers: AcceptWorkers = None,
    ttft_target_ms: TtftTarget = None,
    ttft_shed_s: TtftShed = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    served_model_name: Names = None,
    no_vision: NoVision = False,
    fetch_images: FetchImages = None,
    responses_store: ResponsesStore = None,
    priorities: Priorities = None,
    search: Search = None,
    search_home: SearchHome = None,
    api_key: ApiKey = None,
    api_key_file: KeyFile = None,
    admin_key_file: AdminKeyFile = None,
    open_to_all: OpenToAll = None,
    allowed_hosts: AllowedHosts = None,
    cors_origins: CorsOrigins = None,
    prices: Prices = None,
    priced_as: PricedAs = None,
    ledger: Ledger = None,
    metrics_compat: MetricsCompat = None,
    traces: Traces = None,
    drain_timeout_s: Drain = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> int:
    """The HTTP front door alone, over prefill and decode workers that already run."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    settings = _settings(config, **flags)
    if not ((settings.prefill and settings.decode) or settings.finds_workers):
        raise typer.BadParameter(
            "a router needs --prefill HOST:PORT and --decode HOST:PORT, or --workers-file, or "
            "--accept-workers"
        )
    from deepinfer_engine.cli.serve import run_serve

    return run_serve(settings, _console())


def _one_model(argument: str | None, option: str | None) -> str | None:
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"two models are named: {argument} and --model {option}")
    return option if argument is None else argument


def _worker(role: Any, listen: str, config: Path | None, flags: dict[str, Any]) -> int:
    settings = _settings(config, **flags)
    from deepinfer_engine.cli.worker import run_worker

    return run_worker(role, settings, listen)


@app.command()
def prefill(
    listen: Listen = "127.0.0.1:0",
    register_at: RegisterAt = None,
    ttft_target_ms: TtftTarget = None,
    transfer: TransferWay = None,
    transfer_rdma: TransferRdma = None,
    trust_transfer_network: TrustTransfer = None,
    encoding: EncodingWay = None,
    advertise: Advertise = None,
    model: Model = None,
    ep: OwnEp = None,
    ep_redundant: EpRedundant = None,
    ep_rebalance_steps: EpRebalance = None,
    ep_timeout_s: EpTimeout = None,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    cache_local: CacheLocal = None,
    cache_shared: CacheShared = None,
    cache_location: CacheLocation = None,
    cache_tiers: CacheTiers = None,
    cache_secret_file: CacheSecret = None,
    cache_memory_bytes: CacheMemory = None,
    prefill_rate: PrefillRate = None,
    persist_state: Persist = None,
    window_recovery: WindowRecovery = None,
    window_memory_bytes: WindowMemory = None,
    window_ttl_s: WindowTtl = None,
    window_exchange: WindowSwitch = None,
    window_listen: WindowListen = None,
    window_directory: WindowDirectory = None,
    window_deadline_ms: WindowDeadline = None,
    no_vision: NoVision = False,
    device: Device = None,
    dtype: Dtype = None,
    cache_quant: CacheQuant = None,
    replay: Replay = None,
    replay_keep: ReplayKeep = None,
    nextn: Nextn = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatched = None,
    overlap: Overlap = None,
    coupled: Coupled = None,
    batch_invariant: BatchInvariant = None,
    num_blocks: NumBlocks = None,
    threads: Threads = None,
    xgrammar_timeout: GrammarTimeout = None,
    xgrammar_cache_limit_bytes: GrammarCache = None,
    drain_timeout_s: Drain = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> int:
    """One prefill worker; tells its address as a JSON line on standard output."""
    return _worker("prefill", listen, config, _without(locals(), "listen", "config"))


@app.command()
def decode(
    listen: Listen = "127.0.0.1:0",
    register_at: RegisterAt = None,
    token_target_ms: TokenTarget = None,
    transfer: TransferWay = None,
    transfer_rdma: TransferRdma = None,
    trust_transfer_network: TrustTransfer = None,
    advertise: Advertise = None,
    model: Model = None,
    ep: OwnEp = None,
    ep_redundant: EpRedundant = None,
    ep_rebalance_steps: EpRebalance = None,
    ep_timeout_s: EpTimeout = None,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    cache_local: CacheLocal = None,
    cache_shared: CacheShared = None,
    cache_location: CacheLocation = None,
    cache_tiers: CacheTiers = None,
    cache_secret_file: CacheSecret = None,
    cache_memory_bytes: CacheMemory = None,
    prefill_rate: PrefillRate = None,
    persist_state: Persist = None,
    window_recovery: WindowRecovery = None,
    window_memory_bytes: WindowMemory = None,
    window_ttl_s: WindowTtl = None,
    window_exchange: WindowSwitch = None,
    window_listen: WindowListen = None,
    window_directory: WindowDirectory = None,
    window_deadline_ms: WindowDeadline = None,
    no_vision: NoVision = False,
    device: Device = None,
    dtype: Dtype = None,
    cache_quant: CacheQuant = None,
    replay: Replay = None,
    replay_keep: ReplayKeep = None,
    nextn: Nextn = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatched = None,
    overlap: Overlap = None,
    coupled: Coupled = None,
    batch_invariant: BatchInvariant = None,
    num_blocks: NumBlocks = None,
    threads: Threads = None,
    xgrammar_timeout: GrammarTimeout = None,
    xgrammar_cache_limit_bytes: GrammarCache = None,
    drain_timeout_s: Drain = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> int:
    """One decode worker; tells its address as a JSON line on standard output."""
    return _worker("decode", listen, config, _without(locals(), "listen", "config"))


@app.command()
def encode(
    listen: Listen = "127.0.0.1:0",
    register_at: RegisterAt = None,
    transfer: TransferWay = None,
    advertise: Advertise = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    batch_invariant: BatchInvariant = None,
    threads: Threads = None,
    encode_cache_bytes: EncodeCache = None,
    encode_patches: EncodePatches = None,
    drain_timeout_s: Drain = None,
    log_level: LogLevel = None,
    config: Config = None,
) -> int:
    """One encode worker, the vision tower alone; tells its address as a JSON line."""
    return _worker("encode", listen, config, _without(locals(), "listen", "config"))


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Ask this and end; without it, a conversation.")
    ] = None,
    url: Annotated[
        str | None, server_option("A running server; default: the model in this process.")
    ] = None,
    api_key: ServerKey = None,
    model: Model = None,
    device: Device = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 = always the likeliest token.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer without thinking first.")
    ] = False,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    config: Config = None,
) -> int:
    """Talk to a model in the terminal; shows time to first token and cached tokens."""
    settings = _settings(config, model=model, device=device, cache_dir=cache_dir, no_cache=no_cache)
    from deepinfer_engine.cli.chat import ChatOptions, run_chat

    options = ChatOptions(
        prompt=prompt,
        url=url,
        api_key=api_key,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        thinking=not no_thinking,
    )
    return run_chat(settings, options)


@app.command()
def generate(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN.jsonl", help="One Chat Completions body a line; - is stdin."),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="One result a line, same order.")
    ],
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first line that fails.")
    ] = False,
    concurrency: Annotated[
        int, typer.Option(min=1, max=4096, help="Requests running at once.")
    ] = 8,
    model: Model = None,
    served_model_name: Names = None,
    device: Device = None,
    dtype: Dtype = None,
    nextn: Nextn = None,
    dp: Dp = None,
    batch_invariant: BatchInvariant = None,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    config: Config = None,
) -> int:
    """Answer a file of requests without a server; run it again to go on where it stopped."""
    flags = _without(locals(), "source", "target", "strict", "concurrency", "config")
    settings = _settings(config, **flags)
    from deepinfer_engine.cli.generate import run_generate

    return run_generate(
        settings, source, target, strict=strict, concurrency=concurrency, console=_console()
    )


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="smollm2, or org/name of the Hugging Face hub.")],
) -> None:
    """Fetch a model once; afterwards its name works wherever a model is wanted."""
    from deepinfer_engine.cli.pull import run_pull

    run_pull(name, _console())


@app.command()
def calibrate(
    name: ModelArgument = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    cache_quant: CacheQuant = None,
    nextn: Nextn = None,
    batch_invariant: BatchInvariant = None,
    threads: Threads = None,
    config: Config = None,
) -> None:
    """Measure a model's step times on this machine: drafts are then used where they pay."""
    flags = _without(locals(), "name", "config") | {"model": _one_model(name, model)}
    settings = _settings(config, **flags)
    from deepinfer_engine.cli.calibrate import run_calibrate

    run_calibrate(settings, _console())


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the server running afterwards.")
    ] = False,
    model: Model = None,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    single_process: Annotated[
        bool | None, typer.Option("--single-process", help="One process.")
    ] = None,
    config: Config = None,
) -> int:
    """Start a server on a free port, hold a two-turn conversation with it, show what the cache
    saved.
    """
    settings = _settings(
        config, model=model, cache_dir=cache_dir, no_cache=no_cache,
        single_process=single_process, port=0, log_level="warning",
    )  # fmt: skip
    from deepinfer_engine.cli.demo import run_demo

    return run_demo(settings, keep=keep)


@app.command()
def doctor(
    as_json: Json = False,
    model: Model = None,
    port: Port = None,
    cache_dir: CacheDir = None,
    no_cache: NoCache = False,
    config: Config = None,
) -> int:
    """Check this machine, the cache directory and the model; exit code 6 when one is broken."""
    settings = _settings(config, model=model, port=port, cache_dir=cache_dir, no_cache=no_cache)
    from deepinfer_engine.cli.doctor import run_doctor

    return run_doctor(settings, as_json=as_json)


@app.command()
def version() -> None:
    """The version of this package."""
    from deepinfer_engine import __version__

    print(__version__)


@config_app.command("show")
def config_show(as_json: Json = False, config: Config = None) -> None:
    """Every setting and its value, from file, environment and defaults."""
    settings = _settings(config)
    if as_json:
        print(settings.model_dump_json(indent=2))
        return
    for name, field in type(settings).model_fields.items():
        print(f"{name} = {getattr(settings, name)}".ljust(44), f"# {field.description}")


@config_app.command("schema")
def config_schema() -> None:
    """JSON Schema of the configuration file."""
    import json

    from deepinfer_engine.settings import Settings

    print(json.dumps(Settings.model_json_schema(), indent=2))


if __name__ == "__main__":
    main()
