"""Settings of a mounted store whose index is kept by a location service."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretBytes


class FleetTierConfig(BaseModel):
    """A mounted store with a location service.

    path:        of the shared file system; made for mode "shared-fs".
    locations:   all shards, the same list on every machine: "tcp://host:port", "redis://host/0".
    key:         shared key of the TCP shards.
    deadline_s:  of one round trip to a shard.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    path: Path
    locations: tuple[str, ...] = Field(min_length=1, repr=False)
    key: SecretBytes = SecretBytes(b"")
    name: str = "fleet"
    deadline_s: float = Field(default=0.05, gt=0)
