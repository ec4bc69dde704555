"""SGLang's files: recorded loads in, initial expert locations out.

SGLang starts with a placement given by `--init-expert-location FILE.json`, an object with
`physical_to_logical_map` [all layers of the model, slots], and its expert distribution recorder
writes `.pt` files with `logical_count` [.., layers, experts].
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_loads, as_placement
from deepinfer_eplb.errors import LoadError, ShapeError
from deepinfer_eplb.placement import initial_placement


def write_init_location(
    path: str | os.PathLike[str],
    phy2log: Any,
    num_experts: int,
    *,
    moe_layers: Sequence[int] | None = None,
    layers: int | None = None,
) -> None:
    """Write a placement int [L, S] for SGLang's `--init-expert-location`; `path` ends in .json.

    SGLang wants a row for every layer of the model. moe_layers: the model layer of each row of
    phy2log, if dense layers come between or before; layers: layers of the model. Rows without
    experts get the placement to start from. The file appears whole or not at all.
    """
    target = Path(path)
    if target.suffix != ".json":
        raise ShapeError(f"path wants to end in .json, by which SGLang knows the format: {target}")
    placed = as_placement(phy2log, num_experts)
    at = [*range(len(placed))] if moe_layers is None else [int(i) for i in moe_layers]
    count = max(at) + 1 if layers is None else layers
    if (
        len(at) != len(placed)
        or sorted(set(at)) != sorted(at)
        or not 0 <= min(at) <= max(at) < count
    ):
        raise ShapeError(
            f"moe_layers wants {len(placed)} different layers of 0..{count - 1}, got {at}"
        )
    rows = initial_placement(count, num_experts, placed.shape[1])
    rows[at] = placed
    text = json.dumps({"physical_to_logical_map": rows.tolist()})
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_recording(path: str | os.PathLike[str]) -> npt.NDArray[np.float64]:
    """Loads [steps, layers, experts] of a `.pt` file of SGLang's recorder, or of a JSON like it.

    Layers without any load (dense ones) are kept, so that rows stay the model's layers.
    """
    source = Path(path)
    try:
        if source.suffix == ".json":
            held = json.loads(source.read_text(encoding="utf-8"))
        else:
            import torch  # pyright: ignore[reportMissingImports]

            held = torch.load(source, weights_only=True, map_location="cpu")
    except ImportError as e:
        raise ImportError(f"{source} needs torch: pip install './packages/eplb[torch]'") from e
    except OSError:
        raise
    except Exception as e:
        raise LoadError(f"{source} is no recording of SGLang that can be read: {e}") from e
    if not isinstance(held, dict) or "logical_count" not in held:
        raise LoadError(f"{source} has no logical_count: is it a recording of SGLang?")
    return as_loads(held["logical_count"], str(source))
