"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

import subprocess
import sys

import pytest
from contract import PackageContract

import deepinfer_search_fetch


class TestContract(PackageContract):
    package = deepinfer_search_fetch
    preload = (
        "fastapi", "h11", "lxml.html", "numpy", "resiliparse", "tantivy", "typer", "trafilatura",
        "uvicorn", "rich.markdown", "prometheus_client", "tinycss2", "cssselect", "fastwarc",
        "mcp.server", "cryptography.hazmat.primitives.ciphers.aead", "markdown_it",
    )  # fmt: skip


def test_importing_the_package_loads_no_third_party_module() -> None:
    script = (
        "import sys; before = set(sys.modules); import deepinfer_search_fetch; "
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'deepinfer_search_fetch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = deepinfer_search_fetch.no_such_name
