"""Machines that write, read and die on one mount: nothing wrong is ever read."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")


def run_machines(tmp_path: Path, machines: int, seconds: float) -> list[dict]:
    """Reports of the survivors; one of the others is killed every second."""
    # In memory where that is possible: waiting for the disk to take an announcement is no delay of
    # the cache.
    memory = Path("/dev/shm")
    announcements = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path))
    numbers = itertools.count(1)
    rng = random.Random(7)

    def start() -> subprocess.Popen:
        command = [sys.executable, str(WORKER), str(tmp_path / "store"), str(announcements)]
        return subprocess.Popen(
            [*command, str(next(numbers))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    running = [start() for _ in range(machines)]
    killed = 0
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, max(0.0, until - time.monotonic())))
            # The first two live through all of it, and see what the others leave behind.
            victim = running.pop(rng.randrange(2, len(running)))
            victim.kill()
            victim.communicate()
            killed += 1
            running.append(start())
        time.sleep(2.0)  # the last one started takes part, too
        for process in running:
            process.terminate()
        reports = []
        for process in running:
            out, _ = process.communicate(timeout=120)
            if process.returncode == -signal.SIGTERM:
                continue  # told to stop before it had started
            assert process.returncode == 0, out
            reports.append(json.loads(out))
    finally:
        for process in running:
            process.kill()
            process.wait()
        shutil.rmtree(announcements)
    return reports


def check(reports: list[dict]) -> list[float]:
    """Prints the figures; returns the delays, shortest first."""
    latencies = sorted(itertools.chain.from_iterable(r["latencies"] for r in reports))
    total = {
        name: sum(report[name] for report in reports)
        for name in ("written", "read", "missed", "wrong", "unseen")
    }
    print(
        f"\n{total}; seen {len(latencies)} chains of others after median"
        f" {statistics.median(latencies):.3f} s, p99 {latencies[len(latencies) * 99 // 100]:.3f} s,"
        f" longest {latencies[-1]:.3f} s; failed polls: {sum(r['errors'] for r in reports)}"
    )
    assert total["wrong"] == 0
    assert total["unseen"] == 0, "every survivor sees what others have flushed"
    # How much they came to do in this time is a matter of the machine; that they did anything
    # at all is not.
    assert total["read"]
    assert latencies
    return latencies


@pytest.mark.slow
def test_four_machines_with_kills_read_nothing_wrong(tmp_path):
    check(run_machines(tmp_path, machines=4, seconds=6.0))


@pytest.mark.slow
def test_eight_machines_with_kills_for_a_minute_read_nothing_wrong(tmp_path):
    if "KVTIER_STRESS" not in os.environ:
        pytest.skip("takes more than a minute: nox -s mount")
    check(run_machines(tmp_path, machines=8, seconds=60.0))
