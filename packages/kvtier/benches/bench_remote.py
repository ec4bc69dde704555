"""Remote tiers beside their raw client, in one run.

python bench_remote.py [--rounds 5] [--blocks 64]

Object storage: a local directory through obstore, so that the figures are those of this package and
not of a network. Directory: lookups of a 600-block prompt through the TCP service and, where a
redis-server is installed, through Redis. Medians of alternating rounds; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.base.timing import SystemClock
from deepinfer_kvtier.log.format import EncodedRecord, Origin
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.remote.location.client import LocationClient
from deepinfer_kvtier.remote.location.messages import key_of
from deepinfer_kvtier.remote.tiers.objects import S3TierConfig, open_objects
from deepinfer_kvtier.remote.tiers.s3 import S3Tier
from deepinfer_kvtier.testing import payload_of

NBYTES = 113_920
PROMPT_BLOCKS = 600


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def medians(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each job, run in turns after one warm-up."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, work in jobs.items():
            figures = timed(work)
            if turn:
                taken[name].append(figures)
    return {
        name: (statistics.median(w for w, _ in t), statistics.median(c for _, c in t))
        for name, t in taken.items()
    }


def show(title: str, figures: dict[str, tuple[float, float]], nbytes: int | None) -> None:
    print(title)
    (first_wall, first_cpu), *_ = figures.values()
    for name, (wall, cpu) in figures.items():
        rate = f"{nbytes / wall / 1e9:6.2f} GB/s" if nbytes else f"{wall * 1e3:7.2f} ms"
        print(
            f"  {name:<44} {rate}   x{first_wall / wall:5.2f} of the raw client"
            f"   CPU {cpu * 1e3:7.2f} ms (x{first_cpu / cpu if cpu else 0:5.2f})"
        )


def bench_objects(blocks: int, rounds: int) -> None:
    import obstore

    with tempfile.TemporaryDirectory() as folder:
        clock = SystemClock()
        config = S3TierConfig(url=f"file://{folder}/tier")
        tier = S3Tier(config, open_objects(config), classes=DEFAULT_CLASSES, clock=clock)
        raw = obstore.store.LocalStore(f"{folder}/raw", mkdir=True)
        source = np.random.default_rng(0).integers(0, 256, (blocks, NBYTES), dtype=np.uint8)
        sums = [checksum_of([row.data]) for row in source]
        counter = iter(range(1_000_000))
        stored: list[list[bytes]] = []

        def put_raw() -> None:
            obstore.put(raw, f"{next(counter)}", [row.tobytes() for row in source])

        def put_tier() -> None:
            digests = [
                payload_of(next(counter).to_bytes(8, "little"), 32).tobytes() for _ in source
            ]
            stored.append(digests)
            origin = Origin(0, 0, "chat", 2, bytes(32), 0)
            batch = [
                EncodedRecord(origin, digest, bytes(32), i + 1, [row.data], NBYTES, checksum)
                for i, (digest, row, checksum) in enumerate(zip(digests, source, sums, strict=True))
            ]  # fmt: skip
            assert all(status.value == "ok" for status in tier.put_from(batch))

        figures = medians({"obstore.put, one object": put_raw, "tier.put_from": put_tier}, rounds)
        show(f"put {blocks} blocks of {NBYTES:,} bytes", figures, blocks * NBYTES)
        put_raw()
        name = f"{next(counter) - 1}"
        starts = [i * NBYTES for i in range(blocks)]
        room = np.empty((blocks, NBYTES), dtype=np.uint8)

        def get_raw() -> None:
            parts = obstore.get_ranges(raw, name, starts=starts, lengths=[NBYTES] * blocks)
            for row, part in zip(room, parts, strict=True):
                row[:] = np.frombuffer(part, dtype=np.uint8)

        def get_tier() -> None:
            wanted = [Wanted(d, [row.data]) for d, row in zip(stored[-1], room, strict=True)]
            assert all(s.value == "ok" for s in tier.get_into(0, 0, wanted))

        figures = medians(
            {
                "obstore.get_ranges and copy, unverified": get_raw,
                "tier.get_into, verified": get_tier,
            },
            rounds,
        )
        show(f"get {blocks} blocks", figures, blocks * NBYTES)
        tier.close()


def bench_locations(name: str, urls: list[str], raw: Callable[[list[bytes]], object]) -> None:
    clock = SystemClock()
    client = LocationClient(urls, key=b"", prefix=b"bench", clock=clock, deadline_s=5.0)
    digests = [payload_of(i.to_bytes(4, "little"), 32).tobytes() for i in range(PROMPT_BLOCKS)]
    keys = [key_of(digest, 0, 0) for digest in digests]
    client.publish([(key, bytes(46)) for key in keys[:431]], ttl_s=60)
    figures = medians(
        {
            "raw client: 600 keys in one request": lambda: raw(keys),
            "search: 2 rounds, at most 48 keys": lambda: client.search(keys),
            "lookup of 600 keys": lambda: client.lookup(keys),
        },
        30,
    )
    show(f"directory: {name}", figures, None)
    client.close()


def tcp_shards(count: int) -> tuple[list[str], list[subprocess.Popen[str]]]:
    """Processes of `kvtier serve-locations`, and their URLs."""
    command = [sys.executable, "-m", "deepinfer_kvtier", "serve-locations", "--port", "0", "--json"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    urls = [json.loads(process.stdout.readline())["url"] for process in processes]  # type: ignore[union-attr]
    return urls, processes


def bench_redis() -> None:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        print("no redis-server here: apt install redis-server")
        return
    import redis

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        client = redis.Redis(port=port)
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)

        def raw(keys: list[bytes]) -> object:
            return client.mget([b"kvtier:bench:" + key for key in keys])

        bench_locations("one Redis", [f"redis://127.0.0.1:{port}/0"], raw)
        # The TCP service has no client but ours: its peer is the same question to Redis.
        urls, shards = tcp_shards(2)
        bench_locations("two TCP shards, beside Redis' own client", urls, raw)
        for shard in shards:
            shard.terminate()
            shard.wait()
        client.close()
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=64)
    arguments = parser.parse_args()
    bench_objects(arguments.blocks, arguments.rounds)
    bench_redis()


if __name__ == "__main__":
    main()
