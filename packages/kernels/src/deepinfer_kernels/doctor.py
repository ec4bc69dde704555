"""Which back end each operator gets on this machine, and why not a better one."""

from __future__ import annotations

import json
import platform
from typing import Any

import torch

from deepinfer_kernels import __version__
from deepinfer_kernels.capability import capability
from deepinfer_kernels.devices import present, require_present
from deepinfer_kernels.native.build import find_compiler
from deepinfer_kernels.native.library import level, unavailable
from deepinfer_kernels.registry import default_registry

__all__ = ["report", "run"]

NOT_BUILT = {
    "ascend": "no form runs on Ascend: the Triton forms are lowered for it, not compiled",
}
"""Back ends that the order of preference knows and this version does not contain."""


def report(device_type: str | None = None) -> dict[str, Any]:
    """Everything `run` prints, as plain data."""
    if device_type is not None:
        require_present(device_type)
    kinds = present() if device_type is None else (device_type,)
    return {
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "native": unavailable() or "built",
        "native_level": level(),
        "compiler": find_compiler(),
        "not_built": NOT_BUILT,
        "devices": [_device(kind) for kind in kinds],
    }


def _device(kind: str) -> dict[str, Any]:
    have = capability(kind)
    ops: list[dict[str, Any]] = []
    for name in default_registry.op_names():
        choice = default_registry.choose(name, kind)
        ops.append(
            {
                "op": name,
                "backend": choice.impl.backend,
                "maturity": choice.impl.maturity,
                "evidence": choice.impl.evidence,
                "backends": list(default_registry.impls(name)),
                "refused": dict(choice.refused),
                "degraded": choice.degraded,
            }
        )
    return {
        "type": kind,
        "compute_capability": have.compute_capability,
        "features": sorted(have.features),
        "shared_bytes": have.shared_bytes,
        "sm_count": have.sm_count,
        "triton_version": have.triton_version,
        "ops": ops,
    }


def _print(found: dict[str, Any]) -> None:
    print(f"deepinfer-kernels {found['version']}, torch {found['torch']}, {found['machine']}")
    names = {"v4": "AVX-512", "v3": "AVX2", "base": "no AVX2"}
    level = found["native_level"]
    native = f"not usable: it {found['native']}"
    if found["native"] == "built":
        native = f"built, level {level} ({names.get(level, 'portable')})"
    print(f"native (C++) forms: {native}; compiler: {found['compiler'] or 'none found'}")
    for backend, reason in found["not_built"].items():
        print(f"{backend}: not built ({reason})")
    for device in found["devices"]:
        features = ", ".join(device["features"]) or "none of the accelerator ones"
        print(f"\ndevice {device['type']}: features {features}")
        print(f"{'operator':18} {'back end':10} {'maturity':12} {'evidence':28} not taken")
        for row in device["ops"]:
            refused = "; ".join(f"{b}: {why}" for b, why in row["refused"].items()) or "-"
            evidence = row["evidence"] or "none"
            print(
                f"{row['op']:18} {row['backend']:10} {row['maturity']:12} {evidence:28} {refused}"
            )


def run(device_type: str | None, *, as_json: bool) -> int:
    """Print the report. 1 where an accelerator has nothing but the reference for an operator."""
    found = report(device_type)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    reference_only = any(
        row["backend"] == "reference"
        for device in found["devices"]
        if device["type"] != "cpu"
        for row in device["ops"]
    )
    return 1 if reference_only else 0
