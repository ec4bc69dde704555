"""Real servers: `deepinfer serve` in its own processes, with the embedded model, on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

# Under importlib mode a test folder is no package: what the tests share is found by path.
SUPPORT = str(Path(__file__).parents[1] / "support")
if SUPPORT not in sys.path:
    sys.path.insert(0, SUPPORT)

SYSTEM = "\n".join(
    f"The {thing} is kept in the {place} and costs {price} coins."
    for price, (thing, place) in enumerate(
        [
            (t, p)
            for t in ("lamp", "kite", "drum", "clock")
            for p in ("garden", "mill", "tower", "school", "market")
        ],
        start=11,
    )
)
START_S = 90.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "300",
    # What is cached is loaded, however slow the disk of a busy machine was before.
    "DEEPINFER_PREFILL_RATE": "1",
}


class ServerProcess:
    """One `deepinfer serve`; `lines` is what it wrote to standard error."""

    def __init__(
        self, *argv: str, cache_dir: Path | None, env: dict[str, str] | None = None
    ) -> None:
        cache = ["--no-cache"] if cache_dir is None else ["--cache-dir", str(cache_dir)]
        port = [] if "--port" in argv else ["--port", "0"]
        self.lines: list[str] = []
        self.url = ""
        self._told = threading.Event()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "deepinfer_engine.cli.main",
                "serve",
                "--threads",
                "1",
                *port,
                *cache,
                *argv,
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if " serves " in line:
                self.url = line.split()[-1]
                self._told.set()
        self._told.set()

    def wait_ready(self) -> ServerProcess:
        assert self._told.wait(START_S), self.lines
        assert self.url, self.lines
        return self

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **kwargs)

    def health(self) -> dict[str, Any]:
        return self.get("/health").json()

    def worker_pids(self) -> dict[str, int]:
        return {
            worker["role"]: worker["pid"] for worker in self.health()["workers"] if worker["pid"]
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all its label sets that contain `labels`."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(text in head for text in wanted):
                total += float(value)
        return total

    def kill_everything(self) -> None:
        """SIGKILL to all three processes at once."""
        pids = [*self.worker_pids().values(), self.process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self._ended()
        eventually(lambda: not any(map(alive, pids)))

    def terminate(self) -> int:
        """SIGTERM if it still runs; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self._ended()

    def _ended(self) -> int:
        code = self.process.wait(60)
        # Workers hold the other end of the pipe, so this also waits for them to be gone.
        self._reader.join(30)
        assert not self._reader.is_alive(), "somebody still holds standard error"
        self.process.stderr.close()
        return code


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def children_of(pid: int) -> set[int]:
    """Direct children that are alive."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """The first true value of `condition`; other processes cannot be awaited in any better way."""
    end = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except (httpx.HTTPError, KeyError):
            value = None
        if value:
            return value
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)


@contextmanager
def running(*argv: str, cache_dir: Path | None = None, **kwargs: Any):
    server = ServerProcess(*argv, cache_dir=cache_dir, **kwargs)
    try:
        yield server.wait_ready()
    finally:
        server.terminate()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """One server for all tests that leave it as it was."""
    with running(cache_dir=tmp_path_factory.mktemp("kv")) as server:
        yield server


@pytest.fixture
def start():
    """Start servers that are taken down after the test."""
    started: list[ServerProcess] = []

    def launch(*argv: str, cache_dir: Path | None = None, **kwargs: Any) -> ServerProcess:
        started.append(ServerProcess(*argv, cache_dir=cache_dir, **kwargs))
        return started[-1]

    yield launch
    for server in started:
        server.terminate()


@pytest.fixture(scope="session")
def running_server():
    """`with running_server(*argv, cache_dir=None) as server:`"""
    return running


@pytest.fixture
def until():
    return eventually


@pytest.fixture
def processes():
    """(alive, children_of)"""
    return alive, children_of


@pytest.fixture
def system_prompt() -> str:
    """Several hundred tokens, so that whole cache blocks are shared between turns."""
    return SYSTEM
