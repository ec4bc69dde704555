"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

import subprocess
import sys

from contract import PackageContract

import deepinfer_kvtier


class TestContract(PackageContract):
    package = deepinfer_kvtier
    preload = ("numpy", "typer", "deepinfer_kvtier.api.cache")
    heavy = ("torch", "zstandard", "asyncio", "hypothesis", "tokenizers", "multiprocessing")
    light = ("deepinfer_kvtier.ops.cli",)
    leave_out = ("deepinfer_kvtier.integrations",)  # they import the engines they plug into


def test_importing_the_library_does_not_load_its_command():
    script = "import sys, deepinfer_kvtier; print(*{'typer', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, [])
