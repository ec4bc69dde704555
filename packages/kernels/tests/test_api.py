"""What every package promises, by the shared contract of this repository's tests."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from contract import PackageContract

import deepinfer_kernels
from deepinfer_kernels import batch_invariant, ep, errors, formats, ops, registry, settings, testing
from deepinfer_kernels.forms import WRITTEN_IN_TRITON


class TestContract(PackageContract):
    package = deepinfer_kernels
    pinned = (batch_invariant, ep, errors, formats, ops, registry, settings, testing)
    light = ("deepinfer_kernels.cli", "deepinfer_kernels.native.build")
    preload = ("torch",)
    # Whatever module of an operator is asked for, Python runs `ops` first, and that loads them all:
    # a process for each would import the same hundred modules a hundred times.
    leave_out = ("deepinfer_kernels.ops.",)


def test_every_public_name_of_the_package_is_a_pinned_module() -> None:
    for name in deepinfer_kernels.__all__:
        module = importlib.import_module(f"deepinfer_kernels.{name}")
        assert module is getattr(deepinfer_kernels, name)
        assert module in TestContract.pinned
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = deepinfer_kernels.nothing


def test_modules_of_every_operator_lie_where_the_registry_looks() -> None:
    for name in ops.__all__:
        folder = Path(deepinfer_kernels.__file__).parent / "ops" / name
        forms = {path.stem for path in folder.glob("*.py")} - {"__init__", "spec"}
        assert forms == set(registry.default_registry.impls(name))
        for form in forms - set(WRITTEN_IN_TRITON):
            module = importlib.import_module(f"deepinfer_kernels.ops.{name}.{form}")
            assert callable(getattr(module, name))
