"""Caller memory as lists of byte views, without copying.

`n` records of `payload` bytes may be given as
* one contiguous buffer of `n * payload` bytes (bytes, bytearray, memoryview, numpy array, CPU
tensor);
* a 2-D uint8 numpy array of `n` rows with at least `payload` contiguous bytes each;
* a sequence of `n` items: each a buffer of `payload` bytes, an `(address, length)` pair, a CPU
  tensor, or a list of such in the order of the layout's parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.errors import BufferShapeError

Views = list[memoryview]
Buffers = Any


def record_views(
    buffers: Buffers, count: int, part_sizes: Sequence[int], *, writable: bool
) -> list[Views]:
    """One list of byte views for each record; BufferShapeError where sizes do not fit."""
    payload = sum(part_sizes)
    if isinstance(buffers, np.ndarray):
        array = cast("NDArray[Any]", buffers)
        if _is_row_pool(array, count, payload):
            return [[_view(row[:payload], payload, writable)] for row in array]
    if isinstance(buffers, (list, tuple)) and not _is_address(buffers):
        items = cast("Sequence[Any]", buffers)
        if len(items) != count:
            raise BufferShapeError(f"expected {count} buffers, one a record, got {len(items)}")
        return [_record(item, part_sizes, payload, writable) for item in items]
    whole = _view(buffers, count * payload, writable)
    return [[whole[i * payload : (i + 1) * payload]] for i in range(count)]


def _record(item: Any, part_sizes: Sequence[int], payload: int, writable: bool) -> Views:
    if isinstance(item, (list, tuple)) and not _is_address(item):
        pieces = cast("Sequence[Any]", item)
        if len(pieces) != len(part_sizes):
            raise BufferShapeError(
                f"expected {len(part_sizes)} part buffers, one for each part, got {len(pieces)}"
            )
        return [
            _view(piece, size, writable) for piece, size in zip(pieces, part_sizes, strict=True)
        ]
    return [_view(item, payload, writable)]


def _is_address(item: Any) -> TypeGuard[tuple[int, int]]:
    if not isinstance(item, tuple):
        return False
    pair = cast("tuple[Any, ...]", item)
    return len(pair) == 2 and all(isinstance(value, int) for value in pair)


def _is_row_pool(array: NDArray[Any], count: int, payload: int) -> bool:
    return (
        array.ndim == 2
        and array.dtype == np.uint8
        and array.shape[0] == count
        and array.shape[1] >= payload
        and array.strides[1] == 1
        and array.nbytes != count * payload
    )


def _view(item: Any, size: int, writable: bool) -> memoryview:
    view = _bytes_of(item)
    if view.nbytes != size:
        raise BufferShapeError(f"expected a buffer of {size} bytes, got {view.nbytes}")
    if writable and view.readonly and size:
        raise BufferShapeError("the destination is read-only; pass a writable buffer")
    return view


def _bytes_of(item: Any) -> memoryview:
    if _is_address(item):
        return _memory_at(*item)
    if hasattr(item, "data_ptr") and hasattr(item, "element_size"):
        return _tensor_bytes(item)
    if isinstance(item, np.ndarray):
        array = cast("NDArray[Any]", item)
        if not array.flags.c_contiguous:
            raise BufferShapeError(
                f"the array must be C-contiguous, got shape {array.shape}, strides {array.strides}"
            )
        return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(b"")
    try:
        view = memoryview(item)
    except TypeError as cause:
        raise BufferShapeError(
            "expected a buffer, an (address, length) pair or a CPU tensor,"
            f" got {type(item).__name__}"
        ) from cause
    if not view.c_contiguous:
        raise BufferShapeError("the buffer must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _tensor_bytes(tensor: Any) -> memoryview:
    if str(tensor.device) != "cpu":
        raise BufferShapeError(f"tensors must be in CPU memory, got one on {tensor.device}")
    if not tensor.is_contiguous():
        raise BufferShapeError("the tensor must be contiguous")
    return _memory_at(int(tensor.data_ptr()), int(tensor.numel() * tensor.element_size()))


def _memory_at(address: int, length: int) -> memoryview:
    if length < 0 or (address == 0 and length):
        raise BufferShapeError(f"no memory at address {address} with length {length}")
    if length == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
