"""Settings of one cache: parsed once at the edge, frozen afterwards."""

from __future__ import annotations

import grp
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.files import Permissions

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class RetentionClass:
    """Lifetime of one class of traffic.

    ttl_s: seconds after the last hit until a record may go; None = never expires.
    code:  number of the class in records on disk, 0..255, unique in one store.
    """

    code: int
    ttl_s: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.code <= 255 or (self.ttl_s is not None and self.ttl_s <= 0):
            raise ConfigError(
                f"a class needs a code in 0..255 and a ttl above 0, got {self.code}, {self.ttl_s}"
            )


DEFAULT_CLASSES: dict[str, RetentionClass] = {
    "scratch": RetentionClass(code=0, ttl_s=1 * HOUR_S),
    "agent": RetentionClass(code=1, ttl_s=72 * HOUR_S),
    "chat": RetentionClass(code=2, ttl_s=168 * HOUR_S),
    "pin": RetentionClass(code=3, ttl_s=None),
}

_CLASS_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")


def check_class_name(name: str) -> None:
    """Class names become part of file names, so only short lower-case words are legal."""
    if not _CLASS_NAME.fullmatch(name):
        raise ConfigError(f"a class name must match {_CLASS_NAME.pattern}, got {name!r}")


def traffic_class(
    *,
    explicit: str | None = None,
    may_choose: bool = False,
    tools: bool = False,
    tool_results: bool = False,
) -> str:
    """Class of a request: the caller's own choice where its key allows one, else by its content.

    explicit:     class named in the request; ignored unless `may_choose`.
    tools:        the request declares tools.
    tool_results: the request carries results of earlier tool calls.
    returns:      "agent" with tools or tool results, else "chat".
    """
    if explicit is not None and may_choose:
        return explicit
    return "agent" if tools or tool_results else "chat"


Mode = Literal["embedded", "shared-fs"]


