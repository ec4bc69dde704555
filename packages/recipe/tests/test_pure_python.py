"""Everything holds in pure Python too: the other tests once more, without the compiled part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_recipe import native

HERE = Path(__file__).parent
# These have no compiled form in their way, or compare the two themselves.
APART = [
    *("api", "check", "cli", "documents", "images", "native", "plain_schema", "pure_python"),
    *("reference_interface", "response_store", "sealing", "strict_schema"),
]


@pytest.mark.slow
@pytest.mark.skipif(native.routines is None, reason=f"this run already is {native.STATE}")
def test_the_other_tests_pass_without_the_compiled_part() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE)]
    done = subprocess.run(
        [*command, *(f"--ignore={HERE / f'test_{name}.py'}" for name in APART)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "DEEPINFER_RECIPE_PURE": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_switch_leaves_the_compiled_part_out() -> None:
    script = "from deepinfer_recipe import native; print(native.routines, native.STATE)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "DEEPINFER_RECIPE_PURE": "1"},
    )
    assert done.stdout.split(maxsplit=1) == ["None", "pure Python: DEEPINFER_RECIPE_PURE is set\n"]
