"""`PrefixStore` on `deepinfer_kvtier`. The only module that imports that package."""

from __future__ import annotations

from pathlib import Path

from deepinfer_engine.backend.base import CacheLayout
from deepinfer_engine.kv.store import PrefixStore


def open_store(directory: Path, layout: CacheLayout, *, l1_bytes: int = 256 << 20) -> PrefixStore:
    """Open (or create) a cache directory for this layout; several processes may share it."""
    raise SystemExit(f"{directory} {layout} {l1_bytes}")
