"""Goals G5 to G9: what the directory writes, reads, keeps in memory, and how it opens again."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import goal_stores
import numpy as np
import peers
from goal_common import (
    BATCH,
    BLOCK_BYTES,
    LAYOUT,
    Rounds,
    Work,
    row,
    source_of,
    tokens_of,
)

import deepinfer_kvtier as kvtier


def g5_g6_g7(rounds: int, blocks: int) -> None:
    tokens, source = tokens_of(blocks), source_of(blocks)
    target = np.empty_like(source)
    slot = 114_688
    pad = bytes(slot - BLOCK_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        number = 0

        def raw_write() -> None:
            nonlocal number
            number += 1
            path = root / f"raw-{number}"
            fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
            os.posix_fallocate(fd, 0, blocks * slot)
            for start in range(0, blocks, BATCH):
                vectors = [part for line in source[start : start + BATCH] for part in (line, pad)]
                os.pwritev(fd, vectors, start * slot)
            os.close(fd)

        cache = kvtier.open(
            root / "write",
            host_bytes=0,
            segment_bytes=(blocks + 2) * slot,
            sync_bytes=1 << 40,
            sync_s=1e9,
            queue_bytes=1 << 30,
        )
        ns = cache.namespace(LAYOUT, model="bench")
        digests = ns.match(tokens).digests

        def write() -> None:
            nonlocal number
            number += 1
            fresh = [number.to_bytes(4, "big") + digest[4:] for digest in digests]
            ticket = ns.put(fresh, source, parents=fresh[0], copy=False, durability="flushed")
            assert ticket.wait()

        with peers.lmcache(root / "lmcache-write") as peer:
            theirs = {} if peer is None else {"peer": peer.disk_writer(source)}
            both = Rounds(rounds, {"raw": raw_write, "ours": write, **theirs})
        row(
            "G5",
            "directory write, fresh files, of raw pwritev(64)",
            both.ratio("raw", "ours"),
            ">= 0.80",
        )
        figure = both.ratio("peer", "ours") if theirs else peers.why()
        row("G5", "times LMCache disk put (a file a block, no checksum)", figure, ">= 3")
        overhead = (both.cpu("ours") - both.cpu("raw")) / blocks * 1e6
        row(
            "G7",
            "processor time a block over raw pwritev",
            f"{overhead:.0f} us",
            "<= 25 us quiet, 50 loaded",
        )
        disk = cache.stats()["disk"]
        space = disk["written_file_bytes"] / disk["written_payload_bytes"] - 1
        row("G7", "file bytes over payload bytes", f"{space:.2%}", "<= 1%")
        cache.close()

        raw_fd = os.open(root / "raw-read", os.O_CREAT | os.O_RDWR, 0o600)
        os.write(raw_fd, source.tobytes())

        def raw_read() -> None:
            for start in range(0, blocks, BATCH):
                os.preadv(raw_fd, list(target[start : start + BATCH]), start * BLOCK_BYTES)

        works: dict[str, Work] = {"raw": raw_read}
        caches: list[kvtier.Cache] = []
        for threads in (0, 1):
            cache = kvtier.open(
                root / f"read-{threads}",
                host_bytes=0,
                segment_bytes=1 << 30,
                verify_threads=threads,
            )
            caches.append(cache)
            ns = cache.namespace(LAYOUT, model="bench")
            stored = ns.put(ns.match(tokens).digests, source, durability="flushed", copy=False)
            assert stored.wait()
            works[f"{threads} threads"] = reader(ns, tokens, blocks, target)
        with peers.lmcache(root / "lmcache-read") as peer:
            theirs = {} if peer is None else {"peer": peer.filled(source)}
            found = Rounds(3 * rounds, works | theirs)
        assert np.array_equal(target, source)
        row(
            "G6",
            "verified read of 64 blocks, one thread, of raw preadv",
            found.ratio("raw", "0 threads"),
            ">= 0.60",
        )
        row(
            "G6",
            "the same, shared with a second thread (wall counts)",
            found.ratio("raw", "1 threads"),
            ">= 0.80",
        )
        figure = found.ratio("peer", "0 threads") if theirs else peers.why()
        row("G6", "one thread, times LMCache disk get (not verified)", figure, ">= 3")
        overhead = (found.cpu("0 threads") - found.cpu("raw")) / blocks * 1e6
        row(
            "G7",
            "processor time a block over raw preadv",
            f"{overhead:.0f} us",
            "<= 25 us quiet, 50 loaded",
        )
        for cache in caches:
            cache.close()
        os.close(raw_fd)


def reader(ns: kvtier.Namespace, tokens: np.ndarray, blocks: int, target: np.ndarray) -> Work:
    match = ns.match(tokens, lease_s=3600)

    def read() -> None:
        for start in range(0, blocks, BATCH):
            chunk = slice(start, min(blocks, start + BATCH))
            assert ns.load(match, blocks=chunk, dst=target[chunk], wait=True).wait().ok

    return read


def g8_g9(rounds: int, blocks: int) -> None:
    del rounds, blocks
    with tempfile.TemporaryDirectory() as folder:
        for sparse in (False, True):
            store = Path(folder) / f"store-{sparse}"
            records = 1_000_000
            goal_stores.million(store, records, snapshot=sparse)
            started = time.perf_counter()
            cpu = time.process_time()
            cache = kvtier.open(store, read_only=True)
            took, busy = time.perf_counter() - started, time.process_time() - cpu
            disk = cache.stats()["disk"]
            assert disk["entries"] == records
            cache.close()
            how = "from a snapshot" if sparse else "from the log, full frames"
            row(
                "G9",
                f"reopen, a million records, {how}",
                f"{took:.2f} s wall, {busy:.2f} s cpu",
                "<= 2 s",
            )
            if sparse:
                row(
                    "G8",
                    "index memory of a million records",
                    f"{disk['index_bytes'] / 1e6:.1f} MB",
                    "<= 64 MB",
                )
