"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

from contract import PackageContract

import deepinfer_dspark


class TestContract(PackageContract):
    package = deepinfer_dspark
    heavy = ("torch", "numba", "transformers", "safetensors", "vllm")
    preload = ("torch", "safetensors")
