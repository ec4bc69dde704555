"""Settings of one cache: parsed once at the edge, frozen afterwards."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deepinfer_kvtier.coding.codec import CODECS
from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.retention import DEFAULT_CLASSES, RetentionClass, check_class_name
from deepinfer_kvtier.store.engines import IoName
from deepinfer_kvtier.store.mount import Mode, MountSettings
from deepinfer_kvtier.windows.settings import WindowSettings

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
                       past it (where the file system refuses, `stats()["io"]` says so), "usrbio"
                       by 3FS's user-space rings (untried on a real 3FS).
    io_threads:        threads for loads that are not waited for.
    compression:       how parts are stored below host memory: "none", "zstd-1", "shuffle+zstd-1"
                       (2-byte elements), "shuffle4+zstd-1"; or one of these by pattern of part
                       names, of which the longest that fits decides: {"*": "zstd-1", "L2.main":
                       "none"} (extra `[zstd]`). Not part of the identity.
    verify_threads:    threads that help to read and check the pieces of a long run of blocks; 0 =
                       the reading thread does all of it.
    readback_every:    one record in so many written is read back from storage to see whether it is
                       there and right (`stats()["readback"]`); 0 = none.
    read_only:         open for inspection; every put is refused.
    mode:              "embedded": processes of one machine; "shared-fs": machines on one mount.
                       Kept with the store; None = as it was made, "embedded" for a new one.
    mount:             how machines keep in touch in mode "shared-fs".
    windows:           exchange of state slots with other machines; None = none.

    `classes`, all quotas, the water marks, `admission`, `min_free_share` and `floor_s` are kept
    with the directory (`deepinfer_kvtier.policy`): not given here, they are what was stored there.
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

    @field_validator("compression")
    @classmethod
    def _known_codecs(cls, value: str | dict[str, str]) -> str | dict[str, str]:
        unknown = set([value] if isinstance(value, str) else value.values()) - CODECS.keys()
        if unknown:
            raise ValueError(f"codecs are {', '.join(CODECS)}; got {', '.join(sorted(unknown))}")
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
