"""`KVTierStorage` for SGLang's HiCache (`HiCacheStorage`), loaded by name.

python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \\
  --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \\
  '{"backend_name": "kvtier", "module_path": "deepinfer_kvtier.integrations.sglang",
    "class_name": "KVTierStorage", "interface_v1": 1, "kvtier": {"path": "/var/cache/kv"}}'

SGLang names pages by its own chained hashes; a record here is such a name inside a namespace of
model, ranks, pool and page size. A page is copied once between SGLang's host pool and the cache.
"""

# SGLang is not installed where this package is checked: its classes are unknown there.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransferResult,
)

import deepinfer_kvtier as kvtier

__all__ = ["KVTierStorage"]

log = logging.getLogger(__name__)

_KV = str(PoolName.KV)


class KVTierStorage(HiCacheStorage):
    """One for each rank; all ranks of a machine may share the directory.

    storage_config: SGLang's; `extra_config` takes `kvtier` (fields of `KVTierConfig`), `salt` (one
                    for the whole server: SGLang's keys carry no tenant), `traffic_class`.
    raises:         ConfigError.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        settings = extra.get("kvtier")
        if not isinstance(settings, dict):
            raise kvtier.ConfigError(
                'hicache-storage-backend-extra-config needs "kvtier": {"path": DIRECTORY}, the'
                " fields of KVTierConfig"
            )
        self._cache = kvtier.open(**settings)
        self._config = storage_config
        self._salt = str(extra.get("salt", ""))
        self._cls = str(extra.get("traffic_class", "chat"))
        if self._cls not in self._cache.config.classes:
            self._cache.close()
            raise kvtier.ConfigError(
                f"traffic_class must be one of {sorted(self._cache.config.classes)},"
                f" got {self._cls!r}"
            )
        self._namespaces: dict[tuple[str, int], kvtier.Namespace] = {}
        self._epoch = 0
        self.registered_pools: dict[str, Any] = {}

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host
        self.registered_pools[_KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools[str(host_pool_name)] = host_pool

    # -- lookups

    def exists(self, key: str) -> bool:
        return self._leading(_KV, [key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Count of leading pages that are there."""
        return self._leading(_KV, keys)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """The prefix for which the KV pages and what every further pool asks for are there."""
        kv_pages = self._leading(_KV, keys)
        hits: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        usable = kv_pages
        for transfer in pool_transfers or ():
            if usable == 0:
                break
            pages = self._pool_prefix(transfer, keys[:kv_pages])
            if pages:
                hits[transfer.name] = pages
            usable = min(usable, pages)
        return PoolTransferResult(usable, hits)

    # -- whole batches of pages

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._read_pages(_KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._write_pages(_KV, keys, host_indices, extra_info)

    def batch_get_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            t.name: self._read_pages(str(t.name), t.keys or [], t.host_indices) for t in transfers
        }

    def batch_set_v2(
        self, transfers: Sequence[Any], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        return {
            t.name: self._write_pages(str(t.name), t.keys or [], t.host_indices, extra_info)
            for t in transfers
        }

    # -- single tensors

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill the given CPU tensors; None for each one that is not there."""
        found: list[torch.Tensor | None] = []
        for key, target in zip(keys, target_locations or [None] * len(keys), strict=True):
            if target is None:
                found.append(None)
                continue
            size = target.numel() * target.element_size()
            ns = self._namespace(_KV, size)
            row: NDArray[np.uint8] = np.empty((1, size), dtype=np.uint8)
            good = self._load(ns, [self._digest(ns, key)], row)
            if good[0]:
                page = torch.from_numpy(row[0]).view(target.dtype)
                target.copy_(page.reshape(target.shape))
            found.append(target if good[0] else None)
        return found

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store CPU tensors as consecutive pages of one chain; whether all were taken."""
        given = values if values is not None else target_locations
        if given is None:
            return False
        stored = True
        previous: str | None = None
        for key, value in zip(keys, given, strict=True):
            data = _bytes_of(value).reshape(1, -1)
            ns = self._namespace(_KV, data.nbytes)
            parent = ns.root if previous is None else self._digest(ns, previous)
            stored &= all(self._put(ns, [self._digest(ns, key)], data, parent))
            previous = key
        return stored

    def clear(self) -> bool:
        """Forget everything, as far as this process is concerned: later reads miss.

        What others wrote stays in the directory until its time is over.
        """
        self._epoch += 1
        self._namespaces.clear()
        return True

    def get_stats(self) -> None:
        """Nothing: SGLang takes its own `StorageMetrics` or None here, and stops at all else."""

    def close(self) -> None:
        """Write what is queued and give the directory back."""
        self._cache.close()

    # -- inside

    def _namespace(self, pool: str, page_bytes: int) -> kvtier.Namespace:
        found = self._namespaces.get((pool, page_bytes))
        if found is None:
            config = self._config
            ranks = max(1, config.pp_size) * max(1, config.attn_cp_size)
            place = config.pp_rank * max(1, config.attn_cp_size) + config.attn_cp_rank
            if not config.is_mla_model:
                # Ranks of MLA models hold the same bytes; of others, each its own heads.
                place = place * config.tp_size + config.tp_rank
                ranks *= config.tp_size
            found = self._cache.namespace(
                kvtier.LayoutSpec(1, {"block": kvtier.parts((pool, page_bytes))}),
                model={
                    "engine": "sglang",
                    "model": str(config.model_name),
                    "pages": _arrangement(self.registered_pools.get(pool)),
                    "epoch": self._epoch,
                },
                salt=self._salt,
                shard=kvtier.Shard(place, ranks, "sglang"),
            )
            self._namespaces[pool, page_bytes] = found
        return found

    def _digest(self, ns: kvtier.Namespace, key: str) -> bytes:
        return blake3(key.encode(), key=ns.root).digest()

    def _page_bytes(self, pool: str) -> int | None:
        host_pool = self.registered_pools.get(pool)
        if host_pool is None:
            return None
        page = host_pool.get_dummy_flat_data_page()
        return int(page.numel() * page.element_size())

    def _leading(self, pool: str, keys: Sequence[str]) -> int:
        size = self._page_bytes(pool)
        if size is None or not keys:
            return 0
        ns = self._namespace(pool, size)
        digests = [self._digest(ns, key) for key in keys]
        with ns.match(
            range(len(keys)), digests=digests, want=("block",), leave_last=False
        ) as match:
            return match.n_blocks

    def _pool_prefix(self, transfer: Any, keys: Sequence[str]) -> int:
        pool = str(transfer.name)
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return self._leading(pool, keys)
        trailing = max(1, len(transfer.keys or ()))
        for end in range(len(keys), 0, -1):
            tail = keys[max(0, end - trailing) : end]
            if self._leading(pool, tail) == len(tail):
                return end
        return 0

    def _read_pages(self, pool: str, keys: Sequence[str], indices: Any) -> list[bool]:
        pages = self._pages(pool, keys, indices, "read")
        if pages is None:
            return [False] * len(keys)
        host_pool, size, places = pages
        ns = self._namespace(pool, size)
        rows: NDArray[np.uint8] = np.empty((len(keys), size), dtype=np.uint8)
        good = self._load(ns, [self._digest(ns, key) for key in keys], rows)
        dtype = host_pool.get_dummy_flat_data_page().dtype
        for i, place in enumerate(places):
            if good[i]:
                page = torch.from_numpy(rows[i]).view(dtype)
                host_pool.set_from_flat_data_page(place, page)
        return good

    def _write_pages(
        self, pool: str, keys: Sequence[str], indices: Any, extra_info: Any
    ) -> list[bool]:
        pages = self._pages(pool, keys, indices, "write")
        if pages is None:
            return [False] * len(keys)
        host_pool, size, places = pages
        ns = self._namespace(pool, size)
        rows: NDArray[np.uint8] = np.empty((len(keys), size), dtype=np.uint8)
        for i, place in enumerate(places):
            rows[i] = _bytes_of(host_pool.get_data_page(place, flat=True))
        before = getattr(extra_info, "prefix_keys", None)
        parent = self._digest(ns, before[-1]) if before else ns.root
        return self._put(ns, [self._digest(ns, key) for key in keys], rows, parent)

    def _pages(
        self, pool: str, keys: Sequence[str], indices: Any, what: str
    ) -> tuple[Any, int, list[int]] | None:
        """(host pool, bytes of a page, first slot of each page); None where they do not fit."""
        size = self._page_bytes(pool)
        host_pool = self.registered_pools.get(pool)
        per = int(getattr(host_pool, "page_size", 1) or 1)
        if size is None or not keys or indices is None or indices.numel() != len(keys) * per:
            count = 0 if indices is None else indices.numel()
            log.error(
                "kvtier cannot %s %d pages of pool %s at %d slots", what, len(keys), pool, count
            )
            return None
        return host_pool, size, [int(indices[i * per]) for i in range(len(keys))]

    def _load(
        self, ns: kvtier.Namespace, digests: Sequence[bytes], rows: NDArray[np.uint8]
    ) -> list[bool]:
        """Fill rows; pages behind a missing one are looked for too, each for itself."""
        good = [False] * len(digests)
        at = 0
        while at < len(digests):
            rest = digests[at:]
            with ns.match(
                range(len(rest)), digests=rest, want=("block",), leave_last=False
            ) as match:
                n = match.n_blocks
                if n:
                    result = ns.load(match, dst=rows[at : at + n], wait=True).wait()
                    good[at : at + n] = [s is kvtier.Status.OK for s in result.blocks]
            at += n + 1
        return good

    def _put(
        self,
        ns: kvtier.Namespace,
        digests: Sequence[bytes],
        rows: NDArray[np.uint8],
        parent: bytes,
    ) -> list[bool]:
        ticket = ns.put(digests, rows, parents=parent, first_block=1, cls=self._cls)
        return list(ticket.accepted)


def _arrangement(host_pool: Any) -> list[str]:
    """What decides the meaning of a page's bytes beside their count: order, stored and true type.

    FP8 of either kind is stored as bytes, and a page is as long layer by layer as token by token.
    """
    device_pool = getattr(host_pool, "device_pool", None)
    facts = (getattr(host_pool, "layout", None), getattr(host_pool, "dtype", None))
    return [str(fact) for fact in (*facts, getattr(device_pool, "dtype", None))]


def _bytes_of(tensor: Any) -> NDArray[np.uint8]:
    """A CPU tensor's bytes, flat, without a copy where it is contiguous."""
    flat: Callable[[], Any] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy
    return flat()
