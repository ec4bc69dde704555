"""Settings of the window exchange, part of `KVTierConfig`."""

from __future__ import annotations

import ipaddress
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, field_validator, model_validator

from deepinfer_kvtier.windows.directory import WindowDirectory
from deepinfer_kvtier.windows.wire import split_address


class WindowSettings(BaseModel):
    """How state windows are shared with other machines.

    key:          32 bytes that all peers share: proves that a peer is one.
    directory:    "peers" = the members keep the directory among themselves, "redis" = at
                  `redis_url`, or an object such as `LocalDirectory` that several caches of one
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
    directory: Literal["peers", "redis"] | InstanceOf[WindowDirectory] = "peers"
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
        if self.directory == "redis" and self.redis_url is None:
            raise ValueError('directory "redis" needs redis_url')
        host = split_address(self.listen)[0]
        if ipaddress.ip_address(host).is_unspecified and self.advertise is None:
            raise ValueError(f"listening on {host} needs advertise: the address others reach")
        return self
