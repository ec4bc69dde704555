"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

from contract import PackageContract

import deepinfer_eplb


class TestContract(PackageContract):
    package = deepinfer_eplb
    heavy = ("torch", "numba")
    preload = ("torch", "numba")
