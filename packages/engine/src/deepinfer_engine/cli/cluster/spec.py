"""The file that `deepinfer up` reads: which roles, how many of each, what they need."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings

Role = Literal["router", "prefill", "decode", "encode"]
ROLES: tuple[Role, ...] = ("encode", "prefill", "decode", "router")


class RoleSpec(BaseModel):
    """How many processes of a role there are, and what each of them is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(default=1, ge=0, le=256)
    cpus: float = Field(default=1.0, gt=0)
    gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """On top of the file's `settings`, for this role alone."""

    @property
    def bundle(self) -> dict[str, float]:
        gpu = {"GPU": self.gpus} if self.gpus else {}
        return {"CPU": self.cpus, **gpu, **self.resources}


class ClusterSpec(BaseModel):
    """A whole cluster. `address`: of Ray, where it is not the one of this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(default="deepinfer", pattern="^[a-z0-9-]{1,40}$")
    address: str = "auto"
    key_file: Path
    """64 hexadecimal digits that routers and workers share; made if it is not there."""
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """As in `deepinfer.toml`, for all roles."""
    router: RoleSpec = RoleSpec()
    prefill: RoleSpec = RoleSpec()
    decode: RoleSpec = RoleSpec()
    encode: RoleSpec = RoleSpec(count=0)
    """With some, prefill workers have pictures encoded there unless `encoding` says otherwise."""

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        for role in ROLES:
            if self.of(role).api_key is not None:
                raise ValueError("api_key: a cluster's keys stand in a file: api_key_file")
        return self

    def role(self, role: Role) -> RoleSpec:
        return getattr(self, role)

    def of(self, role: Role) -> Settings:
        """The settings that a role runs with. Raises ValidationError."""
        own: dict[str, Any] = {}
        if role == "prefill" and self.encode.count:
            own["encoding"] = "workers"
        return Settings.model_validate({**own, **self.settings, **self.role(role).settings})


def read_spec(path: Path) -> ClusterSpec:
    """Raises ConfigError naming file and field."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    values.setdefault("key_file", str(path.with_suffix(".key")))
    try:
        return ClusterSpec.model_validate(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{path}, {name}: {first['msg']}") from exc
