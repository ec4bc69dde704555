"""Recorded loads and placements as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_loads
from deepinfer_eplb.errors import LoadError, PlanError, ShapeError
from deepinfer_eplb.peers.sglang import read_recording, write_init_location
from deepinfer_eplb.planning.planner import Plan

MAX_FILE: Final = 4 << 30


def read_loads(path: Path) -> npt.NDArray[np.float64]:
    """Loads [steps, layers, experts]: a .npy array, or a recording of SGLang (.pt, .json)."""
    _check_size(path)
    if path.suffix in (".pt", ".json"):
        return read_recording(path)
    loads = _array(path)
    if loads.ndim != 3:
        raise LoadError(f"{path} wants shape [steps, layers, experts], got {loads.shape}")
    return as_loads(loads, str(path))


def read_placement(path: Path) -> npt.NDArray[Any]:
    """Placement [layers, slots]: a .npy array or a .json with physical_to_logical_map."""
    _check_size(path)
    if path.suffix != ".json":
        return _array(path)
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        return np.asarray(held["physical_to_logical_map"])
    except (ValueError, TypeError, KeyError) as e:
        raise PlanError(f"{path} is no JSON with physical_to_logical_map: {e!r}") from e


def write_plan(path: Path, made: Plan, experts: int, first_moe_layer: int) -> None:
    """A .json for SGLang's --init-expert-location, or a .npz with the three maps."""
    if path.suffix == ".json":
        rows = range(first_moe_layer, first_moe_layer + made.phy2log.shape[0])
        write_init_location(path, made.phy2log, experts, moe_layers=rows)
    elif path.suffix == ".npz":
        np.savez(path, phy2log=made.phy2log, log2phy=made.log2phy, logcnt=made.logcnt)
    else:
        raise ShapeError(f"--output wants to end in .json or .npz, got {path.name!r}")


def _check_size(path: Path) -> None:
    if path.stat().st_size > MAX_FILE:
        raise LoadError(f"{path} is larger than {MAX_FILE} bytes")


def _array(path: Path) -> npt.NDArray[Any]:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as e:
        raise LoadError(f"{path} is not a plain .npy array: {e}") from e
