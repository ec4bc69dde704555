"""Changing sources, jumping clocks, full disks and killed processes, all together.

Minutes; part of the session `kvtier-faults`. What comes back is what was handed over, or nothing.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of

SIZE, CHAIN, CHAINS, ROUNDS = 20_000, 8, 12, 25
LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(("a", 5_000), ("b", 15_000))})

WRITER = textwrap.dedent(
    f"""
    import errno, os, random, sys, time
    import numpy as np
    import deepinfer_kvtier as kvtier
    from deepinfer_kvtier.base.files import PosixIo
    from deepinfer_kvtier.testing import payload_of

    chooser = random.Random(int(sys.argv[2]))

    class Full(PosixIo):
        def pwritev(self, fd, buffers, offset):
            if chooser.random() < 0.05:
                raise OSError(errno.ENOSPC, "full")
            return super().pwritev(fd, buffers, offset)

    class Jumping:
        off_s = 0.0
        def wall(self): return time.time() + self.off_s
        monotonic = staticmethod(time.monotonic)

    clock = Jumping()
    settings = dict(quota_bytes=2_000_000, gc_interval_s=0.1, min_free_share=0.0, floor_s=0)
    memory = chooser.choice([0, 300_000])
    part_sums = chooser.random() < 0.5
    cache = kvtier.open(
        sys.argv[1], io=Full(), clock=clock, host_bytes=memory, part_sums=part_sums, **settings
    )
    layout = kvtier.LayoutSpec(128, {{"block": kvtier.parts(("a", 5_000), ("b", 15_000))}})
    ns = cache.namespace(layout, model="m", salt="t")
    print("started", flush=True)
    while True:
        clock.off_s = chooser.choice([0, 0, 86_400 * 30, -86_400 * 30])
        tokens = np.random.default_rng(chooser.randrange({CHAINS})).integers(0, 1000, {CHAIN} * 128)
        digests = ns.match(tokens, leave_last=False).digests
        pool = np.stack([payload_of(d, {SIZE}) for d in digests])
        ticket = ns.put(digests, pool, copy=False, durability="flushed")
        if chooser.random() < 0.6:
            if chooser.random() < 0.5:
                time.sleep(chooser.random() * 0.01)
            pool[chooser.randrange({CHAIN})] ^= 0x5A
        ticket.wait(20)
        print("put", flush=True)
    """
)


@pytest.mark.slow
def test_nothing_wrong_is_ever_read(tmp_path):
    chooser = random.Random(3)
    good = 0
    for number in range(ROUNDS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "store"), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "started\n"
            for _ in range(chooser.randrange(1, 20)):
                assert writer.stdout.readline() == "put\n"
        finally:
            writer.kill()
            writer.communicate()
        with kvtier.open(tmp_path / "store", host_bytes=0, min_free_share=0.0) as cache:
            cache.gc()
            ns = cache.namespace(LAYOUT, model="m", salt="t")
            for seed in range(CHAINS):
                tokens = np.random.default_rng(seed).integers(0, 1000, CHAIN * 128)
                with ns.match(tokens, leave_last=False) as match:
                    room = np.zeros((match.n_blocks, SIZE), np.uint8)
                    parts = chooser.choice([None, ["a"]])
                    result = ns.load(match, dst=room, parts=parts, wait=True).wait()
                    for i, status in enumerate(result.blocks):
                        if status is kvtier.Status.OK:
                            expected = payload_of(match.digests[i], SIZE)
                            assert np.array_equal(room[i], expected), f"block {i} of {seed}"
                            good += 1
            assert cache.stats()["disk"].get("corrupt", 0) == 0, "nothing wrong is even found"
    assert good
