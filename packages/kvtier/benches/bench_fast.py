"""Where speed counts, in one run: beside raw files, memcpy, hashing, and LMCache where it is there.

    python packages/kvtier/benches/bench_fast.py [--save FILE] [--rounds 7] [--blocks 256]
    python packages/kvtier/benches/bench_fast.py --render

Medians of alternating rounds. `--save` keeps the result as JSON; `--render` makes the table of the
README from `fast.json`, without measuring anything. Blocks have 113,920 bytes; files lie where
temporary files do.
"cpu" compares processor time, which other work on the machine disturbs least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import peers
import xxhash
from goal_common import BATCH, BLOCK_BYTES, LAYOUT, Rounds, Work, percentile, source_of, tokens_of
from goal_disk import reader

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base import native

RESULT = Path(__file__).with_name("fast.json")
PAGE = Path(__file__).parent.parent / "README.md"
HEAD, TAIL = "<!-- made by benches/bench_fast.py -->", "<!-- end of the table -->"
SLOT = 114_688


@dataclass(frozen=True, slots=True)
class Line:
    """One goal. figure: what was measured; at_least: whether larger is better; detail: more."""

    what: str
    figure: float | None
    goal: float
    at_least: bool
    detail: str

    @property
    def held(self) -> str:
        """What became of the goal."""
        if self.figure is None:
            return "not measured"
        good = self.figure >= self.goal if self.at_least else self.figure <= self.goal
        return "held" if good else "missed"


def ratios(rounds: Rounds, ceiling: str, ours: str) -> tuple[float, float]:
    """Speed of ours as a share of the ceiling's: by processor time, and by the wall clock."""
    return rounds.cpu(ceiling) / rounds.cpu(ours), rounds.wall(ceiling) / rounds.wall(ours)


def read_and_write(rounds: int, blocks: int) -> Iterator[Line]:
    """Files: what is read is verified, what is written is summed and compared."""
    tokens, source = tokens_of(blocks), source_of(blocks)
    target, plain = np.empty_like(source), np.empty_like(source)
    pad = bytes(SLOT - BLOCK_BYTES)
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def raw_write() -> None:
            nonlocal number
            number += 1
            fd = os.open(root / f"raw-{number}", os.O_CREAT | os.O_RDWR, 0o600)
            os.posix_fallocate(fd, 0, blocks * SLOT)
            for start in range(0, blocks, BATCH):
                vectors = [part for line in source[start : start + BATCH] for part in (line, pad)]
                os.pwritev(fd, vectors, start * SLOT)
            os.close(fd)

        settings: dict[str, Any] = {"segment_bytes": (blocks + 2) * SLOT, "queue_bytes": 1 << 30}
        settings |= {"host_bytes": 0, "sync_bytes": 1 << 40, "sync_s": 1e9}
        with kvtier.open(root / "write", **settings) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            digests = ns.match(tokens).digests

            def write() -> None:
                nonlocal number
                number += 1
                fresh = [number.to_bytes(4, "big") + digest[4:] for digest in digests]
                put = ns.put(fresh, source, parents=fresh[0], copy=False, durability="flushed")
                assert put.wait()

            with peers.lmcache(root / "lmcache-write") as peer:
                theirs = {} if peer is None else {"peer": peer.disk_writer(source)}
                found = Rounds(rounds, {"raw": raw_write, "ours": write, **theirs})
        cpu, wall = ratios(found, "raw", "ours")
        each = f"{found.cpu('raw') / blocks * 1e6:.0f} us of processor a block raw"
        detail = f"cpu; {wall:.2f} wall; {each}"
        yield Line("write, of raw `pwritev` into fresh files", cpu, 0.8, True, detail)
        yield against(found, "write, times LMCache's disk", 3.0, bool(theirs))

        fd = os.open(root / "raw-read", os.O_CREAT | os.O_RDWR, 0o600)
        os.write(fd, source.tobytes())

        def raw_read() -> None:
            for start in range(0, blocks, BATCH):
                os.preadv(fd, list(plain[start : start + BATCH]), start * BLOCK_BYTES)

        works: dict[str, Work] = {"raw": raw_read}
        caches: list[kvtier.Cache] = []
        for threads in (0, 1):
            opened = kvtier.open(
                root / f"read-{threads}",
                host_bytes=0,
                segment_bytes=1 << 30,
                verify_threads=threads,
            )
            caches.append(opened)
            ns = opened.namespace(LAYOUT, model="bench")
            put = ns.put(ns.match(tokens).digests, source, durability="flushed", copy=False)
            assert put.wait()
            works[f"{threads}"] = reader(ns, tokens, blocks, target)
        with peers.lmcache(root / "lmcache-read") as peer:
            theirs = {} if peer is None else {"peer": peer.filled(source)}
            found = Rounds(3 * rounds, works | theirs | {"ours": works["0"]})
        assert np.array_equal(target, source)
        cpu, wall = ratios(found, "raw", "ours")
        inside, whole = compiled_time(works["0"], 3 * rounds)
        each = f"{found.cpu('raw') / blocks * 1e6:.1f} us of processor a block raw"
        parts = (
            f"ours {inside / blocks * 1e6:.1f} in C, {(whole - inside) / blocks * 1e6:.1f} Python"
        )
        detail = f"cpu, one thread; {wall:.2f} wall; {each}, {parts}"
        yield Line("verified read, of raw `preadv`", cpu, 0.7, True, detail)
        shared = ratios(found, "raw", "1")[1]
        detail = "wall; two threads, as by default"
        yield Line("the same, a second thread helping", shared, 0.7, True, detail)
        yield against(found, "verified read, times LMCache's disk, unverified", 3.0, bool(theirs))
        for opened in caches:
            opened.close()
        os.close(fd)


