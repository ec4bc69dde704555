from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.ops.cli import main
from deepinfer_kvtier.testing import payload_of

# Reproducible, and patient with slow machines; `--hypothesis-profile=search` looks elsewhere.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("reproducible", derandomize=True, **PATIENT)
settings.register_profile("search", print_blob=True, **PATIENT)
settings.load_profile("reproducible")

BLOCK_BYTES = 5_000
STATE_BYTES = 9_001


class Model:
    """A stand-in engine: knows what every record must contain, and checks what comes back."""

    def __init__(self, cache: kvtier.Cache, salt: str = "tenant", model: str = "model") -> None:
        self.cache = cache
        self.layout = kvtier.LayoutSpec(
            128,
            {
                "block": kvtier.parts(("index", 1_000), ("main", 4_000)),
                "state": kvtier.parts(("swa", STATE_BYTES)),
            },
        )
        self.ns = cache.namespace(self.layout, model=model, salt=salt)

    def prompt(self, seed: int, blocks: int, tail: int = 5) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, 1 << 20, blocks * 128 + tail)

    def store(self, tokens, first: int = 0, states=(), **keywords) -> kvtier.PutTicket:
        """Put the blocks from `first` on, and state slots at the given boundaries."""
        digests = self.digests(tokens)
        source = [payload_of(digest, BLOCK_BYTES) for digest in digests[first:]]
        parents = self.ns.root if first == 0 else digests[first - 1]
        for n_blocks in states:
            digest = digests[n_blocks - 1]
            self.ns.put_state(digest, payload_of(digest + b"s", STATE_BYTES), n_blocks=n_blocks)
        return self.ns.put(digests[first:], source, parents=parents, first_block=first, **keywords)

    def digests(self, tokens) -> tuple[bytes, ...]:
        hasher = self.ns.hasher()
        hasher.extend(tokens)
        return hasher.digests

    def block_hits(self, tokens, **keywords) -> int:
        with self.ns.match(tokens, want=("block",), **keywords) as match:
            return match.n_blocks

    def check(self, match: kvtier.Match, result: kvtier.LoadResult, dst, first: int = 0) -> int:
        """Every block reported OK must be right; returns how many were OK."""
        good = 0
        for i, status in enumerate(result.blocks):
            if status is kvtier.Status.OK:
                expected = payload_of(match.digests[first + i], BLOCK_BYTES)
                assert np.array_equal(dst[i], expected), f"wrong bytes in block {first + i}"
                good += 1
        return good

    def load_all(self, tokens) -> tuple[int, int]:
        """(blocks matched, blocks loaded right); a wrong byte fails the test."""
        with self.ns.match(tokens, want=("block",)) as match:
            dst = np.full((match.n_blocks, BLOCK_BYTES), 0xAA, dtype=np.uint8)
            result = self.ns.load(match, dst=dst, wait=True).wait()
            return match.n_blocks, self.check(match, result, dst)


@pytest.fixture
def make_model():
    return Model


def new_store(path: Path) -> Path:
    """A directory whose policy ignores how full the machine's disk is; see test_policy for that."""
    kvtier.init(path, min_free_share=0.0)
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return new_store(tmp_path / "store")


@pytest.fixture
def make_store():
    return new_store


@pytest.fixture
def cache(store: Path):
    with kvtier.open(store, host_bytes=4 << 20) as opened:
        yield opened
        audit(opened)


@pytest.fixture
def model(cache: kvtier.Cache) -> Model:
    return Model(cache)


def audit(cache: kvtier.Cache) -> None:
    """Nothing may leak: pins, descriptors and queue bytes are back once nobody holds anything."""
    cache.flush()
    cache.leases.release_all()
    cache.host.audit()
    assert cache.host.pins() == 0
    if cache.disk is not None:
        assert cache.disk.segments.users() == 0
        assert cache.queue is None or cache.queue.queued_bytes == 0


@pytest.fixture
def check_leaks():
    return audit


@dataclass(frozen=True)
class Done:
    """What one run of the console script did."""

    returncode: int
    stdout: str
    stderr: str


class Console:
    """The console script, in this process and without a terminal."""

    def run(self, *arguments) -> Done:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "argv", ["kvtier", *map(str, arguments)]),
            mock.patch.object(sys, "stdin", io.StringIO()),
        ):
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
        return Done(code, out.getvalue(), err.getvalue())

    def facts(self, *arguments) -> dict:
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def cli():
    return Console()


@pytest.fixture
def filled(store):
    """Four blocks and a state slot of class chat, two blocks of class agent."""
    with kvtier.open(store) as cache:
        model = Model(cache)
        model.store(model.prompt(1, 4), states=(4,), durability="flushed").wait(60)
        model.store(model.prompt(2, 2), cls="agent", durability="flushed").wait(60)
        cache.flush()
    return store


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server or valkey-server on this machine")
    pytest.importorskip("redis", reason="needs the extra redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            threading.Event().wait(0.05)
        else:
            pytest.fail("redis-server did not start")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(60)
