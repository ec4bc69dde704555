"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

import re

from contract import PackageContract

import deepinfer_engine
from deepinfer_engine import testing


class TestContract(PackageContract):
    package = deepinfer_engine
    pinned = (deepinfer_engine, testing)
    preload = (
        "torch", "fastapi", "typer", "httpx", "uvicorn", "msgpack", "prometheus_client",
        "cryptography.x509", "tokenizers", "xxhash", "httptools", "sqlite3",
        "deepinfer_recipe.protocols.chat.body", "deepinfer_recipe.protocols.messages.body",
        "deepinfer_recipe.protocols.responses.body", "deepinfer_kernels.registry",
        "deepinfer_kernels.formats", "deepinfer_kernels.ep", "deepinfer_kernels.batch_invariant",
        "deepinfer_dspark", "safetensors",
    )  # fmt: skip


def test_the_oldest_siblings_allowed_are_the_ones_tested() -> None:
    """Lower bounds equal the versions in the tree, so that this very run tests them."""
    for line in TestContract().project["dependencies"]:
        if not line.startswith("deepinfer-"):
            continue
        match = re.fullmatch(r"deepinfer-([a-z_-]+)(?:\[[a-z,]+\])?>=(\d+\.\d+),<(\d+\.\d+)", line)
        assert match is not None, f"{line}: wanted a compatible range like >=0.2,<0.3"
        name, low, _ = match.groups()
        packages = TestContract.root.parent
        init = packages / name / "src" / f"deepinfer_{name}" / "__init__.py"
        version = re.search(r'__version__ = "(\d+\.\d+)', init.read_text())
        assert version is not None
        assert version.group(1) == low, f"{name} is {version.group(1)}: run the tests on {low} too"
