"""Every knob of the server and the command line, in one model.

Precedence: flag > environment `DEEPINFER_<NAME>` > TOML file > default. A key nobody knows is an
error that names the nearest one, so that a typing slip never becomes a silently ignored setting.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from deepinfer_engine.errors import ConfigError

ENV_PREFIX = "DEEPINFER_"
# Of `--search URL`: the API key sent there, and what seals results that clients carry.
SEARCH_KEY_ENV = "DEEPINFER_SEARCH_KEY"
SEARCH_SECRET_ENV = "DEEPINFER_SEARCH_SECRET"
# Read by other parts of the process, never a setting, and never shown.
# Keys that seal the reasoning of Responses: `id:base64`, several with commas between them.
REASONING_KEYS_ENV = "DEEPINFER_REASONING_KEYS"
_RESERVED_ENV = frozenset(
    {
        "DEEPINFER_CLUSTER_KEY",
        "DEEPINFER_SUPERVISED",
        "DEEPINFER_DEBUG",
        "DEEPINFER_API_KEY",
        "DEEPINFER_ADMIN_KEY",
        REASONING_KEYS_ENV,
        SEARCH_KEY_ENV,
        SEARCH_SECRET_ENV,
    }
)

Dtype = Literal["bfloat16", "float32", "float64"]
CacheQuant = Literal["reference", "none"]
Replay = Literal["off", "mask", "compact"]
PersistState = Literal["last", "none", "all"]
Transfer = Literal["auto", "tcp", "store", "mooncake"]
Encoding = Literal["own", "workers", "either"]
RecoveryMode = Literal["exact", "bounded", "none"]


def default_cache_dir() -> Path:
    """Where prompt caches live unless told otherwise: `$XDG_CACHE_HOME/deepinfer/kv`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deepinfer" / "kv"


