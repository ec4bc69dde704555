from __future__ import annotations

import pytest

from deepinfer_eplb.planning.planner import warm_up


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> None:
    """Compile the kernels before tests that run several ranks against a timeout."""
    warm_up()
