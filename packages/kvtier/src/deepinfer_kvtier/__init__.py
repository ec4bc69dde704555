"""Tiered cache for attention state: find, load, store, expire and repair it.

cache = deepinfer_kvtier.open("directory")
ns = cache.namespace(layout, model="my-model", salt="tenant")
match = ns.match(tokens)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from deepinfer_kvtier.api.cache import Cache, init, open
    from deepinfer_kvtier.api.namespace import Namespace
    from deepinfer_kvtier.base.config import (
        KVTierConfig,
        MountSettings,
        RetentionClass,
        WindowSettings,
        traffic_class,
    )
    from deepinfer_kvtier.base.device_pool import DevicePool, PoolSlots
    from deepinfer_kvtier.base.errors import (
        BufferShapeError,
        ClosedError,
        ConfigError,
        KVTierError,
        StoreFormatError,
        UncacheableInput,
    )
    from deepinfer_kvtier.base.events import EventQueue
    from deepinfer_kvtier.base.identity import ChainHasher, MediaItem, Shard
    from deepinfer_kvtier.base.timing import Clock, SystemClock
    from deepinfer_kvtier.base.values import (
        FlushReport,
        KVEvent,
        LayoutSpec,
        LoadResult,
        Part,
        Span,
        StateHit,
        Status,
        parts,
    )
    from deepinfer_kvtier.flow.handles import LoadJob, Match, PutTicket
    from deepinfer_kvtier.flow.plan import Cost, Plan
    from deepinfer_kvtier.flow.tier import Registration, ScanEntry, Tier, TierCaps
    from deepinfer_kvtier.host.eviction import EvictionPolicy, Use
    from deepinfer_kvtier.integrations.group import GroupAgree
    from deepinfer_kvtier.log.gc import GcReport
    from deepinfer_kvtier.remote.tiers.fleet_config import FleetTierConfig
    from deepinfer_kvtier.remote.tiers.mooncake import MooncakeTierConfig
    from deepinfer_kvtier.remote.tiers.objects import S3TierConfig

__version__ = "0.2.0"

_PLACES: Final = {
    ".api.cache": (
        "Cache",
        "init",
        "open",
    ),
    ".integrations.group": ("GroupAgree",),
    ".api.namespace": ("Namespace",),
    ".base.config": (
        "KVTierConfig",
        "MountSettings",
        "RetentionClass",
        "WindowSettings",
        "traffic_class",
    ),
    ".base.device_pool": (
        "DevicePool",
        "PoolSlots",
    ),
    ".base.errors": (
        "BufferShapeError",
        "ClosedError",
        "ConfigError",
        "KVTierError",
        "StoreFormatError",
        "UncacheableInput",
    ),
    ".base.events": ("EventQueue",),
    ".base.identity": (
        "ChainHasher",
        "MediaItem",
        "Shard",
    ),
    ".base.timing": (
        "Clock",
        "SystemClock",
    ),
    ".base.values": (
        "FlushReport",
        "KVEvent",
        "LayoutSpec",
        "LoadResult",
        "Part",
        "Span",
        "StateHit",
        "Status",
        "parts",
    ),
    ".flow.handles": (
        "LoadJob",
        "Match",
        "PutTicket",
    ),
    ".flow.plan": (
        "Cost",
        "Plan",
    ),
    ".flow.tier": (
        "Registration",
        "ScanEntry",
        "Tier",
        "TierCaps",
    ),
    ".host.eviction": (
        "EvictionPolicy",
        "Use",
    ),
    ".log.gc": ("GcReport",),
    ".remote.tiers.fleet_config": ("FleetTierConfig",),
    ".remote.tiers.mooncake": ("MooncakeTierConfig",),
    ".remote.tiers.objects": ("S3TierConfig",),
}
_MODULE_OF: Final = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """What is used is loaded, with all it needs, when it is first used: importing costs nothing."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


__all__ = [
    "BufferShapeError",
    "Cache",
    "ChainHasher",
    "Clock",
    "ClosedError",
    "ConfigError",
    "Cost",
    "DevicePool",
    "EventQueue",
    "EvictionPolicy",
    "FleetTierConfig",
    "FlushReport",
    "GcReport",
    "GroupAgree",
    "KVEvent",
    "KVTierConfig",
    "KVTierError",
    "LayoutSpec",
    "LoadJob",
    "LoadResult",
    "Match",
    "MediaItem",
    "MooncakeTierConfig",
    "MountSettings",
    "Namespace",
    "Part",
    "Plan",
    "PoolSlots",
    "PutTicket",
    "Registration",
    "RetentionClass",
    "S3TierConfig",
    "ScanEntry",
    "Shard",
    "Span",
    "StateHit",
    "Status",
    "StoreFormatError",
    "SystemClock",
    "Tier",
    "TierCaps",
    "UncacheableInput",
    "Use",
    "WindowSettings",
    "__version__",
    "init",
    "open",
    "parts",
    "traffic_class",
]
