from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from deepinfer_eplb.planning.planner import warm_up


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> None:
    """Compile the kernels before tests that run several ranks against a timeout; where several
    test processes begin at once, one compiles and the others find what it kept."""
    with (Path(tempfile.gettempdir()) / "deepinfer-eplb-tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        warm_up()