def compiled_time(work: Work, rounds: int) -> tuple[float, float]:
    """Processor time of a work of reads: inside the compiled routine, and in all; medians."""
    if native.routines is None:
        return 0.0, 0.0
    read = native.routines.read_records
    spent: list[float] = []

    def timed_read(*given: object) -> str:
        started = time.thread_time()
        answer = read(*given)
        spent.append(time.thread_time() - started)
        return answer

    inside, whole = [], []
    with mock.patch.object(native.routines, "read_records", timed_read):
        for _ in range(rounds):
            spent.clear()
            started = time.thread_time()
            work()
            whole.append(time.thread_time() - started)
            inside.append(sum(spent))
    return statistics.median(inside), statistics.median(whole)


def against(found: Rounds, what: str, goal: float, here: bool) -> Line:
    """Our speed as a multiple of the peer's."""
    if not here:
        return Line(what, None, goal, True, peers.why())
    cpu, wall = ratios(found, "peer", "ours")
    return Line(what, cpu, goal, True, f"cpu; {wall:.1f} wall")


def host(rounds: int, blocks: int) -> Iterator[Line]:
    """From memory into the caller's."""
    tokens, source = tokens_of(blocks), source_of(blocks)
    target, spare = np.empty_like(source), np.empty_like(source)
    with kvtier.open(host_bytes=(blocks + 1) * BLOCK_BYTES) as cache:
        ns = cache.namespace(LAYOUT, model="bench")
        ns.put(ns.match(tokens).digests, source)

        def copies() -> None:
            for i in range(blocks):
                spare[i] = source[i]

        found = Rounds(3 * rounds, {"memcpy": copies, "ours": reader(ns, tokens, blocks, target)})
    cpu, wall = ratios(found, "memcpy", "ours")
    yield Line("memory to caller, of `memcpy`", cpu, 0.9, True, f"cpu; {wall:.2f} wall")


