"""How commands open a directory: to look, or for one piece of work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer_kvtier.api.cache import Cache, open
from deepinfer_kvtier.base.config import parse_config
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.base.timing import SystemClock
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.store_files import SECRET_FILE


def require(store: Path) -> None:
    """raises: ConfigError when there is no cache."""
    if not (store / "FORMAT.json").exists():
        raise ConfigError(f"no cache at {store}: FORMAT.json is missing; check the path")


def for_work(store: Path, **changes: Any) -> Cache:
    """Open to change something: nothing is collected on the side and no setting is stored."""
    require(store)
    # Nothing is looked up by its tokens: a secret that is kept elsewhere is not needed.
    secret = None if (store / SECRET_FILE).exists() else bytes(32)
    settings = parse_config(store, host_bytes=0, auto_gc=False, secret=secret, **changes)
    return Cache(settings, SystemClock(), PosixIo())


def to_look(store: Path) -> Cache:
    """Open for inspection."""
    return open(store, read_only=True, host_bytes=0)


def disk_of(cache: Cache) -> DiskTier:
    """The directory tier of a cache that was opened with a path."""
    assert cache.disk is not None
    return cache.disk