class MountSettings(BaseModel):
    """How machines on one mount keep in touch, in seconds, and how they write.

    poll_s:        between two looks at the logs of the others; a block is visible that much later.
    heartbeat_s:   between two signs of life of a writer.
    adopt_after_s: without a sign of life until a writer is taken for dead and its log is finished
                   by another machine.
    grace_s:       between the tombstone of a segment and the deletion of its file; twice as long as
                   the leases in use. For half of it machines that knew the records find them still.
    listing_s:     at least, between two listings of the directory.

    segment_files: segments of each class that a writer fills at a time, side by side: a mount
                   serialises the writes to one file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    poll_s: float = Field(default=0.25, gt=0)
    heartbeat_s: float = Field(default=5.0, gt=0)
    adopt_after_s: float = Field(default=600.0, gt=0)
    grace_s: float = Field(default=120.0, ge=0)
    listing_s: float = Field(default=30.0, ge=0)
    segment_files: int = Field(default=2, ge=1, le=16)

    @model_validator(mode="after")
    def _patience(self) -> MountSettings:
        if self.adopt_after_s < 10 * max(self.heartbeat_s, self.poll_s):
            raise ValueError(
                "adopt_after_s must be at least ten times heartbeat_s and poll_s, got"
                f" {self.adopt_after_s}, {self.heartbeat_s} and {self.poll_s}"
            )
        return self


class WindowSettings(BaseModel):
    """How state windows are shared with other machines.

    key:          32 bytes that all peers share: proves that a peer is one.
    locations:    "peers" = the members keep them among themselves, "redis" = at
                  `redis_url`, or an object such as `LocalLocations` that several caches of one
                  process share.
    listen:       "ip:port" to serve on; port 0 takes a free one. Beyond loopback only when said
                  here.
    advertise:    "ip:port" under which others reach it; default the bound address.
    members:      addresses of all machines ("peers"), this one included, the same on each.
    deadline_ms:  for one lookup and for one pull; then the window is rebuilt instead.
    dead_after:   deadlines missed in a row after which a peer is left alone for `retry_s`.
    replace_after_s: seconds after which a newer window of the same chain replaces its predecessor
                  in memory; until then a retry of the same turn still finds the old one.
    transport:    how window bytes travel; "mooncake" needs the extra, falls back to TCP for holders
                  without it, and goes by `mooncake_protocol` over `mooncake_device`.
    max_connections: that the service accepts at a time.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, arbitrary_types_allowed=True
    )

    key: bytes = Field(min_length=32, max_length=32, repr=False)
    locations: Literal["peers", "redis"] | Any = "peers"
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    members: tuple[str, ...] = Field(default=(), max_length=4096)
    redis_url: str | None = Field(default=None, repr=False)
    deadline_ms: float = Field(default=20.0, gt=0, le=10_000)
    dead_after: int = Field(default=3, ge=1)
    retry_s: float = Field(default=30.0, gt=0)
    replace_after_s: float = Field(default=5.0, ge=0)
    transport: Literal["tcp", "mooncake"] = "tcp"
    mooncake_protocol: Literal["tcp", "rdma"] = "rdma"
    mooncake_device: str = ""
    max_connections: int = Field(default=256, ge=1)

    @field_validator("locations")
    @classmethod
    def _check_locations(cls, value: Any) -> Any:
        methods = ("publish", "withdraw", "lookup", "close")
        if value in ("peers", "redis") or all(callable(getattr(value, m, None)) for m in methods):
            return value
        raise ValueError(f"is peers, redis, or an object with {', '.join(methods)}; got {value!r}")

    @field_validator("listen", "advertise")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value

    @field_validator("members")
    @classmethod
    def _check_members(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for member in value:
            split_address(member)
        return value

    @model_validator(mode="after")
    def _check_reachable(self) -> WindowSettings:
        if self.locations == "redis" and self.redis_url is None:
            raise ValueError('locations "redis" needs redis_url')
        host = split_address(self.listen)[0]
        if ipaddress.ip_address(host).is_unspecified and self.advertise is None:
            raise ValueError(f"listening on {host} needs advertise: the address others reach")
        return self


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port" in parts; ValueError says what is wrong."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"wanted ip:port with a port up to 65535, got {address!r}")
    ipaddress.ip_address(host)
    return host, int(port)


IoName = Literal["posix", "odirect"]
CODEC_NAMES: Final = ("none", "zstd-1", "shuffle+zstd-1", "shuffle4+zstd-1")

_NAMESPACE = re.compile("[0-9a-f]{8}")