@contextlib.contextmanager
def timed(times: list[tuple[bool, float]]) -> Iterator[None]:
    """Notes the seconds of a block, and whether another program took the core meanwhile."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
    times.append((after > before, seconds))


def put(rounds: int, blocks: int) -> Iterator[Line]:
    """What a producer waits for, beside the time of hashing the same blocks."""
    del blocks
    tokens, source = tokens_of(BATCH), source_of(BATCH)
    hashing: list[tuple[bool, float]] = []
    putting: list[tuple[bool, float]] = []
    busy: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        kvtier.open(folder, host_bytes=64 << 20, queue_bytes=64 << 20) as cache,
    ):
        ns = cache.namespace(LAYOUT, model="bench")
        digests = ns.match(tokens).digests
        for number in range(40 * rounds):
            fresh = [number.to_bytes(4, "big") + digest[4:] for digest in digests]
            with timed(hashing):
                for row in source:
                    xxhash.xxh3_128_digest(row.data)
            spent = time.thread_time()
            with timed(putting):
                ticket = ns.put(fresh, source, parents=fresh[0], copy=False)
            busy.append(time.thread_time() - spent)
            ticket.wait()
    # Waits of its own, for locks and for the interpreter, count; those for a core that another
    # program has do not.
    own = [seconds for interrupted, seconds in putting if not interrupted]
    whole = [seconds for _, seconds in putting]
    quiet = [seconds for interrupted, seconds in hashing if not interrupted]
    hashed = statistics.median(quiet)
    detail = (
        f"calls that no other program interrupted, {len(own)} of {len(putting)}:"
        f" p50 {statistics.median(own) * 1e3:.2f}, p99 {percentile(own, 0.99) * 1e3:.2f} ms;"
        f" all: p99 {percentile(whole, 0.99) * 1e3:.2f}, processor p50"
        f" {statistics.median(busy) * 1e3:.2f} ms; hashing alike: p50 {hashed * 1e3:.2f},"
        f" p99 {percentile(quiet, 0.99) * 1e3:.2f} ms; all: p99"
        f" {percentile([seconds for _, seconds in hashing], 0.99) * 1e3:.2f} ms"
    )
    share = percentile(own, 0.99) / hashed
    yield Line("p99 of a put of 64 blocks, over hashing them", share, 2.0, False, detail)


def match(rounds: int, blocks: int) -> Iterator[Line]:
    """600 blocks that are all there: hash, probe, lease."""
    del blocks
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 64))})
    tokens = tokens_of(600)
    with kvtier.open(host_bytes=1 << 20) as cache, peers.lmcache() as peer:
        ns = cache.namespace(layout, model="bench")
        ns.put(ns.match(tokens).digests, np.zeros((600, 64), np.uint8))

        def ours() -> None:
            with ns.match(tokens) as found:
                assert found.n_blocks == 600

        theirs = {} if peer is None else {"peer": peer.lookup(tokens)}
        hashing = {"hashing": lambda: ns.hasher().extend(tokens)}
        both = Rounds(10 * rounds, {"ours": ours, **theirs, **hashing})
    detail = f"{both.cpu('ours') * 1e3:.2f} ms, hashing {both.cpu('hashing') * 1e3:.2f} of it"
    share = None
    if theirs:
        share = both.cpu("ours") / both.cpu("peer")
        detail = f"cpu; {detail}, beside {both.cpu('peer') * 1e3:.2f} ms"
    yield Line("match of 600 blocks, of LMCache's", share, 0.2, False, detail)


def importing(rounds: int, blocks: int) -> Iterator[Line]:
    """Processor time of a process that imports the package, less that of one that does nothing."""
    del blocks

    def spent(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    used = "import deepinfer_kvtier as kvtier; kvtier.open"
    codes = {"nothing": "pass", "import": "import deepinfer_kvtier", "first use": used}
    times = {name: [spent(code) for _ in range(rounds)] for name, code in codes.items()}
    cost = {name: statistics.median(some) for name, some in times.items()}
    figure = cost["import"] - cost["nothing"]
    later = cost["first use"] - cost["nothing"]
    detail = f"s of processor; {later:.2f} with what `open` needs, numpy and pydantic among it"
    yield Line("import", figure, 0.12, False, detail)


def single_flight(rounds: int, blocks: int) -> Iterator[Line]:
    """Fifty readers of one prefix that lies on disk, each by `views()`: nothing is copied."""
    del blocks
    readers, prefix = 50, 80
    tokens, source = tokens_of(prefix), source_of(prefix)
    records: set[int] = set()
    lookups: list[float] = []

    def read(folder: str, count: int) -> float:
        with kvtier.open(folder, host_bytes=64 << 20, io_threads=2) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            room = np.zeros((prefix, BLOCK_BYTES), np.uint8)
            start, bringing = threading.Barrier(count + 1), threading.Lock()
            brought: list[bool] = []

            def one(_: int) -> None:
                start.wait()
                with bringing:  # the first brings it to memory, the others wait for that
                    if not brought:
                        with ns.match(tokens) as found:
                            assert ns.load(found, dst=room, wait=True).wait().ok
                        brought.append(True)
                with ns.match(tokens) as there:
                    assert None not in there.views()

            with ThreadPoolExecutor(count) as pool:
                jobs = [pool.submit(one, i) for i in range(count)]
                start.wait()
                began = time.perf_counter()
                for job in jobs:
                    job.result()
                wall = time.perf_counter() - began
            records.add(cache.stats()["disk"]["read_records"])
            began = time.perf_counter()
            for _ in range(readers):
                with ns.match(tokens) as found:
                    found.views()
            lookups.append(time.perf_counter() - began)
        return wall

    with tempfile.TemporaryDirectory() as folder:
        with kvtier.open(folder, host_bytes=0, segment_bytes=1 << 30) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            assert ns.put(ns.match(tokens).digests, source, durability="flushed").wait()
        walls = [(read(folder, 1), read(folder, readers)) for _ in range(rounds)]
    one, many = (statistics.median(column) for column in zip(*walls, strict=True))
    assert records == {prefix}, f"records read in the runs: {records}"
    alone = statistics.median(lookups) * 1e3
    detail = (
        f"wall; {prefix} records read, once; {one * 1e3:.1f} and {many * 1e3:.1f} ms, of which"
        f" {readers} lookups alone take {alone:.1f}"
    )
    yield Line(
        f"{readers} readers of {prefix} blocks by `views()`, of one", many / one, 1.3, False, detail
    )


PARTS: tuple[Callable[[int, int], Iterator[Line]], ...] = (
    read_and_write,
    host,
    put,
    match,
    single_flight,
    importing,
)


def table(result: dict[str, object]) -> str:
    """Markdown of a saved result."""
    rows = ["| what | figure | goal | | more |", "| --- | --- | --- | --- | --- |"]
    lines: list[dict[str, object]] = result["lines"]  # type: ignore[assignment]
    for saved in lines:
        line = Line(**saved)  # type: ignore[arg-type]
        figure = "-" if line.figure is None else f"{line.figure:.2f}"
        goal = f"{'at least' if line.at_least else 'at most'} {line.goal:g}"
        rows.append(f"| {line.what} | {figure} | {goal} | {line.held} | {line.detail} |")
    return "\n".join(rows) + f"\n\n{result['machine']}"


def page_with(result: dict[str, object], page: str) -> str:
    """The page with the table between its marks."""
    start, end = page.index(HEAD) + len(HEAD), page.index(TAIL)
    return f"{page[:start]}\n\n{table(result)}\n\n{page[end:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--render", action="store_true", help="the README's table from fast.json")
    given = parser.parse_args()
    if given.render:
        PAGE.write_text(page_with(json.loads(RESULT.read_text()), PAGE.read_text()))
        return
    before = os.getloadavg()[0]
    lines: list[Line] = []
    for part in PARTS:
        for line in part(given.rounds, given.blocks):
            lines.append(line)
            print(f"{line.what}: {line.figure} ({line.held}) {line.detail}", flush=True)
    machine = (
        f"One run, {os.cpu_count()} cores ({platform.machine()}), load average {before:.1f} at its"
        f" start, Python {platform.python_version()}, routines: {native.STATE}."
    )
    result = {"machine": machine, "lines": [asdict(line) for line in lines]}
    if given.save:
        given.save.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
