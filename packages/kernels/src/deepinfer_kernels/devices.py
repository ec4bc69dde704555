"""Device types of this machine."""

from __future__ import annotations

import torch

from deepinfer_kernels.errors import BackendError

__all__ = ["present", "require_present"]


def present() -> tuple[str, ...]:
    """Device types that can run something here; asks the driver, touches no device memory."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def require_present(device_type: str) -> None:
    """Raise BackendError unless this machine has such a device."""
    if device_type not in present():
        raise BackendError(
            f"no device of type {device_type!r} here; present: {', '.join(present())}"
        )
