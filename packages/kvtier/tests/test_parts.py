"""Part-wise loads: what is asked for first arrives first, and is ready only when it is right."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.flow.handles import plan_stages
from deepinfer_kvtier.testing import payload_of

SIZES = {"L2.index": 96, "L2.main": 1_000, "L8.index": 0, "L8.main": 3_000}
PAYLOAD = sum(SIZES.values())
LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(*SIZES.items())})
PROMPT = list(range(6 * 128 + 1))


class Watching(PosixIo):
    """Runs a check before each read of payload bytes."""

    def __init__(self):
        self.before = None
        self.reads = []

    def preadv(self, fd, buffers, offset):
        if self.before is not None:
            self.before()
        self.reads.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return super().preadv(fd, buffers, offset)


def stored(cache, model="parts"):
    ns = cache.namespace(LAYOUT, model=model)
    digests = ns.match(PROMPT).digests
    source = np.stack([payload_of(digest, PAYLOAD) for digest in digests])
    assert ns.put(digests, source, durability="flushed" if cache.disk else "behind").wait(60)
    return ns, source


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("part_sums", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_every_byte_arrives_whatever_the_order(store, host_bytes, part_sums, scattered):
    with kvtier.open(store, host_bytes=host_bytes, part_sums=part_sums) as cache:
        ns, source = stored(cache)
        dst = np.zeros_like(source)
        into = [[row[:96], row[96:1096], b"", row[1096:]] for row in dst] if scattered else dst
        with ns.match(PROMPT) as match:
            job = ns.load(match, dst=into, parts=["L8.*", "L2.main"])
            assert job.wait_ready("L8.main", 10)
            assert np.array_equal(dst[:, 1096:], source[:, 1096:])
            assert job.wait(60).ok
        assert np.array_equal(dst, source)
        assert all(job.ready(part) for part in SIZES)


def test_the_first_part_of_all_blocks_is_ready_before_the_last_is_read(store):
    io = Watching()
    with kvtier.open(store, host_bytes=0, part_sums=True, io=io) as cache:
        ns, source = stored(cache)
        dst = np.zeros_like(source)
        go, waiting = threading.Event(), threading.Event()
        with ns.match(PROMPT) as match:
            payload_reads = 0

            def before():
                nonlocal payload_reads
                payload_reads += 1
                if payload_reads == 6 + 6 + 1:  # six trailers, six first parts
                    waiting.set()
                    assert go.wait(60)

            io.before = before
            job = ns.load(match, dst=dst, parts=["L2.*"])
            assert waiting.wait(60)
            assert job.ready("L2.*")
            assert not job.ready("L8.main")
            assert not job.wait_ready("L8.main", 0)
            assert not any(job.ready(block) for block in range(6))
            assert np.array_equal(dst[:, :1096], source[:, :1096])
            go.set()
            assert job.wait(60).ok
        assert job.ready("*")


@pytest.mark.parametrize("at", [10, 2_000])
def test_a_flipped_bit_in_a_part_is_found_by_its_own_sum(store, at):
    with kvtier.open(store, host_bytes=0, part_sums=True) as cache:
        ns, source = stored(cache)
        (path,) = store.glob("w/*/seg-*.kvs")
        raw = bytearray(path.read_bytes())
        raw[4096 + 8192 + at] ^= 1  # the second block: slots are two pages
        path.write_bytes(raw)
        with ns.match(PROMPT) as match:
            dst = np.zeros_like(source)
            job = ns.load(match, dst=dst, parts=["L2.*"])
            result = job.wait(60)
        assert [status is kvtier.Status.OK for status in result.blocks] == [
            True,
            False,
            True,
            True,
            True,
            True,
        ]
        assert result.ok_prefix == 1
        assert not job.ready("L8.main")
        assert job.wait_ready("L8.main", 10) is False, "an ended load wakes who waits for it"
        assert cache.stats()["disk"]["corrupt"] >= 1


def test_records_without_part_sums_come_whole_and_are_right(store):
    with kvtier.open(store, part_sums=False) as cache:
        stored(cache)
    io = Watching()
    with kvtier.open(store, host_bytes=0, part_sums=True, io=io) as cache:
        ns = cache.namespace(LAYOUT, model="parts")
        with ns.match(PROMPT) as match:
            dst = np.zeros((6, PAYLOAD), np.uint8)
            assert ns.load(match, dst=dst, parts=["L8.*"], wait=True).wait().ok
            assert all(
                np.array_equal(r, payload_of(d, PAYLOAD))
                for r, d in zip(dst, match.digests, strict=True)
            )


def test_parts_are_checked_by_name(store):
    with kvtier.open(host_bytes=1 << 20) as cache:
        ns, source = stored(cache)
        with ns.match(PROMPT) as match:
            with pytest.raises(kvtier.ConfigError, match=r"L9.*it has L2.index, L2.main"):
                ns.load(match, dst=source.copy(), parts=["L9.*"])
            job = ns.load(match, dst=source.copy(), wait=True)
            with pytest.raises(kvtier.ConfigError, match="pass parts"):
                job.ready("L2.main")
            job = ns.load(match, dst=source.copy(), parts=[], wait=True)
            assert job.ready("L2.main")
            with pytest.raises(kvtier.ConfigError, match="nothing"):
                job.ready("nothing")


def test_stages_cover_every_part_once():
    parts = LAYOUT.kinds["block"]
    stages = plan_stages(parts, ["*.main", "L2.*"])
    assert [stage.parts for stage in stages] == [(1, 3), (0,), (2,)]
    assert stages[0].ranges == ((96, 4_000),), "an empty part between two does not split them"
    assert plan_stages(parts, "L2.*") == plan_stages(parts, ["L2.*"])
    (whole,) = plan_stages(parts, ["*"])
    assert whole.ranges == ((0, PAYLOAD),)


def test_a_deadline_ends_a_part_wise_load(store):
    with kvtier.open(store, host_bytes=0, part_sums=True) as cache:
        ns, source = stored(cache)
        with ns.match(PROMPT) as match:
            job = ns.load(match, dst=np.zeros_like(source), parts=["L2.*"], deadline_ms=0)
            assert set(job.wait(60).blocks) == {kvtier.Status.TIMEOUT}
