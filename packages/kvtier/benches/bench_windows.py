"""Pulling a state window from another machine, over loopback, beside a bare TCP transfer of it.

python packages/kvtier/benches/bench_windows.py [--pulls 300]

Two processes: one holds windows of 1,415,040 bytes, this one pulls them by `match` and `load` with
the default deadline of 20 ms switched to 1 s, so that slow pulls are measured and not cut off. The
bare transfer, between two pulls, is one connection to the same process, one request byte, the same
bytes back, no checksum. Then the holder is stopped (SIGSTOP), and killed, with the default
deadline: what a dead peer costs a request.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import numpy as np

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.remote.state_exchange import LocalLocations, WindowRecord
from deepinfer_kvtier.remote.state_exchange.exchange import WindowExchange
from deepinfer_kvtier.testing import payload_of

STATE_BYTES = 1_415_040
CHAINS = 20
LAYOUT = kvtier.LayoutSpec(
    128, {"block": kvtier.parts(("kv", 64)), "state": kvtier.parts(("swa", STATE_BYTES))}
)
KEY = b"k" * 32


def open_cache(directory, deadline_ms: float) -> tuple[kvtier.Cache, kvtier.Namespace]:
    cache = kvtier.open(
        host_bytes=512 << 20,
        state_share=0.9,
        secret=b"s" * 32,
        persist_state=False,
        windows={"key": KEY, "locations": directory, "deadline_ms": deadline_ms},
    )
    return cache, cache.namespace(LAYOUT, model="m", salt="t")


def chain(ns: kvtier.Namespace, seed: int) -> tuple[list[int], bytes]:
    tokens = list(range(seed * 1000, seed * 1000 + 129))
    hasher = ns.hasher()
    hasher.extend(tokens)
    return tokens, hasher.digests[0]


def hold() -> None:
    """The other process: holds a window for each chain, says where, and waits."""
    cache, ns = open_cache(LocalLocations(), 1000.0)
    for seed in range(CHAINS):
        _, digest = chain(ns, seed)
        ns.put_state(digest, payload_of(digest, STATE_BYTES), n_blocks=1)
    exchange = cache.windows
    assert isinstance(exchange, WindowExchange)
    exchange.settle()
    bare = socket.create_server(("127.0.0.1", 0))
    print(exchange.address, exchange.generation, bare.getsockname()[1], flush=True)
    connection, _ = bare.accept()
    data = bytes(STATE_BYTES)
    while connection.recv(1):
        connection.sendall(data)


class Puller:
    """A machine that has the blocks and lacks the windows."""

    def __init__(self, address: str, generation: int, deadline_ms: float) -> None:
        self.directory = LocalLocations()
        self.cache, self.ns = open_cache(self.directory, deadline_ms)
        self.room = np.zeros(STATE_BYTES, dtype=np.uint8)
        self.chains = [chain(self.ns, seed) for seed in range(CHAINS)]
        self.expected = [payload_of(digest, STATE_BYTES) for _, digest in self.chains]
        for _, digest in self.chains:
            self.ns.put([digest], bytes(64))
            hint = WindowRecord(
                digest[:16], b"machine1", generation, 10**9, STATE_BYTES, 0, address
            )
            self.directory.publish([hint])

    def pull(self, i: int) -> tuple[float, kvtier.Status | None]:
        """(seconds of match and load together, status); the copy kept here is dropped again."""
        tokens, digest = self.chains[i % CHAINS]
        started = time.perf_counter()
        with self.ns.match(tokens) as match:
            status = None
            if match.state is not None:
                status = self.ns.load(match, state_dst=self.room, wait=True).wait().state
        took = time.perf_counter() - started
        if status is kvtier.Status.OK:
            assert np.array_equal(self.room, self.expected[i % CHAINS])
            self.ns.drop([digest], kinds=("state",))
        return took, status


def transfer(connection: socket.socket, room: memoryview) -> float:
    """Seconds for the same bytes with nothing around them."""
    started = time.perf_counter()
    connection.sendall(b"x")
    at = 0
    while at < STATE_BYTES:
        at += connection.recv_into(room[at:])
    return time.perf_counter() - started


def show(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(
        f"{name:<44} p50 {1e3 * statistics.median(times):6.2f} ms   p99 {1e3 * p99:6.2f} ms"
        f"   {len(times)} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulls", type=int, default=300)
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold()
        return
    print(f"windows of {STATE_BYTES:,} bytes over loopback; load average {os.getloadavg()[0]:.1f}")
    holder = subprocess.Popen(
        [sys.executable, __file__, "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    address, generation, port = holder.stdout.readline().decode().split()
    puller = Puller(address, int(generation), 1000.0)
    quick = Puller(address, int(generation), 20.0)
    try:
        pulls: list[float] = []
        transfers: list[float] = []
        room = memoryview(bytearray(STATE_BYTES))
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            for i in range(options.pulls):
                took, status = puller.pull(i)
                assert status is kvtier.Status.OK, status
                pulls.append(took)
                transfers.append(transfer(connection, room))
        show("match + pull + verify + keep a copy", pulls)
        show("bare TCP transfer", transfers)
        ratio = statistics.median(pulls) / statistics.median(transfers)
        print(f"{'pull / bare transfer':<44} {ratio:.2f}")
        quick.pull(0)
        for how, name in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "killed")):
            holder.send_signal(how)
            dead = Puller(address, int(generation), 20.0)
            show(f"peer {name}: one request", [dead.pull(i)[0] for i in range(3)])
            show(f"peer {name}: known to be dead", [dead.pull(i)[0] for i in range(50)])
            dead.cache.close()
    finally:
        holder.kill()
        holder.wait()
        puller.cache.close()
        quick.cache.close()


if __name__ == "__main__":
    main()