class Settings(BaseModel):
    """One validated, frozen value; built once at start-up by `load_settings` and passed down."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    if TYPE_CHECKING:  # a type checker sees no default that stands in a Field by position

        def __init__(self, **values: Any) -> None: ...

    # What is served
    model: str | None = Field(
        None,
        description="model directory, .gguf file, smollm2, or org/name of the hub; unset = demo",
    )
    served_model_name: tuple[str, ...] = Field(
        (), description="names clients may use; unset = the model's own or deepinfer-demo"
    )
    device: str = Field("cpu", description="where the model computes; the CPU alone for now")
    dtype: Dtype = Field("float32", description="arithmetic of the model")
    cache_quant: CacheQuant = Field("reference", description="record formats of the KV cache")
    replay: Replay = Field("off", description="compact: early prompt tokens skip half the layers")
    replay_keep: int | None = Field(
        None, ge=1, description="last prompt tokens that run whole; unset = window, drafts, a block"
    )
    nextn: int | None = Field(
        None,
        ge=0,
        le=7,
        description="draft length; unset = the model's own, or 5 copied from the text",
    )
    generation_config: bool = Field(
        True, description="sampling defaults of the model's generation_config.json"
    )
    default_thinking: bool = Field(True, description="think when the request does not say")
    vision: bool = Field(True, description="take pictures, where the checkpoint has a vision tower")

    # Engine
    max_num_seqs: int = Field(16, ge=1, le=4096, description="sequences running at once")
    max_num_batched_tokens: int = Field(
        2048, ge=16, description="tokens of one step: prompts, and drafts beside them"
    )
    max_gap: float = Field(
        3.0,
        ge=0,
        description="single process: a step that reads prompts beside running answers takes at "
        "most so many usual ones; 0 = prompts first",
    )
    overlap: bool = Field(
        False, description="plan the next step while the model computes; the same tokens"
    )
    coupled: bool | None = Field(
        None,
        description="sampled text follows from the seed alone, whatever is drafted; unset = where "
        "the model has drafts",
    )
    batch_invariant: bool = Field(
        False,
        description="a token's logits have the same bits whatever else a step computes: with "
        "coupled, a seed gives one text in every dtype; slower",
    )
    priorities: bool = Field(
        False, description="requests may ask to be served before others (priority below 0)"
    )
    num_blocks: int | None = Field(
        None,
        ge=8,
        description="KV blocks of 128 tokens in each worker; unset = 1024, or what 2 GiB hold",
    )
    single_process: bool = Field(False, description="prefill, decode and HTTP in one process")
    prefill_workers: int = Field(
        1, ge=1, le=64, description="prefill workers to start; they share the prompt cache"
    )
    decode_workers: int = Field(1, ge=1, le=64, description="decode workers to start")
    encode_workers: int = Field(
        0, ge=0, le=64, description="encode workers to start; 0 = prefill workers encode pictures"
    )
    encoding: Encoding | None = Field(
        None,
        description="who encodes the pictures of a prefill worker: own (its vision tower), workers "
        "(encode workers; it loads no tower), either (encode workers, its tower where none is "
        "ready); unset = workers where serve starts some, else own",
    )
    encode_cache_bytes: int = Field(
        256 << 20, ge=0, description="embeddings in the memory of each encode worker"
    )
    encode_patches: int = Field(
        16384, ge=1, description="patches of the pictures that an encode worker takes at once"
    )
    dp: int = Field(
        1,
        ge=1,
        le=64,
        description="single process: processes that each run some of the requests, share a model's "
        "experts and vote on what a step does; sizes are those of each",
    )
    ep: int = Field(
        1, ge=1, le=64, description="processes of a decode worker, which share a model's experts"
    )
    prefill_ep: int = Field(
        1, ge=1, le=64, description="processes of each prefill worker that serve starts, likewise"
    )
    ep_redundant: int | None = Field(
        None, ge=0, description="expert slots beside one for each expert; unset = one a process"
    )
    ep_rebalance_steps: int = Field(
        10_000, ge=0, description="steps between two plans of where experts lie; 0 = they stay"
    )
    ep_timeout_s: float = Field(
        30.0, gt=0, le=600, description="a process that does not answer for this long is lost"
    )
    ttft_target_ms: float | None = Field(
        None,
        gt=0,
        description="what a first token shall take: by it the router tells prefill workers apart "
        "and sends away what would take twice as long (see ttft_shed_s), and they read prompts "
        "that can be in time before those that cannot; unset = as soon as possible",
    )
    token_target_ms: float | None = Field(
        None,
        gt=0,
        description="what a token of a running answer may take: where more answers, drafts or "
        "prompts beside them would make it longer, they wait, and the router takes another decode "
        "worker; unset = no bound",
    )
    ttft_shed_s: float | None = Field(
        None,
        gt=0,
        description="requests whose first token would take longer are sent away; those of priority "
        "above 0 at half of it, below 0 at double; unset = twice the target, or none are",
    )
    transfer: Transfer = Field(
        "auto",
        description="auto: prompts reach decode workers of the same machine through shared memory; "
        "tcp: over the socket always; store: as auto, and what is cached of a prompt its decode "
        "worker loads from the cache that it shares with the prefill worker; mooncake: by writes "
        "of Mooncake's transfer engine (at prefill and decode workers, extra mooncake)",
    )
    transfer_rdma: str | None = Field(
        None, description="mooncake: RDMA device; unset = the library's own TCP"
    )
    trust_transfer_network: bool = Field(
        False,
        description="mooncake: everybody who reaches this machine may see and change prompts on "
        "their way: the library asks for no key, seals nothing and listens on every interface",
    )
    prefill: tuple[str, ...] = Field((), description="host:port of running prefill workers")
    decode: tuple[str, ...] = Field((), description="host:port of running decode workers")
    encode: tuple[str, ...] = Field((), description="host:port of running encode workers")
    workers_file: Path | None = Field(
        None, description="TOML file of worker addresses by role, followed as it changes"
    )
    accept_workers: bool = Field(
        False, description="take workers that register here; wants DEEPINFER_CLUSTER_KEY"
    )
    register_at: tuple[str, ...] = Field(
        (), description="http://host:port of routers that a worker registers with"
    )
    advertise: str | None = Field(
        None, description="host:port it registers as; unset = the address it listens on"
    )
    threads: int | None = Field(None, ge=1, description="torch threads of each process")

    # Answers by a schema or an expression
    xgrammar_timeout: float = Field(20.0, gt=0, description="seconds to compile one constraint")
    xgrammar_cache_limit_bytes: int = Field(
        256 << 20, ge=0, description="memory of a worker for compiled constraints"
    )

    # Prompt cache
    cache: bool = Field(True, description="keep prompt caches")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="their directory")
    cache_local: bool = Field(
        True, description="keep blocks in cache_dir; without it they live in memory and cache_tiers"
    )
    cache_shared: bool = Field(
        False, description="cache_dir is a mounted folder that other machines use too"
    )
    cache_location: tuple[str, ...] = Field(
        (),
        description="location service of a shared cache_dir: redis://host:port/0 or tcp://host:port",
    )
    cache_tiers: tuple[str, ...] = Field(
        (), description="stores below: s3://bucket/prefix?..., mooncake://master:port?..."
    )
    cache_secret_file: Path | None = Field(
        None, description="64 hex digits that key the cache on all machines of shared stores"
    )
    cache_memory_bytes: int = Field(
        256 << 20, ge=0, description="blocks in the memory of each worker"
    )
    prefill_rate: float = Field(
        2000.0, gt=0, description="tokens a second computed; what loads more slowly is not loaded"
    )
    persist_state: PersistState | None = Field(
        None,
        description="window states below memory: last, none or all; unset = last, none on shared",
    )
    window_recovery: RecoveryMode = Field(
        "exact", description="a lost window: exact, bounded (approximate) or none (a shorter hit)"
    )
    window_memory_bytes: int = Field(
        128 << 20, ge=0, description="window states in the memory of each worker"
    )
    window_ttl_s: float = Field(180.0, gt=0, description="... this long after their last use")
    window_exchange: bool = Field(True, description="workers pull each other's window states")
    window_listen: str | None = Field(
        None, description="ip:port windows are pulled from; unset = any port of loopback"
    )
    window_directory: str = Field(
        "peers", description="who has which window: peers, or redis://host:port/0"
    )
    window_deadline_ms: float = Field(
        200.0, gt=0, le=10_000, description="of one lookup and one pull; then it is rebuilt"
    )

    # HTTP
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 = any free one")
    api_key_file: Path | None = Field(
        None, description="one `key` or `id:key` a line; unset = open"
    )
    api_key: SecretStr | None = Field(None, description="one more accepted key; never shown")
    open_to_all: bool = Field(
        False, description="listen beyond this machine although no key is asked for"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (), description="names this server is called by, beside addresses and localhost; * = any"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins of web pages that may use this server; * = any"
    )
    admin_key_file: Path | None = Field(None, description="first line: key of the admin routes")
    responses_store: str | None = Field(
        None, description="where Responses answers are kept: memory or sqlite:PATH; unset = nowhere"
    )
    max_connections: int = Field(1024, ge=1, description="open connections")
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1024, description="request body limit")
    max_queued_bytes: int = Field(
        256 * 1024 * 1024, ge=1024, description="bodies being received or read, all keys"
    )
    max_concurrent_requests: int = Field(256, ge=1, description="requests in flight, all keys")
    max_concurrent_per_key: int = Field(64, ge=1, description="requests in flight of one key")
    key_share: float = Field(
        0.5, gt=0, le=1, description="part of the memory for bodies and pictures one key may hold"
    )
    requests_per_minute: int | None = Field(None, ge=1, description="of one key; unset = any")
    tokens_per_minute: int | None = Field(
        None, ge=1, description="prompt and output tokens of one key; unset = any"
    )

    # Money
    prices: str | None = Field(
        None, description="published (DeepSeek's list) or a TOML table; unset = nothing is priced"
    )
    priced_as: str | None = Field(
        None, description="model of the price table; unset = the first name clients may use"
    )
    ledger: Path | None = Field(
        None, description="SQLite file with a row for every answer; unset = none is kept"
    )

    # Seeing
    metrics_compat: tuple[Literal["vllm", "sglang"], ...] = Field(
        (), description="metrics under other servers' names too: vllm, sglang"
    )
    traces: str | None = Field(
        None, description="OpenTelemetry: base URL of an OTLP/HTTP collector, or console"
    )

    # Pictures
    max_images: int = Field(16, ge=0, le=600, description="pictures in one request")
    max_pixel_bytes: int = Field(
        1 << 30, ge=1 << 20, description="decoded pictures of all requests in flight"
    )
    fetch_images: bool = Field(
        False, description="fetch http(s) image URLs, from public addresses only"
    )

    # Web search, for requests that ask the server for it
    search: str | None = Field(
        None, description="embedded, or the URL of a search-fetch service; unset = no web search"
    )
    search_home: Path | None = Field(
        None, description="folder of the embedded index; unset = that of search-fetch"
    )

    # Time, in seconds
    header_timeout_s: float = Field(10.0, gt=0, description="a request's header has come by then")
    body_timeout_s: float = Field(
        30.0, gt=0, description="and its body this long after, plus a second for each 16 KiB"
    )
    http_idle_s: float = Field(5.0, gt=0, description="an idle connection is kept open")
    first_byte_s: float = Field(5.0, gt=0, description="a stream's headers go out by then")
    keepalive_s: float = Field(10.0, gt=0, description="silence after which a keep-alive is sent")
    first_token_timeout_s: float = Field(600.0, gt=0, description="longest wait for a first token")
    token_timeout_s: float = Field(120.0, gt=0, description="longest wait between tokens")
    slow_reader_timeout_s: float = Field(
        60.0, gt=0, description="longest block of one socket write"
    )
    drain_timeout_s: float = Field(120.0, ge=0, description="SIGTERM: time for running requests")
    start_timeout_s: float = Field(120.0, gt=0, description="time for workers to become ready")

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="verbosity")

    @field_validator(
        "prefill", "decode", "encode", "served_model_name", "allowed_hosts", "cors_origins",
        "cache_tiers", "cache_location", "metrics_compat", "register_at", mode="before",
    )  # fmt: skip
    @classmethod
    def _split_text(cls, value: Any) -> Any:
        # An environment variable holds a list as text with commas.
        return (
            tuple(v.strip() for v in value.split(",") if v.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("model", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("responses_store")
    @classmethod
    def _check_store(cls, value: str | None) -> str | None:
        kind, colon, path = (value or "memory").partition(":")
        if value != "memory" and value is not None and not (kind == "sqlite" and colon and path):
            raise ValueError("wanted memory or sqlite:PATH")
        return value

    @field_validator("search")
    @classmethod
    def _check_search(cls, value: str | None) -> str | None:
        if value is not None and value != "embedded":
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("wanted embedded or an http(s) URL")
        return value

    @field_validator("cache_tiers")
    @classmethod
    def _check_tiers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(url.startswith(("s3://", "mooncake://", "file://")) for url in value):
            raise ValueError("a tier is s3://bucket/prefix or mooncake://master:port")
        return value

    @field_validator("cache_location")
    @classmethod
    def _check_location(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(url.startswith(("redis://", "rediss://", "tcp://")) for url in value):
            raise ValueError("a shard of the location service is redis://host:port/0 or tcp://...")
        return value

    @field_validator("window_directory")
    @classmethod
    def _check_window_directory(cls, value: str) -> str:
        if value != "peers" and not value.startswith(("redis://", "rediss://")):
            raise ValueError("wanted peers or redis://host:port/0")
        return value

    @field_validator("window_listen")
    @classmethod
    def _check_window_listen(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            parts = urlsplit(origin)
            whole = f"{parts.scheme}://{parts.netloc}"
            if origin != "*" and (not parts.netloc or whole != origin.rstrip("/")):
                raise ValueError("an origin is scheme://host[:port]")
        return value

    @field_validator("advertise")
    @classmethod
    def _check_advertised(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @field_validator("register_at")
    @classmethod
    def _check_routers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("a router is http(s)://host:port")
        return value

    @field_validator("prefill", "decode", "encode")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            split_address(address)
        return value

    @property
    def encoded_by(self) -> Encoding:
        """What `encoding` says, or its default."""
        return self.encoding or ("workers" if self.encode_workers else "own")

    @property
    def finds_workers(self) -> bool:
        """Whether a router's workers may come and go by themselves."""
        return self.workers_file is not None or self.accept_workers

    @property
    def persisted_states(self) -> PersistState:
        """What `persist_state` says, or its default: shared stores hold blocks alone."""
        shared = self.cache_shared or self.cache_location or self.cache_tiers
        return self.persist_state or ("none" if shared or not self.cache_local else "last")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may ask for; the first is the canonical one."""
        if self.served_model_name:
            return self.served_model_name
        return (served_name(self.model),)


def served_name(model: str | None) -> str:
    """What clients call a model unless the operator says otherwise."""
    if model is None or model == "demo":
        return "deepinfer-demo"
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.is_dir() or path.is_absolute() else model


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` to its parts; ValueError says what is wrong."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"wanted host:port with a port up to 65535, got {address!r}")
    return host, int(port)


def load_settings(
    flags: Mapping[str, Any],
    *,
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge the four sources. A flag of value None counts as not given.

    `config` None means `./deepinfer.toml` if it exists. Raises ConfigError with one line of text.
    """
    values = {
        **_from_file(config),
        **_from_environ(os.environ if environ is None else environ),
        **{name: value for name, value in flags.items() if value is not None},
    }
    try:
        return Settings.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = f"setting {name}: {first['msg']}, got {first.get('input')!r}"
        raise ConfigError(message) from exc


def _from_file(config: Path | None) -> dict[str, Any]:
    path = config or Path("deepinfer.toml")
    if config is None and not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read the configuration file {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the configuration file {path} is not TOML: {exc}") from exc
    for key in values:
        if key not in Settings.model_fields:
            raise ConfigError(f"unknown setting {key!r} in {path}{_suggest(key, cutoff=0.5)}")
    return values


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings from variables. Only a near miss is refused: others may share the prefix."""
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in _RESERVED_ENV:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name in Settings.model_fields:
            values[name] = text
        elif hint := _suggest(name, cutoff=0.8, prefix=ENV_PREFIX):
            raise ConfigError(f"unknown environment variable {variable}{hint}")
    return values


def _suggest(key: str, *, cutoff: float, prefix: str = "") -> str:
    near = difflib.get_close_matches(key.lower(), list(Settings.model_fields), n=1, cutoff=cutoff)
    if not near:
        return ""
    return f"; did you mean {prefix}{near[0].upper() if prefix else near[0]}?"
