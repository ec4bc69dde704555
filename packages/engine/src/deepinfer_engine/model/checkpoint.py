"""Reading a Hugging Face style checkpoint directory: which tensors exist, where, and whether they
are all there.

Nothing is read before everything is checked: names (with or without a leading `model.`), shards,
shapes and dtypes come from the safetensors headers, and a message names the first tensor that is
wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.files import read_json
from deepinfer_engine.model.quantised import (
    blocks_of,
    decode_fp4_rows,
    decode_fp8_blocks,
    decode_fp8_rows,
)
from deepinfer_engine.model.rows import RowTable, StoredRows

Storage = Literal["float", "float32", "fp8", "fp8_rows", "fp4"]
"""How a tensor is stored: any float, float32 exactly, E4M3 with a scale per 32 x 32 block or per 32
columns of a row, or E2M1 pairs with a scale per 32 columns of a row."""

_STORED: dict[Storage, tuple[str, ...]] = {
    "float": ("BF16", "F32", "F16", "F64"),
    "float32": ("F32", "F64"),
    "fp8": ("F8_E4M3",),
    "fp8_rows": ("F8_E4M3",),
    "fp4": ("I8", "U8"),
}
_SCALE_DTYPE = "F8_E8M0"
_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    _SCALE_DTYPE: torch.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the model expects of one tensor: the shape it has once decoded, and its storage."""

    shape: tuple[int, ...]
    storage: Storage = "float"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """FP4 holds two columns a byte."""
        if self.storage == "fp4":
            return (*self.shape[:-1], self.shape[-1] // 2)
        return self.shape

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Of the companion `X.scale` of `X.weight`, where the storage has one."""
        if self.storage in ("float", "float32"):
            return None
        rows = blocks_of(self.shape[0]) if self.storage == "fp8" else self.shape[0]
        return (rows, blocks_of(self.shape[-1]))


def refuse_damage(tensor: torch.Tensor, where: str) -> None:
    """Raise CheckpointError when a weight is NaN or infinite: one is enough to spoil every answer.

    The sum is read first, since a bad value cannot hide in it; a sum may also overflow by itself.
    """
    if math.isfinite(
        float(tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32))
    ):
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise CheckpointError(
            f"{where}: {bad} of {tensor.numel()} values are NaN or infinite; the file is damaged, "
            "or was saved after a training that broke: get it again"
        )


def scale_name(name: str) -> str:
    """`X.weight` to `X.scale`."""
    return name.removesuffix(".weight") + ".scale"


class Checkpoint:
    """An opened checkpoint whose every expected tensor is known to be present with the right shape.

    Raises CheckpointError on a missing file, shard or tensor, on a wrong shape or dtype, and on a
    name that is present both with and without the `model.` prefix, or that nothing in the model
    reads.
    """

    def __init__(
        self,
        model_dir: Path,
        expected: Mapping[str, TensorSpec],
        *,
        ignored: re.Pattern[str] | None = None,
    ) -> None:
        """ignored: names that may be there although nothing reads them."""
        self._dir = model_dir
        self._expected = expected
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

    @property
    def files(self) -> int:
        """Number of weight files."""
        return len(self._files)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one expected tensor, decoded and cast."""
        stored = self._read(name)
        storage = self._expected[name].storage
        if storage in ("float", "float32"):
            out = stored.to(dtype).contiguous()
        else:
            out = _DECODERS[storage](stored, self._read(scale_name(name)), dtype)
        file, _ = self._where[name]
        refuse_damage(out, f"{self._dir / file}: {name}")
        return out

    def stored(self, name: str) -> None:
        """Nothing here is in a form that products read as it is."""

    def rows(self, name: str, dtype: torch.dtype) -> RowTable:
        """One expected matrix as a table on disk that is read by row."""
        quantised = self._expected[name].storage == "fp8_rows"
        try:
            return RowTable(
                self._stored_rows(name),
                self._stored_rows(scale_name(name)) if quantised else None,
                dtype,
            )
        except OSError as error:
            raise CheckpointError(f"{self._dir}: {name}: cannot be mapped ({error})") from None

    def _read(self, name: str) -> torch.Tensor:
        file, stored_name = self._where[name]
        try:
            return self._files[file].get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._dir / file}: {name}: cannot be read ({error})") from None

    def _stored_rows(self, name: str) -> StoredRows:
        file, stored_name = self._where[name]
        path = self._dir / file
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entry = json.loads(opened.read(length))[stored_name]
        begin, end = entry["data_offsets"]
        rows = entry["shape"][0]
        dtype = _TORCH_DTYPES[entry["dtype"]]
        return StoredRows(path, 8 + length + begin, rows, (end - begin) // max(rows, 1), dtype)

    def _shards(self) -> list[Path]:
        index = self._dir / "model.safetensors.index.json"
        single = self._dir / "model.safetensors"
        if not index.exists():
            if not single.exists():
                raise CheckpointError(f"{self._dir}: holds neither {index.name} nor {single.name}")
            return [single]
        try:
            files = set(read_json(index)["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index}: not a weight index ({error!r})") from None
        odd = [f for f in files if not isinstance(f, str) or Path(f).name != f or f in ("", "..")]
        if odd:
            raise CheckpointError(f"{index}: shard name {odd[0]!r} must be a plain file name")
        missing = sorted(f for f in files if not os.path.exists(self._dir / f))
        if missing:
            raise CheckpointError(
                f"{self._dir}: {len(missing)} shard(s) missing: {', '.join(missing[:5])}"
            )
        return [self._dir / f for f in sorted(files)]

    def _open(self, path: Path) -> Any:
        if not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path}: not a regular file")
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
        wanted = {name: part for whole in expected.items() for name, part in _parts(*whole)}
        missing = [name for name in wanted if name not in self._where]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{self._dir}: tensor {missing[0]} is missing{more}")
        for name, (wanted_shape, allowed) in wanted.items():
            file, stored_name = self._where[name]
            header = self._files[file].get_slice(stored_name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            if shape != wanted_shape:
                raise CheckpointError(
                    f"{self._dir / file}: {name} has shape {list(shape)}, the "
                    f"config asks for {list(wanted_shape)}"
                )
            if dtype not in allowed:
                raise CheckpointError(
                    f"{self._dir / file}: {name} is stored as {dtype}, expected {allowed[0]}"
                )

    def _refuse_unknown(
        self, expected: Mapping[str, TensorSpec], ignored: re.Pattern[str] | None
    ) -> None:
        known = {name for whole in expected.items() for name, _ in _parts(*whole)}
        unknown = sorted(
            n for n in self._where if n not in known and not (ignored and ignored.match(n))
        )
        if unknown:
            raise CheckpointError(
                f"{self._dir}: {len(unknown)} tensor(s) this model has no use for, first "
                f"{unknown[0]}; does config.json belong to these weights?"
            )


_DECODERS = {"fp8": decode_fp8_blocks, "fp8_rows": decode_fp8_rows, "fp4": decode_fp4_rows}


def _parts(
    name: str, spec: TensorSpec
) -> Iterator[tuple[str, tuple[tuple[int, ...], tuple[str, ...]]]]:
    """(name, (stored shape, dtypes it may have)) of a tensor and of its scale."""
    yield name, (spec.stored_shape, _STORED[spec.storage])
    scale = spec.scale_shape
    if scale is not None:
        yield scale_name(name), (scale, (_SCALE_DTYPE,))
