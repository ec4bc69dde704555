"""Other stores of attention state, measured beside ours where they are installed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64
_reason = ""

Work = Callable[[], object]


def why() -> str:
    """Why the last peer asked for did not take part."""
    return _reason


class LMCache:
    """LMCache 0.5.6: its storage manager with host memory, and a disk when asked for."""

    def __init__(self, disk: Path | None) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager
        from lmcache.v1.token_database import ChunkedTokenDatabase

        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        self._torch = torch
        in_memory = disk is None  # with a disk, memory only stages what goes there
        settings: dict[str, Any] = {"chunk_size": 128, "max_local_cpu_size": 0.5}
        settings["local_cpu"] = in_memory
        if disk is not None:
            disk.mkdir(exist_ok=True)
            settings |= {"local_disk": str(disk), "max_local_disk_size": 2.0}
        config = LMCacheEngineConfig.from_defaults(**settings)
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=(1, 1, 128, 1, 890),
        )
        self.database = ChunkedTokenDatabase(config, metadata)
        self.manager = StorageManager(config, metadata, EventManager())
        self._disk = self.manager.storage_backends.get("LocalDiskBackend")

    def keys(self, tokens: np.ndarray) -> list[Any]:
        whole = tokens[: len(tokens) // 128 * 128].tolist()
        return [key for _, _, key in self.database.process_tokens(whole)]

    def lookup(self, tokens: np.ndarray) -> Work:
        """Keys of a prompt and the length of the prefix that is there; all of it is."""
        self._put(self.keys(tokens), np.zeros((len(tokens) // 128, 64), np.uint8))

        def work() -> None:
            found, _ = self.manager.batched_contains(self.keys(tokens))
            assert found == len(tokens) // 128

        return work

    def filled(self, source: np.ndarray) -> Work:
        """Stores rows; returns the work that copies them all out again."""
        tokens = np.arange(len(source) * 128 + 1)
        keys = self.keys(tokens)
        self._settle(keys, self._put(keys, source))
        get = self.manager.batched_get if self._disk is None else self._disk.batched_get_blocking
        target = self._torch.empty(source.shape, dtype=self._torch.uint8)

        def work() -> None:
            for start in range(0, len(keys), BATCH):
                found = get(keys[start : start + BATCH])
                for i, item in enumerate(found, start=start):
                    target[i].copy_(item.tensor.view(-1))
                    item.ref_count_down()

        work()
        assert np.array_equal(target.numpy(), source)
        return work

    def disk_writer(self, source: np.ndarray) -> Work:
        """Work that stores rows under new keys and waits until the disk has them."""
        number = 0

        def work() -> None:
            nonlocal number
            number += 1
            keys = self.keys(np.arange(len(source) * 128 + 1) + number * (1 << 24))
            self._settle(keys, self._put(keys, source))

        return work

    def _settle(self, keys: list[Any], items: list[Any]) -> None:
        """Wait until the disk has them, then let go of their staging memory."""
        if self._disk is not None:
            while any(map(self._disk.exists_in_put_tasks, keys)):
                time.sleep(0.0005)
            for item in items:
                item.ref_count_down()

    def _put(self, keys: list[Any], rows: np.ndarray) -> list[Any]:
        torch, all_items = self._torch, []
        data = torch.from_numpy(rows)
        for start in range(0, len(keys), 16):
            items: list[Any] = []
            for i in range(start, min(len(keys), start + 16)):
                item = self.manager.allocate(torch.Size([1, 1, 1, rows.shape[1]]), torch.uint8)
                item.tensor.view(-1).copy_(data[i])
                items.append(item)
            self.manager.batched_put(keys[start : start + 16], items)
            all_items += items
        return all_items

    def close(self) -> None:
        self.manager.close()
        logging.disable(logging.NOTSET)


class Mooncake:
    """Mooncake Store over loopback TCP with a master of its own; batches of 64, zero copy."""

    def __init__(self) -> None:
        from mooncake.store import MooncakeDistributedStore

        binary = shutil.which("mooncake_master")
        if binary is None:
            raise ImportError("mooncake_master is not on the path")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        quiet = subprocess.DEVNULL
        self._master = subprocess.Popen([binary, f"--rpc_port={port}"], stdout=quiet, stderr=quiet)
        self._store = MooncakeDistributedStore()
        time.sleep(2)
        status = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 512 << 20, 128 << 20, "tcp", "", f"127.0.0.1:{port}"
        )
        if status:
            self.close()
            raise OSError(f"setup of the store answered {status}")

    def filled(self, source: np.ndarray) -> Work:
        target = np.empty_like(source)
        keys = [f"block-{i}" for i in range(len(source))]
        for array in (source, target):
            assert self._store.register_buffer(array.ctypes.data, array.nbytes) == 0
        size = source.shape[1]
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            places = [source[start + i].ctypes.data for i in range(len(some))]
            assert not any(self._store.batch_put_from(some, places, [size] * len(some)))

        def work() -> None:
            for start in range(0, len(keys), BATCH):
                some = keys[start : start + BATCH]
                places = [target[start + i].ctypes.data for i in range(len(some))]
                got = self._store.batch_get_into(some, places, [size] * len(some))
                assert min(got) == size

        work()
        assert np.array_equal(target, source)
        return work

    def close(self) -> None:
        self._store.close()
        self._master.kill()
        self._master.wait()


@contextlib.contextmanager
def _peer(name: str, make: Callable[[], Any]) -> Iterator[Any]:
    global _reason
    try:
        peer = make()
    except (ImportError, OSError) as error:
        _reason = f"{name} is not here ({error})"
        yield None
        return
    try:
        yield peer
    finally:
        peer.close()


def lmcache(disk: Path | None = None) -> contextlib.AbstractContextManager[LMCache | None]:
    """LMCache, or None where it is not installed."""
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    return _peer("LMCache", lambda: LMCache(disk))


def mooncake() -> contextlib.AbstractContextManager[Mooncake | None]:
    """Mooncake Store, or None where it is not installed."""
    return _peer("Mooncake", Mooncake)
