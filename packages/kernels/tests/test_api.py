"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

import importlib

import pytest
from contract import PackageContract

import deepinfer_kernels
from deepinfer_kernels import errors, formats, ops, registry, settings, testing


class TestContract(PackageContract):
    package = deepinfer_kernels
    pinned = (errors, formats, ops, registry, settings, testing)
    light = ("deepinfer_kernels.cli", "deepinfer_kernels.native.build")
    preload = ("torch",)


def test_every_public_name_of_the_package_is_a_pinned_module() -> None:
    for name in deepinfer_kernels.__all__:
        module = importlib.import_module(f"deepinfer_kernels.{name}")
        assert module is getattr(deepinfer_kernels, name)
        assert module in TestContract.pinned
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = deepinfer_kernels.nothing
