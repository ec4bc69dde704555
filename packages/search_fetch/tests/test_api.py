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
        "fastapi", "h11", "lxml.html", "lxml.cssselect", "numpy.random", "numpy.typing", "tantivy",
        "resiliparse.extract.html2text", "typer", "trafilatura",
        "uvicorn.protocols.http.h11_impl", "rich.markdown", "prometheus_client", "tinycss2.color4",
        "cssselect", "fastwarc", "mcp.server", "markdown_it", "sqlite3", "yaml", "zstandard",
        "filelock", "tomllib", "cryptography.hazmat.primitives.ciphers.aead",
        # of our own: what half of the modules stand on
        "deepinfer_search_fetch.models", "deepinfer_search_fetch.extract.html",
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
