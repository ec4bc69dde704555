"""Caller memory as lists of byte views, without copying.

`n` records of `payload` bytes may be given as
* one contiguous buffer of `n * payload` bytes (bytes, bytearray, memoryview, numpy array, CPU
tensor);
* a 2-D uint8 numpy array of `n` rows with at least `payload` contiguous bytes each;
* slots of a `DevicePool`, at least `payload` bytes each (on a device by way of pinned memory);
* a sequence of `n` items: each a buffer of `payload` bytes, an `(address, length)` pair, a CPU
  tensor, or a list of such in the order of the layout's parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.device_pool import PoolSlots, Ranges
from deepinfer_kvtier.base.errors import BufferShapeError

Views = list[memoryview]
Buffers = Any


class Records:
    """`count` records of `payload` bytes each in caller memory.

    rows: uint8 [count, payload] where the records have equal distances in one buffer, else None:
          such records move in bulk.
    deliver: for destinations that are only staged here: brings byte ranges of all records (None =
          whole records) to where they belong, and returns when they are there.
    """

    def __init__(
        self,
        count: int,
        payload: int,
        *,
        rows: NDArray[Any] | None,
        lists: list[Views] | None,
        deliver: Callable[[Ranges | None], None] | None = None,
    ) -> None:
        self.deliver = deliver
        self.count = count
        self.payload = payload
        self.rows = rows
        self._lists = lists
        self._flat = rows.reshape(-1).data if rows is not None and _is_dense(rows) else None

    def __len__(self) -> int:
        return self.count

    def views(self, i: int) -> Views:
        """Byte views of record `i`, end to end its payload."""
        if self._lists is not None:
            return self._lists[i]
        if self._flat is not None:
            return [self._flat[i * self.payload : (i + 1) * self.payload]]
        assert self.rows is not None
        return [self.rows[i].data] if self.payload else [memoryview(b"")]

    def views_of(self, which: Sequence[int]) -> list[Views]:
        """`views` of several records."""
        if self._flat is None:
            return [self.views(i) for i in which]
        flat, size = self._flat, self.payload
        return [[flat[i * size : (i + 1) * size]] for i in which]

    def part_views(self, i: int, offset: int, size: int) -> Views:
        """Byte views of `size` bytes of record `i` from `offset` on."""
        return part_of(self.views(i), offset, size)


def part_of(views: Sequence[memoryview], offset: int, size: int) -> Views:
    """Byte views of `size` bytes from `offset` on of what lies end to end in `views`."""
    found: Views = []
    for view in views:
        if size and offset < view.nbytes:
            piece = view[offset : offset + size]
            found.append(piece)
            size -= piece.nbytes
        offset = max(0, offset - view.nbytes)
    return found


def scatter_into(views: Sequence[memoryview], source: memoryview) -> None:
    """Copy bytes to the places where they lie end to end."""
    at = 0
    for view in views:
        end = at + view.nbytes
        if end > at:  # an empty view may be a read-only stand-in
            view[:] = source[at:end]
        at = end


def records_in(
    buffers: Buffers, count: int, part_sizes: Sequence[int], *, writable: bool
) -> Records:
    """`count` records in caller memory; BufferShapeError where sizes do not fit."""
    payload = sum(part_sizes)
    if isinstance(buffers, PoolSlots):
        return _in_pool(buffers, count, payload, writable=writable)
    if isinstance(buffers, np.ndarray):
        array = cast("NDArray[Any]", buffers)
        if _is_row_pool(array, count, payload):
            if writable and not array.flags.writeable and payload:
                raise BufferShapeError("the destination is read-only; pass a writable buffer")
            return Records(count, payload, rows=array[:, :payload], lists=None)
    if isinstance(buffers, (list, tuple)) and not _is_address(buffers):
        items = cast("Sequence[Any]", buffers)
        if len(items) != count:
            raise BufferShapeError(f"expected {count} buffers, one a record, got {len(items)}")
        lists = [_record(item, part_sizes, payload, writable) for item in items]
        return Records(count, payload, rows=None, lists=lists)
    whole = _view(buffers, count * payload, writable)
    if not payload:
        return Records(count, payload, rows=None, lists=[[memoryview(b"")]] * count)
    rows: NDArray[Any] = np.frombuffer(whole, dtype=np.uint8).reshape(count, payload)
    return Records(count, payload, rows=rows, lists=None)


def _in_pool(slots: PoolSlots, count: int, payload: int, *, writable: bool) -> Records:
    if len(slots.numbers) != count or slots.pool.stride < payload:
        raise BufferShapeError(
            f"expected {count} slots of at least {payload} bytes,"
            f" got {len(slots.numbers)} of {slots.pool.stride}"
        )
    if not slots.on_host:
        if not writable:
            return Records(count, payload, rows=slots.stage_out(payload), lists=None)
        rows, deliver = slots.stage_in(payload)
        return Records(count, payload, rows=rows, lists=None, deliver=deliver)
    block = slots.block()
    if block is not None and payload:
        return Records(count, payload, rows=block[:, :payload], lists=None)
    lists: list[Views] = [[row[:payload].data] for row in slots.rows()]
    return Records(count, payload, rows=None, lists=lists)


def _is_dense(rows: NDArray[Any]) -> bool:
    return rows.size > 0 and bool(rows.flags.c_contiguous)


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
    view = bytes_of(item)
    if view.nbytes != size:
        raise BufferShapeError(f"expected a buffer of {size} bytes, got {view.nbytes}")
    if writable and view.readonly and size:
        raise BufferShapeError("the destination is read-only; pass a writable buffer")
    return view


def bytes_of(item: Any) -> memoryview:
    """Bytes of a buffer, an (address, length) pair or a CPU tensor. raises: BufferShapeError."""
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


def copy_views(views: Sequence[memoryview], data: NDArray[np.uint8]) -> None:
    """Gather byte views into one array of the same total length."""
    at = 0
    for view in views:
        data[at : at + view.nbytes] = np.frombuffer(view, dtype=np.uint8)
        at += view.nbytes


def checksums_of(records: list[Views], *, held: int = 0) -> list[bytes]:
    """`checksum_of` of each; where it is compiled, in one call that other threads run beside.

    held: up to so many bytes they wait instead: the interpreter, once given up, may be back later
          than the sums.
    """
    if native.routines is None:
        return [checksum_of(views) for views in records]
    sums = native.routines.sum_records(records, held)
    if None in sums:
        return [sum_ or checksum_of(v) for sum_, v in zip(sums, records, strict=True)]
    return sums


def checksum_of(views: Sequence[Any]) -> bytes:
    """xxh3_128 over byte views, in order."""
    if len(views) == 1:
        return xxhash.xxh3_128_digest(views[0])
    hasher = xxhash.xxh3_128()
    for view in views:
        hasher.update(view)
    return hasher.digest()
