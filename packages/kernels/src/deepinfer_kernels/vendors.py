"""Kernel libraries of others: whether they are installed, and in a version this package knows.

Asking imports nothing; a library is imported when one of its operators is first called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from deepinfer_kernels.errors import BackendError

__all__ = ["VENDORS", "Vendor", "load", "unavailable"]

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Vendor:
    """One library: the module, what it is distributed as, and the versions whose calls are known.

    ``least`` is the first version that is taken, ``below`` the first that is not.
    """

    module: str
    distributions: tuple[str, ...]
    least: Version
    below: Version


VENDORS: Mapping[str, Vendor] = {
    vendor.module: vendor
    for vendor in (
        Vendor("flash_mla", ("deepinfer-flashmla", "flash-mla"), (1, 0), (2, 0)),
        Vendor("deep_gemm", ("deepinfer-gemm", "deep-gemm"), (2, 8), (3, 0)),
        Vendor("deep_ep", ("deepinfer-ep", "deep-ep"), (2, 5), (3, 0)),
    )
}


def _refusal(vendor: Vendor, version: str) -> str | None:
    found = re.match(r"(\d+)\.(\d+)", version)
    number = (int(found[1]), int(found[2])) if found else (0, 0)
    early = re.search(r"\d(a|b|rc|\.?dev)\d*", version) is not None  # before the release it names
    if vendor.least <= number < vendor.below and not (early and number == vendor.least):
        return None
    least, below = (".".join(map(str, v)) for v in (vendor.least, vendor.below))
    return f"knows {vendor.module} from {least} to before {below}, and {version} is installed"


def unavailable(module: str) -> str | None:
    """Why a library cannot be called here, or None. Imports nothing."""
    vendor = VENDORS[module]
    if find_spec(module) is None:
        return f"needs {module}: pip install {vendor.distributions[0]}"
    for name in vendor.distributions:
        try:
            return _refusal(vendor, metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    return None  # from a source tree: `load` reads its version


@cache
def load(module: str) -> Any:
    """The imported library. Raises BackendError where it is missing, unknown or does not import."""
    reason = unavailable(module)
    if reason is not None:
        raise BackendError(f"{module} cannot be called: this package {reason}")
    try:
        found = import_module(module)
    except Exception as error:  # a missing driver, another NCCL: theirs to say
        raise BackendError(f"{module} is installed and does not import: {error}") from error
    reason = _refusal(VENDORS[module], str(getattr(found, "__version__", "0.0")))
    if reason is not None:
        raise BackendError(f"{module} cannot be called: this package {reason}")
    return found
