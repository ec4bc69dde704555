"""From what a caller writes to a tier: a URL, a config, or a ready object."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from deepinfer_kvtier.base.config import KVTierConfig
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.files import IoEngine
from deepinfer_kvtier.base.timing import Clock
from deepinfer_kvtier.flow.tier import Tier
from deepinfer_kvtier.remote.tiers.fleet_config import FleetTierConfig
from deepinfer_kvtier.remote.tiers.mooncake import MooncakeTier, MooncakeTierConfig, connect
from deepinfer_kvtier.remote.tiers.objects import S3TierConfig, open_objects
from deepinfer_kvtier.remote.tiers.s3 import S3Tier

TierConfig = S3TierConfig | FleetTierConfig | MooncakeTierConfig
# A large bucket takes longer to read in than an engine wants to wait; the rest comes meanwhile.
FIRST_POLL_S = 5.0
_OBJECT_SCHEMES = ("s3", "file", "memory")


def open_tiers(
    specs: Sequence[Tier | TierConfig | str], config: KVTierConfig, clock: Clock, io: IoEngine
) -> list[Tier]:
    """The tiers in order; what is a `Tier` already is passed on. raises: ConfigError."""
    if not isinstance(specs, (list, tuple)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"tiers is a list, for example tiers=[url], got {type(specs).__name__}")
    tiers: list[Tier] = []
    try:
        for spec in specs:
            parsed = parse_tier(spec) if isinstance(spec, str) else spec
            if isinstance(parsed, S3TierConfig):
                tiers.append(_open_s3(parsed, config, clock))
            elif isinstance(parsed, FleetTierConfig):
                tiers.append(_open_fleet(parsed, config, clock, io))
            elif isinstance(parsed, MooncakeTierConfig):
                _need_secret(config, parsed.name)
                tiers.append(MooncakeTier(parsed, connect(parsed), clock))
            else:
                tiers.append(_checked(parsed))
    except BaseException:
        for tier in tiers:
            if tier not in specs:  # what the caller made stays the caller's
                tier.close()
        raise
    return tiers


def _checked(tier: Tier) -> Tier:
    if not hasattr(tier, "get_into"):
        raise ConfigError(f"a tier is a URL, a config or a Tier, got {tier!r}")
    return tier


def parse_tier(url: str) -> TierConfig:
    """The config a URL stands for. raises: ConfigError, which never repeats the URL."""
    scheme = url.partition("://")[0]
    if scheme in _OBJECT_SCHEMES:
        return S3TierConfig.parse(url)
    if scheme == "mooncake":
        return MooncakeTierConfig.parse(url)
    raise ConfigError("a tier URL starts with s3:// or mooncake:// (or file:// for trials)")


def _open_s3(wanted: S3TierConfig, config: KVTierConfig, clock: Clock) -> S3Tier:
    _need_secret(config, wanted.name)
    tier = S3Tier(
        wanted,
        open_objects(wanted),
        classes=config.classes,
        clock=clock,
        read_only=config.read_only,
    )

    def first_poll() -> None:
        # A store that is not there now is polled again later; the cache works without it meanwhile.
        # RuntimeError: the cache was closed before the poll had ended.
        with contextlib.suppress(OSError, RuntimeError):
            tier.maintain()

    poll = threading.Thread(target=first_poll, name=f"kvtier-{wanted.name}-start", daemon=True)
    poll.start()
    poll.join(FIRST_POLL_S)
    return tier


def _open_fleet(wanted: FleetTierConfig, config: KVTierConfig, clock: Clock, io: IoEngine) -> Tier:
    _need_secret(config, wanted.name)
    # It brings an event loop, which who does not use it should not wait for.
    from deepinfer_kvtier.remote.tiers.fleet import FleetTier

    try:
        return FleetTier(wanted, config, clock, io)
    except OSError as cause:
        raise ConfigError(f"cannot use the store at {wanted.path}: {cause}") from cause


def _need_secret(config: KVTierConfig, name: str) -> None:
    if config.secret is None:
        raise ConfigError(
            f"the tier {name!r} is shared between machines: they all need the same `secret`"
            " (32 bytes), else none finds what another has stored"
        )
