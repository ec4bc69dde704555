"""The parts of SGLang's HiCache storage interface that the adapter touches, with the real names."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class PoolName(str, Enum):  # noqa: UP042 - as in SGLang
    KV = "kv"
    SWA = "swa"
    INDEXER = "indexer"

    def __str__(self) -> str:
        return self.value


class PoolHitPolicy(str, Enum):  # noqa: UP042 - as in SGLang
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict | None = None


@dataclass
class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None = None
    extra_info: dict | None = None


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None] | int: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def get_stats(self) -> StorageMetrics | None:
        return None


class StorageMetrics:
    """Lists of pages and bandwidths since the last call; only this type is taken."""


def log_storage_metrics(storage: HiCacheStorage) -> None:
    """What the scheduler does after every step where metrics are on."""
    metrics = storage.get_stats()
    assert metrics is None or isinstance(metrics, StorageMetrics)


class HostPool:
    """A host pool: `slots` tokens in pages of `page_size`, one flat tensor a page."""

    def __init__(self, slots: int, page_size: int, width: int, dtype: torch.dtype) -> None:
        self.page_size = page_size
        self.layout = "layer_first"
        self.dtype = dtype
        self.device_pool = types.SimpleNamespace(dtype=dtype)
        self.data = torch.zeros((slots, width), dtype=dtype)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.page_size * self.data.shape[1], dtype=self.data.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.data[index : index + self.page_size]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.data[index : index + self.page_size] = data_page.reshape(self.page_size, -1)


def storage_config(path: str, **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kvtier",
        "module_path": "deepinfer_kvtier.integrations.sglang",
        "class_name": "KVTierStorage",
        "kvtier": {"path": path, "commit_delay_s": 0.0},
        **changes.pop("extra", {}),
    }
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "tiny",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**fields, **changes})


def install(monkeypatch: Any) -> None:
    """Put the stubs where `import sglang...` finds them, for one test."""
    name = "sglang.srt.mem_cache.hicache_storage"
    module = types.ModuleType(name)
    for thing in (HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult):
        setattr(module, thing.__name__, thing)
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = ".".join(parts[:i])
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "deepinfer_kvtier.integrations.sglang", raising=False)
