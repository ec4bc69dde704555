"""Device types of this machine."""

from __future__ import annotations

import platform
from typing import Any

import torch

from deepinfer_kernels.capability import capability
from deepinfer_kernels.errors import BackendError
from deepinfer_kernels.triton_support import interp

__all__ = ["device_facts", "present", "require_present"]


def present() -> tuple[str, ...]:
    """Device types that can run something here; asks the driver, touches no device memory."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def require_present(device_type: str) -> None:
    """Raise BackendError unless this machine has such a device."""
    if device_type not in present():
        raise BackendError(
            f"no device of type {device_type!r} here; present: {', '.join(present())}"
        )


def device_facts(device_type: str) -> dict[str, Any]:
    """What a result must name to be evidence: the device, what drives it, and whether it is one."""
    have = capability(device_type)
    on_cuda = device_type == "cuda"
    return {
        "device": device_type,
        "device_name": torch.cuda.get_device_name() if on_cuda else platform.processor(),
        "machine": platform.machine(),
        "compute_capability": have.compute_capability,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "triton": have.triton_version,
        "interpreted": interp.active(),
    }
