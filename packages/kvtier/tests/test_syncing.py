"""What nobody asked to be synced is synced soon all the same: also when nothing follows it."""

from __future__ import annotations

import errno
import threading

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.testing import FaultIo


class Syncs(PosixIo):
    """Notes what is synced; the first `failing` syncs of a segment fail."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.names: dict[int, str] = {}
        self.synced: list[str] = []
        self.done = threading.Event()

    def create(self, path):
        fd = super().create(path)
        self.names[fd] = path.suffix
        return fd

    def datasync(self, fd):
        name = self.names[fd]
        self.synced.append(name)
        if name == ".kvs" and self.failing:
            self.failing -= 1
            raise OSError(errno.EIO, "not now")
        super().datasync(fd)
        if name == ".kvx":
            self.done.set()


@pytest.mark.parametrize(
    "settings", [{"sync_s": 0.05}, {"sync_s": 3600.0, "sync_bytes": 10_000}], ids=["time", "bytes"]
)
def test_a_write_that_nothing_follows_is_synced_segment_first(store, make_model, settings):
    io = Syncs()
    with kvtier.open(store, io=io, **settings) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(60)
        assert io.done.wait(30), "nothing was synced before the end"
        assert io.synced[:2] == [".kvs", ".kvx"]
        assert cache.disk.sync_in_s() == float("inf")


def test_a_sync_that_fails_is_counted_and_tried_again_after_the_same_time(store, make_model):
    io = Syncs(failing=2)
    with kvtier.open(store, io=io, sync_s=0.05) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(60)
        assert io.done.wait(30)
        assert cache.stats()["queue"]["write_errors"] == 2
        assert io.synced.count(".kvs") == 3
        assert model.load_all(model.prompt(1, 3)) == (3, 3)
        assert cache.stats()["disk"]["entries"] == 3, "what was written is not written again"


def test_power_lost_after_that_time_takes_nothing(store, make_model):
    io = FaultIo(1, track=True)
    cache = kvtier.open(store, io=io, sync_s=0.05)
    model = make_model(cache)
    tokens = model.prompt(1, 5)
    assert model.store(tokens, durability="flushed").wait(60)
    patience = threading.Event()
    for _ in range(3000):
        if cache.disk.sync_in_s() == float("inf"):
            break
        patience.wait(0.01)
    assert io.power_loss() == 0
    cache.close()
    with kvtier.open(store) as reopened:
        assert make_model(reopened).load_all(tokens) == (5, 5)
