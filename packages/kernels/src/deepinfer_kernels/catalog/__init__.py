"""What every operator is: schema, fake form, cost, tolerance, fuzz cases and bench shapes."""

from __future__ import annotations

from deepinfer_kernels import cpu, native
from deepinfer_kernels.catalog import attention, cache, engram, indexer, layer, mhc, moe, norm
from deepinfer_kernels.registry import Registry

__all__ = ["register"]


def register(registry: Registry) -> None:
    """Fill a registry with every operator and every back end of this package."""
    for area in (norm, mhc, attention, indexer, cache, engram, moe, layer):
        for spec in area.SPECS:
            registry.add_op(spec)
    cpu.register(registry)
    native.register(registry)
