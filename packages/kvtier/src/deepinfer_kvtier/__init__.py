"""Tiered cache for attention state: find, load, store, expire and repair it.

cache = deepinfer_kvtier.open("directory")
ns = cache.namespace(layout, model="my-model", salt="tenant")
match = ns.match(tokens)
"""

from __future__ import annotations

from deepinfer_kvtier.cache import Cache, init, open
from deepinfer_kvtier.clock import Clock, SystemClock
from deepinfer_kvtier.config import KVTierConfig
from deepinfer_kvtier.errors import (
    BufferShapeError,
    ClosedError,
    ConfigError,
    KVTierError,
    StoreFormatError,
    UncacheableInput,
)
from deepinfer_kvtier.events import EventQueue
from deepinfer_kvtier.group import GroupAgree
from deepinfer_kvtier.identity import ChainHasher, MediaItem, Shard
from deepinfer_kvtier.layout import LayoutSpec, Part, parts
from deepinfer_kvtier.match import Match
from deepinfer_kvtier.memory.eviction import EvictionPolicy, Use
from deepinfer_kvtier.namespace import Namespace
from deepinfer_kvtier.plan import Cost, Plan
from deepinfer_kvtier.pools import DevicePool, PoolSlots
from deepinfer_kvtier.records import FlushReport, KVEvent, LoadResult, Span, StateHit, Status
from deepinfer_kvtier.registration import Registration
from deepinfer_kvtier.retention import RetentionClass, traffic_class
from deepinfer_kvtier.store.mount import MountSettings
from deepinfer_kvtier.tickets import LoadJob, PutTicket
from deepinfer_kvtier.tier import ScanEntry, Tier, TierCaps
from deepinfer_kvtier.tiers.fleet_config import FleetTierConfig
from deepinfer_kvtier.tiers.mooncake import MooncakeTierConfig
from deepinfer_kvtier.tiers.objects import S3TierConfig
from deepinfer_kvtier.upkeep.gc import GcReport
from deepinfer_kvtier.windows.settings import WindowSettings

__version__ = "0.1.0"

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
