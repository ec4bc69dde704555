"""Reading a Hugging Face style checkpoint directory: which tensors exist, where, and whether they
are all there.

Nothing is read before everything is checked: names (with or without a leading `model.`), shards,
shapes and dtypes come from the safetensors headers, and a message names the first tensor that is
wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepinfer_engine.errors import CheckpointError

_FLOAT_DTYPES = ("BF16", "F32", "F16", "F64")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the model expects of one tensor; `float32` tensors must be stored as F32."""

    shape: tuple[int, ...]
    float32: bool = False


class Checkpoint:
    """An opened checkpoint whose every expected tensor is known to be present with the right shape.

    Raises CheckpointError on a missing file, shard or tensor, on a wrong shape or dtype, and on a
    name that is present both with and without the `model.` prefix, or that nothing in the model
    reads.
    """

    def __init__(
        self, model_dir: Path, expected: Mapping[str, TensorSpec], *, ignored: re.Pattern[str]
    ) -> None:
        self._dir = model_dir
        self._stack = ExitStack()
        try:
            self._files = {path.name: self._open(path) for path in self._shards()}
            self._where = self._locate()
            self._check(expected)
            self._refuse_unknown(expected, ignored)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one tensor and cast it."""
        file, stored_name = self._where[name]
        try:
            tensor: torch.Tensor = self._files[file].get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._dir / file}: {name}: cannot be read ({error})") from None
        return tensor.to(dtype).contiguous()

    def _shards(self) -> list[Path]:
        index = self._dir / "model.safetensors.index.json"
        single = self._dir / "model.safetensors"
        if not index.exists():
            if not single.exists():
                raise CheckpointError(f"{self._dir}: holds neither {index.name} nor {single.name}")
            return [single]
        try:
            files: set[str] = set(
                json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a weight index ({error!r})") from None
        odd = sorted(f for f in files if Path(f).name != f)
        if odd:
            raise CheckpointError(f"{index}: shard name {odd[0]!r} must be a plain file name")
        missing = sorted(f for f in files if not (self._dir / f).exists())
        if missing:
            raise CheckpointError(
                f"{self._dir}: {len(missing)} shard(s) missing: {', '.join(missing[:5])}"
            )
        return [self._dir / f for f in sorted(files)]

    def _open(self, path: Path) -> Any:
        try:
            handle: Any = safe_open(str(path), framework="pt")
            return self._stack.enter_context(handle)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a readable safetensors file ({error}); copy it again"
            ) from None

    def _locate(self) -> dict[str, tuple[str, str]]:
        where: dict[str, tuple[str, str]] = {}
        for file, stored_name in self._stored_names():
            name = stored_name.removeprefix("model.")
            if name in where:
                raise CheckpointError(
                    f"{self._dir}: tensor {name} exists twice ({where[name]}, {file})"
                )
            where[name] = (file, stored_name)
        return where

    def _stored_names(self) -> Iterator[tuple[str, str]]:
        for file, handle in self._files.items():
            for stored_name in handle.keys():  # noqa: SIM118 - not a mapping
                yield file, stored_name

    def _check(self, expected: Mapping[str, TensorSpec]) -> None:
        missing = [name for name in expected if name not in self._where]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self._dir}: tensor {missing[0]} is missing{more}")
        for name, spec in expected.items():
            file, stored_name = self._where[name]
            header = self._files[file].get_slice(stored_name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if shape != spec.shape:
                raise CheckpointError(
                    f"{self._dir / file}: {name} has shape {list(shape)}, the "
                    f"config asks for {list(spec.shape)}"
                )
            allowed = ("F32", "F64") if spec.float32 else _FLOAT_DTYPES
            if dtype not in allowed:
                raise CheckpointError(
                    f"{self._dir / file}: {name} is stored as {dtype}, expected {allowed[0]}"
                )

    def _refuse_unknown(self, expected: Mapping[str, TensorSpec], ignored: re.Pattern[str]) -> None:
        unknown = sorted(n for n in self._where if n not in expected and not ignored.match(n))
        if unknown:
            raise CheckpointError(
                f"{self._dir}: {len(unknown)} tensor(s) this model has no use for, first "
                f"{unknown[0]}; does config.json belong to these weights?"
            )
