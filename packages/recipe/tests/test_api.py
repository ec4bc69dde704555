"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

from contract import PackageContract

import deepinfer_recipe


class TestContract(PackageContract):
    package = deepinfer_recipe
    preload = ("pydantic", "tokenizers", "jsonschema", "email.message", "uuid", "subprocess")
    heavy = (
        "torch",
        "numpy",
        "tokenizers",
        "PIL",
        "httpx",
        "jsonschema_rs",
        "cryptography",
        "pypdf",
        "pydantic",
    )
    compiled = ("to_json",)
