"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

from contract import PackageContract

import deepinfer_dspark
from deepinfer_dspark import testing


class TestContract(PackageContract):
    package = deepinfer_dspark
    pinned = (deepinfer_dspark, testing)
    heavy = ("torch", "numba", "transformers", "safetensors", "vllm")
    preload = ("torch", "safetensors", "transformers")
