"""A slot that is found damaged is hidden from every process, counted, and never served."""

from __future__ import annotations

import os

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import FaultIo

SLOT, BLOCK_BYTES = 8_192, 5_000


class CountingIo(FaultIo):
    """Counts reads of segment slots."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def preadv(self, fd, buffers, offset):
        self.reads += ".kvs" in str(self._fds.get(fd, ""))
        return super().preadv(fd, buffers, offset)


class BadMemory(FaultIo):
    """The first byte of every read is wrong in this machine."""

    def preadv(self, fd, buffers, offset):
        got = super().preadv(fd, buffers, offset)
        buffers[0][0] ^= 1
        return got


def zero(path):
    raw = bytearray(path.read_bytes())
    raw[4096 + SLOT : 4096 + 2 * SLOT] = bytes(SLOT)
    path.write_bytes(raw)


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[4096 + SLOT + 7] ^= 1
    path.write_bytes(raw)


def repeat(path):
    raw = bytearray(path.read_bytes())
    raw[4096 + SLOT : 4096 + 2 * SLOT] = raw[4096 : 4096 + SLOT]
    path.write_bytes(raw)


DAMAGE = {"flipped": flip, "zeroed": zero, "another record": repeat, "cut": None}


@pytest.fixture
def damaged(store, make_model, request):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 2), durability="flushed").wait(60)
    (path,) = store.rglob("*.kvs")
    damage = DAMAGE[request.param]
    if damage is None:
        os.truncate(path, 4096 + SLOT + 100)
    else:
        damage(path)
    return store


@pytest.mark.parametrize("damaged", DAMAGE, indirect=True)
def test_what_one_process_found_damaged_no_process_reads_again(damaged, make_model):
    with kvtier.open(damaged, host_bytes=0) as one:
        model = make_model(one)
        tokens = model.prompt(1, 2)
        assert model.load_all(tokens) == (2, 1)
        disk = one.stats()["disk"]
        assert disk["quarantined"] == 1
        assert disk["corrupt"] + disk["digest_mismatch"] + disk["short_reads"] == 1
        assert "kvtier_disk_quarantined_total 1" in one.metrics()
        assert one.flush().done
        io = CountingIo()
        with kvtier.open(damaged, host_bytes=0, io=io) as two:
            assert make_model(two).block_hits(tokens) == 1
            assert two.disk.index.probe(0, 0, model.digests(tokens))["length"].tolist() == [
                BLOCK_BYTES,
                0xFFFFFFFF,
            ]
            assert io.reads == 0
        assert model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(damaged, host_bytes=0) as again:
        assert make_model(again).load_all(tokens) == (2, 2)
        assert again.stats()["disk"].get("quarantined", 0) == 0


def test_on_a_mount_a_bad_read_of_one_machine_hides_nothing_from_the_others(tmp_path, make_model):
    """Its second copy is found behind the first, bad one."""
    store = tmp_path / "mount"
    kvtier.init(store, mode="shared-fs", min_free_share=0.0)
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        assert model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store, host_bytes=0, io=BadMemory()) as one:
        assert make_model(one).load_all(tokens) == (2, 1)
        assert one.stats()["disk"]["quarantined"] == 1
        assert one.flush().done
    with kvtier.open(store, host_bytes=0) as two:
        assert make_model(two).load_all(tokens) == (2, 2)
    (path,) = store.rglob("*.kvs")
    flip(path)
    with kvtier.open(store, host_bytes=0) as three:
        model = make_model(three)
        assert model.load_all(tokens) == (2, 1)
        assert model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store, host_bytes=0) as four:
        model = make_model(four)
        model.load_all(tokens)
        assert model.load_all(tokens) == (2, 2)


def test_checks_say_where_the_damaged_bytes_lie(store, make_model, cli):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 2), durability="flushed").wait(60)
        key = model.digests(model.prompt(1, 2))[1][:16].hex()
    (path,) = store.rglob("*.kvs")
    flip(path)
    place = f"{path.relative_to(store)} offset {4096 + SLOT} bytes {SLOT}"
    for command in (["verify", store, "--json"], ["fsck", store, "--json"]):
        done = cli.run(*command)
        assert done.returncode == 1
        assert f'"keys": ["{key}"]' in done.stdout
        assert place in done.stdout
