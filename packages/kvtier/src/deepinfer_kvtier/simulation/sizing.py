"""How much disk a given traffic needs, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from deepinfer_kvtier.base.errors import ConfigError

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one day, and how it is kept.

    tokens_per_day:   prompt tokens of all requests.
    new_share:        share of them that no cache had: only these are stored.
    bytes_per_token:  of the stored blocks; 891 for 128-token blocks of 114,048 bytes.
    tokens_per_request: mean prompt length.
    classes:          class -> (share of the new tokens, days they are kept after the last use).
    replicas:         copies that the storage system keeps.
    state_bytes:      window state of one sequence.
    states_per_request: how many of them would be stored if windows were persisted.
    """

    tokens_per_day: float
    new_share: float
    bytes_per_token: float
    tokens_per_request: float
    classes: Mapping[str, tuple[float, float]]
    replicas: float = 3.0
    state_bytes: int = 1_415_040
    states_per_request: float = 1.0

    def __post_init__(self) -> None:
        shares = sum(share for share, _ in self.classes.values())
        if not 0.999 <= shares <= 1.001:
            raise ConfigError(f"the shares of the classes must add up to 1, got {shares:g}")
        positive = (self.tokens_per_day, self.bytes_per_token, self.tokens_per_request)
        if not all(0 < value < inf for value in (*positive, self.replicas)) or not (
            0 <= self.new_share <= 1
        ):
            raise ConfigError("traffic needs values above 0, and a share of new tokens in 0..1")


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes unless named otherwise; `window_*` is what persisting windows would take on top."""

    new_bytes_per_day: float
    one_copy_bytes: float
    disk_bytes: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    requests_per_day: float
    blocks_per_day: float
    window_bytes_per_day: float
    window_disk_bytes: float
    window_share: float


def size_for(traffic: Traffic, *, block_tokens: int = 128) -> Size:
    """Capacity in steady state. A record that is used again is kept longer: this is a lower bound
    by the share of blocks that are hit after their first day."""
    new_tokens = traffic.tokens_per_day * traffic.new_share
    per_day = new_tokens * traffic.bytes_per_token
    days = sum(share * kept for share, kept in traffic.classes.values())
    requests = traffic.tokens_per_day / traffic.tokens_per_request
    windows = requests * traffic.states_per_request * traffic.state_bytes
    read = traffic.tokens_per_day * (1 - traffic.new_share) * traffic.bytes_per_token
    return Size(
        new_bytes_per_day=per_day,
        one_copy_bytes=per_day * days,
        disk_bytes=per_day * days * traffic.replicas,
        write_bytes_per_s=per_day / DAY_S,
        read_bytes_per_s=read / DAY_S,
        requests_per_day=requests,
        blocks_per_day=new_tokens / block_tokens,
        window_bytes_per_day=windows,
        window_disk_bytes=windows * days * traffic.replicas,
        window_share=windows / (windows + per_day) if windows + per_day else 0.0,
    )