class KVTierConfig(BaseModel):
    """Everything `open` needs; the defaults fit one machine with a local directory.

    path:              directory of the persistent tier, shared by all processes that open it;
                       None keeps everything in host memory.
    host_bytes:        capacity of the host-memory tier, in bytes.
    secret:            32 bytes that key all digests; None = kept in the directory (mode 0600).
    allow_shared_scope: whether a namespace may have an empty salt.
    persist_state:     whether state slots reach the directory or live in host memory only.
    host_policy:       which block leaves host memory when it is full: "session", "tail-lru", "lru",
                       `module:Class`, or your own `EvictionPolicy` (an object for one cache, or
                       the class). `kvtier simulate` tries them on a trace.
    state_ttl_s:       seconds after its last use that a state slot stays in host memory.
    state_share:       share of host_bytes that state slots may occupy.
    queue_bytes:       bytes that may wait for the directory before puts are refused.
    segment_bytes:     size at which a segment file is sealed.
    bucket_s:          width of the time bucket of a segment, in seconds.
    sync_bytes, sync_s: fdatasync after this many bytes or seconds, whichever comes first.
    quota_bytes:       bytes of everything under `path`; None = only the free-space guard.
    class_quotas:      bytes of the segments of single classes.
    namespace_quotas:  bytes of the slots of single namespaces, by the first 8 digits of
                       `Namespace.id`.
    delete_grace_s:    seconds between the tombstone of a segment and the end of its file. On a
                       local file system readers hold the file open, and 0 is right.
    admission:         "all", or "second_hit": a record goes to the directory when it is put for
                       the second time; until then it lives in host memory only.
    min_free_share:    share of the file system that is never used.
    floor_s:           age below which an eviction counts as `evicted_before_floor`.
    auto_gc:           whether this process collects by itself, every `gc_interval_s` and when the
                       disk is full; `Cache.gc` collects in any case.
    encryption_key:    32 bytes; records below host memory are sealed with AES-256-GCM under keys
                       derived from it (extra `[crypto]`). None = in the clear.
    part_sums:         store a sum of each part too (layouts of 2 to 8 parts), so that
                       `load(parts=...)` can read parts of a record from the directory alone.
    io:                how segments are read and written: "posix" through the page cache, "odirect"
                       past it (where the file system refuses, `stats()["io"]` says so).
    io_threads:        threads for loads that are not waited for.
    compression:       how parts are stored below host memory: "none", "zstd-1", "shuffle+zstd-1"
                       (2-byte elements), "shuffle4+zstd-1"; or one of these by pattern of part
                       names, of which the longest that fits decides: {"*": "zstd-1", "L2.main":
                       "none"} (extra `[zstd]`). Not part of the identity.
    verify_threads:    threads that help to read and check the pieces of a long run of blocks; 0 =
                       the reading thread does all of it.
    readback_every:    one record in so many written is read back from storage to see whether it is
                       there and right (`stats()["readback"]`); 0 = none.
    file_mode, group:  permissions of the files of the store, for processes of several users: 0o660
                       and a group that they share. The secret has them, too.
    read_only:         open for inspection; every put is refused.
    mode:              "embedded": processes of one machine; "shared-fs": machines on one mount.
                       Kept with the store; None = as it was made, "embedded" for a new one.
    mount:             how machines keep in touch in mode "shared-fs".
    windows:           exchange of state slots with other machines; None = none.

    `classes`, all quotas, the water marks, `admission`, `min_free_share` and `floor_s` are kept
    with the directory (`policy.json`): not given here, they are what was stored there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    path: Path | None = None
    host_bytes: int = Field(default=1 << 30, ge=0)
    host_policy: str | Callable[[], Any] = "session"
    secret: bytes | None = Field(default=None, min_length=32, max_length=32, repr=False)
    allow_shared_scope: bool = True
    persist_state: bool = True
    state_ttl_s: float = Field(default=180.0, gt=0)
    state_share: float = Field(default=0.15, ge=0, le=1)
    queue_bytes: int = Field(default=512 << 20, gt=0)
    commit_blocks: int = Field(default=64, ge=1, le=256)
    commit_bytes: int = Field(default=8 << 20, gt=0)
    commit_delay_s: float = Field(default=0.02, ge=0)
    segment_bytes: int = Field(default=256 << 20, ge=8192, le=8 << 30)
    bucket_s: int = Field(default=6 * 3600, ge=1)
    sync_bytes: int = Field(default=64 << 20, gt=0)
    sync_s: float = Field(default=5.0, gt=0)
    quota_bytes: int | None = Field(default=None, gt=0)
    class_quotas: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict[str, int])
    namespace_quotas: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict[str, int])
    delete_grace_s: float = Field(default=0.0, ge=0)
    admission: Literal["all", "second_hit"] = "all"
    high_water: float = Field(default=0.95, gt=0, le=1)
    low_water: float = Field(default=0.90, gt=0, le=1)
    min_free_share: float = Field(default=0.05, ge=0, lt=1)
    floor_s: float = Field(default=72 * 3600.0, ge=0)
    gc_interval_s: float = Field(default=30.0, gt=0)
    auto_gc: bool = True
    classes: dict[str, RetentionClass] = Field(default_factory=lambda: dict(DEFAULT_CLASSES))
    part_sums: bool = False
    encryption_key: bytes | None = Field(default=None, min_length=32, max_length=32, repr=False)
    compression: str | dict[str, str] = "none"
    verify_threads: int = Field(default=1, ge=0, le=64)
    io: IoName = "posix"
    io_threads: int = Field(default=2, ge=1, le=64)
    readback_every: int = Field(default=1000, ge=0)
    read_only: bool = False
    file_mode: int = Field(default=0o600, ge=0o600, le=0o666)
    group: str | int | None = None
    windows: WindowSettings | None = None
    mode: Mode | None = None
    mount: MountSettings = Field(default_factory=MountSettings)

    @field_validator("path", mode="before")
    @classmethod
    def _usable_path(cls, value: object) -> object:
        if value == "":  # an unset variable, most likely; pathlib would take the current directory
            raise ValueError("an empty path names no directory; None keeps everything in memory")
        if isinstance(value, str) and "\0" in value:
            raise ValueError("a path has no null character")
        return value

    @field_validator("host_policy", mode="before")
    @classmethod
    def _policy_object(cls, value: object) -> object:
        # An object would be taken apart when settings are merged; what returns it is not.
        return value if isinstance(value, str) or callable(value) else lambda: value

    @field_validator("file_mode")
    @classmethod
    def _no_execution(cls, value: int) -> int:
        if value & 0o111:
            raise ValueError(f"files of a store are not executed, got {value:#o}")
        return value

    @field_validator("compression")
    @classmethod
    def _known_codecs(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        unknown = set([value] if isinstance(value, str) else value.values()).difference(CODEC_NAMES)
        if unknown:
            raise ValueError(
                f"codecs are {', '.join(CODEC_NAMES)}; got {', '.join(sorted(unknown))}"
            )
        return value

    @model_validator(mode="after")
    def _water_marks(self) -> KVTierConfig:
        if self.low_water > self.high_water:
            raise ValueError(
                f"low_water must not exceed high_water, got {self.low_water} > {self.high_water}"
            )
        if self.mode == "shared-fs" and self.path is None:
            raise ValueError("mode shared-fs needs a path, got none")
        for name in self.classes:
            check_class_name(name)
        unknown = set(self.class_quotas) - set(self.classes)
        if unknown:
            raise ValueError(f"class_quotas names classes that are not there: {sorted(unknown)}")
        if not all(_NAMESPACE.fullmatch(name) for name in self.namespace_quotas):
            raise ValueError(
                "namespace_quotas names namespaces by 8 lower-case hex digits,"
                f" got {sorted(self.namespace_quotas)}"
            )
        if len(self.classes) > 255:
            raise ValueError(f"at most 255 retention classes work, got {len(self.classes)}")
        return self


def _named(error: Mapping[str, Any]) -> str:
    """One fault with its field; what concerns several fields says so itself."""
    message = str(error["msg"]).removeprefix("Value error, ")
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {message}" if where else message


def parse_config(config: KVTierConfig | Path | str | None, **changes: Any) -> KVTierConfig:
    """A path, a ready config or nothing, plus single settings.

    raises: ConfigError, naming the wrong field.
    """
    try:
        if isinstance(config, KVTierConfig):
            return KVTierConfig.model_validate({**config.model_dump(exclude_unset=True), **changes})
        return KVTierConfig.model_validate({"path": config, **changes})
    except ValidationError as cause:
        lines = "; ".join(_named({**error}) for error in cause.errors(include_input=False))
        raise ConfigError(f"invalid cache configuration: {lines}") from cause


def permissions_of(config: KVTierConfig) -> Permissions:
    """raises: ConfigError for a group that this machine does not know."""
    gid = config.group
    if isinstance(gid, str):
        try:
            gid = grp.getgrnam(gid).gr_gid
        except KeyError:
            raise ConfigError(f"group: there is no group {gid!r} on this machine") from None
    return Permissions(config.file_mode, gid)
