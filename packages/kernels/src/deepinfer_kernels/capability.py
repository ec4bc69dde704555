"""What a device can do. Back ends ask for features here and never for a device's name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata

import torch

__all__ = ["Capability", "Requirement", "capability"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One device, as far as choosing a kernel needs to know it."""

    device_type: str
    compute_capability: tuple[int, int] | None
    features: frozenset[str]
    shared_bytes: int
    sm_count: int
    triton_version: str | None


@dataclass(frozen=True, slots=True)
class Requirement:
    """What an implementation needs: one of these device types, and all of these features."""

    device_types: frozenset[str]
    features: frozenset[str] = frozenset()

    def refusal(self, have: Capability) -> str | None:
        """Why ``have`` is not enough, or None when it is."""
        if have.device_type not in self.device_types:
            return f"runs on {', '.join(sorted(self.device_types))}, not on {have.device_type}"
        missing = self.features - have.features
        return f"needs {', '.join(sorted(missing))}" if missing else None


def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def _cuda_features(major: int, minor: int) -> frozenset[str]:
    """Features by compute capability; sm_80 has no E4M3 at all, sm_90 no block-scaled MMA."""
    features: set[str] = set()
    if (major, minor) >= (8, 9):
        features.add("e4m3")
    if (major, minor) >= (9, 0):
        features |= {"tma", "clusters"}
    if major in (10, 11):
        features |= {"mx_mma", "tma_gather", "tmem"}
    return frozenset(features)


@cache
def capability(device_type: str = "cpu") -> Capability:
    """The capability of a device type, asked once per process."""
    if device_type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Capability(
            device_type="cuda",
            compute_capability=(properties.major, properties.minor),
            features=_cuda_features(properties.major, properties.minor),
            shared_bytes=int(getattr(properties, "shared_memory_per_block_optin", 0)),
            sm_count=properties.multi_processor_count,
            triton_version=_triton_version(),
        )
    return Capability(device_type, None, frozenset(), 0, 0, _triton_version())
