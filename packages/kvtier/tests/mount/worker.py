"""One machine of the stress test: writes chains, reads everybody's, checks every byte.

worker.py STORE ANNOUNCEMENTS NUMBER: runs until SIGTERM; prints one JSON object at its end. A chain
is announced, with the time, once it is flushed; the others note how long they took to see it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of

BLOCKS, NBYTES = 5, 6_000
PATIENCE_S = 30.0


def main(store: str, announcements: Path, number: int) -> int:
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    rng = random.Random(number)
    cache = kvtier.open(
        store,
        mode="shared-fs",
        host_bytes=1 << 20,
        segment_bytes=400_000,
        commit_delay_s=0.005,
        gc_interval_s=0.5,
        min_free_share=0.0,
        mount={"heartbeat_s": 0.1, "adopt_after_s": 3.0, "grace_s": 1.0},
    )
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", NBYTES))})
    ns = cache.namespace(layout, model="stress", salt="all")
    seen: set[str] = set()
    waiting: dict[str, float] = {}
    latencies: list[float] = []
    counts = {"written": 0, "read": 0, "missed": 0, "wrong": 0, "unseen": 0}

    def tokens_of(name: str) -> np.ndarray:
        return np.random.default_rng(int(name)).integers(0, 1 << 20, BLOCKS * 128 + 1)

    def read(name: str) -> int:
        with ns.match(tokens_of(name), want=("block",)) as match:
            dst = np.full((match.n_blocks, NBYTES), 0xAA, dtype=np.uint8)
            result = ns.load(match, dst=dst, wait=True).wait()
            for i, status in enumerate(result.blocks):
                if status is kvtier.Status.OK:
                    counts["read"] += 1
                    if not np.array_equal(dst[i], payload_of(match.digests[i], NBYTES)):
                        counts["wrong"] += 1
                else:
                    counts["missed"] += 1
            return match.n_blocks

    started = time.monotonic()

    def watch() -> None:
        """Look for what others have announced, every 10 ms."""
        while not stopping:
            for other in os.listdir(announcements):
                if other not in seen and not other.startswith("."):
                    seen.add(other)
                    waiting[other] = float((announcements / other).read_text())
            for other, since in list(waiting.items()):
                if read(other) == BLOCKS:
                    # What was there before this machine started says nothing about delay.
                    if since > started:
                        latencies.append(time.monotonic() - since)
                    del waiting[other]
                elif time.monotonic() - since > PATIENCE_S:
                    counts["unseen"] += 1
                    del waiting[other]
            if seen and rng.random() < 0.3:
                read(rng.choice(sorted(seen)))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not stopping:
        name = str(number * 1_000_000 + counts["written"])
        seen.add(name)
        hasher = ns.hasher()
        hasher.extend(tokens_of(name))
        ns.put(hasher.digests, [payload_of(d, NBYTES) for d in hasher.digests])
        if cache.flush(20).done:
            counts["written"] += 1
            temporary = announcements / f".{name}"
            temporary.write_text(str(time.monotonic()))
            temporary.rename(announcements / name)
        time.sleep(0.25)
    watcher.join()
    cache.close()
    assert cache.disk is not None
    print(
        json.dumps(
            {
                **counts,
                "latencies": latencies,
                "disk": cache.stats()["disk"],
                "errors": cache.disk._poller.errors,
            }
        )
    )
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
