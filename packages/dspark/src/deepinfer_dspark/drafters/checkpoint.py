"""Reading draft checkpoints: a config.json beside safetensors files, checked before use."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.torch_extra import Tensor, nn, torch

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

    only: read just the names that start with one of these once the prefixes are gone. Where there
    is no safetensors file a pytorch_model.bin is read, tensors alone: it cannot run code.
    Raises CheckpointError for damaged files and where there are none.
    """

    def wanted(full: str) -> str | None:
        name = full
        for prefix in strip:
            name = name.removeprefix(prefix)
        return name if name.startswith(only) else None

    from safetensors import SafetensorError, safe_open

    files = sorted(directory.glob("*.safetensors"))
    found: dict[str, Tensor] = {}
    pickled = directory / "pytorch_model.bin"
    if not files and pickled.is_file():
        for full, tensor in _unpickled(pickled).items():
            if (name := wanted(full)) is not None:
                found[name] = tensor
        return found
    if not files:
        raise CheckpointError(f"{directory} holds no *.safetensors and no pytorch_model.bin")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for full in opened.keys():  # noqa: SIM118 - not a mapping
                    if (name := wanted(full)) is not None:
                        found[name] = opened.get_tensor(full)
        except SafetensorError as e:
            raise CheckpointError(f"{file} is not a safetensors file: {e}") from e
    return found


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        raw: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch raises half a dozen kinds for files that are none of its own
        raise CheckpointError(f"{path} is not a file of tensors: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} wants tensors by name, got {type(raw).__name__}")
    named = cast("dict[Any, Any]", raw)
    if not all(isinstance(v, Tensor) for v in named.values()):
        raise CheckpointError(f"{path} wants tensors alone")
    return {str(name): tensor for name, tensor in named.items()}


def rope_theta(raw: Mapping[str, Any]) -> dict[str, Any]:
    """{"rope_theta": base} where a config names it, in the old or the new place.

    Raises CheckpointError for scaled rotary embeddings: this package has the plain ones.
    """
    told: Any = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = told.get("rope_type", told.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"draft config wants rotary embeddings of kind {kind!r}: not known")
    base = told.get("rope_theta", raw.get("rope_theta"))
    return {} if base is None else {"rope_theta": float(base)}


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
