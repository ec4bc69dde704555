"""Checks and conversions at the public border: any array type in, plain numpy inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import LoadError, PlanError, ShapeError, TopologyError


def as_numpy(x: Any) -> npt.NDArray[Any]:
    """numpy view or copy of an array-like; torch tensors are moved to the host."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        try:
            x = x.numpy()
        except TypeError:  # bfloat16 and narrower types that numpy lacks: float32 holds them all
            x = x.float().numpy()
    try:
        return np.asarray(x)
    except ValueError as e:  # ragged lists
        raise ShapeError(f"want a rectangular array, got {type(x).__name__}: {e}") from None


def as_ints(x: Any, name: str) -> npt.NDArray[np.int64]:
    """int64 array of integers; an empty array of any type counts."""
    values = as_numpy(x)
    if values.size and values.dtype.kind not in "iu":
        raise ShapeError(f"{name} wants integers, got {values.dtype} of shape {values.shape}")
    return values.astype(np.int64)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ShapeError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ShapeError(f"{name} wants an integer of at least {least}, got {value!r}")


def as_loads(x: Any, name: str = "window") -> npt.NDArray[np.float64]:
    """float64 [W, L, E], finite and not negative; [L, E] counts as one step."""
    loads = as_numpy(x)
    if loads.ndim == 2:
        loads = loads[None]
    if loads.ndim != 3 or 0 in loads.shape:
        raise ShapeError(f"{name} wants shape [steps, layers, experts], got {loads.shape}")
    if loads.dtype.kind not in "iufb":
        raise ShapeError(f"{name} wants numbers, got dtype {loads.dtype}")
    out = loads.astype(np.float64, copy=False)
    if not np.isfinite(out).all():
        raise LoadError(f"{name} holds NaN or infinite loads: drop those steps before planning")
    if (out < 0).any():
        raise LoadError(f"{name} holds negative loads; counters may have overflowed")
    return out


def check_topology(num_experts: int, num_gpus: int, num_slots: int) -> None:
    """num_slots is a multiple of num_gpus and holds every expert at least once."""
    sizes: dict[str, Any] = {"num_gpus": num_gpus, "num_slots": num_slots}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TopologyError(f"{name} wants an integer, got {value!r}")
    if num_gpus < 1:
        raise TopologyError(f"num_gpus wants at least 1, got {num_gpus}")
    if num_slots % num_gpus:
        raise TopologyError(
            f"num_slots ({num_slots}) must be a multiple of num_gpus ({num_gpus}): use "
            f"{-(-num_slots // num_gpus) * num_gpus}"
        )
    if num_slots < num_experts:
        raise TopologyError(f"{num_slots} slots cannot hold {num_experts} experts")


def as_placement(x: Any, num_experts: int, name: str = "phy2log") -> npt.NDArray[np.int32]:
    """int32 [L, S] with every expert present in every layer."""
    placement = as_numpy(x)
    if placement.ndim != 2 or placement.dtype.kind not in "iu":
        raise ShapeError(
            f"{name} wants integers of shape [layers, slots], got {placement.dtype} "
            f"{placement.shape}"
        )
    if placement.size and (placement.min() < 0 or placement.max() >= num_experts):
        raise PlanError(
            f"{name} wants expert ids 0..{num_experts - 1}, got {placement.min()}.."
            f"{placement.max()}"
        )
    out = placement.astype(np.int32)
    missing = replica_counts(out, num_experts) == 0
    if missing.any():
        layer, expert = (int(i) for i in np.argwhere(missing)[0])
        raise PlanError(f"{name} has no replica of expert {expert} in layer {layer}")
    return out


def replica_counts(phy2log: npt.NDArray[np.int32], num_experts: int) -> npt.NDArray[np.int32]:
    """int32 [L, E]; replicas of each expert."""
    layers = phy2log.shape[0]
    flat = phy2log + np.arange(layers, dtype=np.int64)[:, None] * num_experts
    counts = np.bincount(flat.ravel(), minlength=layers * num_experts)
    return counts.reshape(layers, num_experts).astype(np.int32)
