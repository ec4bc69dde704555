"""Reading draft checkpoints: a config.json beside safetensors files, checked before use."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.torch_extra import Tensor, nn

MAX_CONFIG_BYTES = 1 << 20


def read_config(directory: Path) -> dict[str, Any]:
    """The object in config.json. Raises CheckpointError where there is none."""
    path = directory / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        raw: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{directory} has no readable config.json: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} wants a JSON object, got {type(raw).__name__}")
    return cast("dict[str, Any]", raw)


def read_tensors(
    directory: Path, *, strip: Collection[str] = (), only: tuple[str, ...] = ("",)
) -> dict[str, Tensor]:
    """All tensors of the directory's safetensors files by name, without the given prefixes.

    only: read just the names that start with one of these once the prefixes are gone.
    Raises CheckpointError for damaged files and where there are none.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for full in opened.keys():  # noqa: SIM118 - not a mapping
                    name = full
                    for prefix in strip:
                        name = name.removeprefix(prefix)
                    if name.startswith(only):
                        found[name] = opened.get_tensor(full)
        except SafetensorError as e:
            raise CheckpointError(f"{file} is not a safetensors file: {e}") from e
    return found


def check_names(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], directory: Path) -> None:
    """Raises CheckpointError unless `weights` has exactly the names and shapes of `own`."""
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{directory}: missing tensors {missing[:4]}, unknown tensors {unknown[:4]}"
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, the config says {tuple(own[name].shape)}"
            )


def load_into(module: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Give a module exactly its tensors, in the dtype of the checkpoint's matrices.

    Raises CheckpointError naming what is missing, unknown or of another shape.
    """
    check_names(module.state_dict(), weights, directory)
    matrix = next(t for t in weights.values() if t.is_floating_point() and t.dim() == 2)
    module.to(matrix.dtype)
    module.load_state_dict(dict(weights))
