from __future__ import annotations

import array
import ctypes

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.buffers import records_in

SIZES = (3, 5)


def record_views(buffers, count, sizes, *, writable):
    records = records_in(buffers, count, sizes, writable=writable)
    return [records.views(i) for i in range(len(records))]


class CpuTensor:
    """What the cache asks of a tensor, without the library it comes from."""

    def __init__(self, data: np.ndarray, device: str = "cpu", contiguous: bool = True) -> None:
        self._data, self.device, self._contiguous = data, device, contiguous

    def is_contiguous(self) -> bool:
        return self._contiguous

    def data_ptr(self) -> int:
        return self._data.ctypes.data

    def numel(self) -> int:
        return self._data.size

    def element_size(self) -> int:
        return self._data.itemsize


def content(views) -> list[bytes]:
    return [b"".join(bytes(view) for view in record) for record in views]


RAW = bytes(range(16))
EXPECTED = [RAW[:8], RAW[8:]]


@pytest.mark.parametrize(
    "source",
    [
        RAW,
        bytearray(RAW),
        memoryview(RAW),
        array.array("H", np.frombuffer(RAW, "<u2").tolist()),
        np.frombuffer(RAW, np.uint8),
        np.frombuffer(RAW, "<f4").reshape(2, 2),
        CpuTensor(np.frombuffer(RAW, "<u2").copy()),
        [RAW[:8], np.frombuffer(RAW[8:], np.uint8)],
        [[RAW[:3], RAW[3:8]], (RAW[8:11], bytearray(RAW[11:]))],
        np.frombuffer(RAW[:8] + b"pad" + RAW[8:] + b"pad", np.uint8).reshape(2, 11),
        [CpuTensor(np.frombuffer(RAW[:8], np.uint8).copy()), RAW[8:]],
    ],
)
def test_every_documented_shape_reads_the_same_bytes(source):
    assert content(record_views(source, 2, SIZES, writable=False)) == EXPECTED


def test_an_address_is_read_and_written_in_place():
    memory = ctypes.create_string_buffer(RAW, 16)
    pairs = [(ctypes.addressof(memory), 8), (ctypes.addressof(memory) + 8, 8)]
    views = record_views(pairs, 2, SIZES, writable=True)
    assert content(views) == EXPECTED
    views[1][0][:] = b"overture"
    assert memory.raw[8:16] == b"overture"


def test_views_write_through_to_the_caller():
    room = np.zeros((2, 11), np.uint8)
    for record in record_views(room, 2, SIZES, writable=True):
        record[0][:] = b"abcdefgh"
    assert bytes(room[1]) == b"abcdefgh\0\0\0"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (RAW[:-1], "16 bytes, got 15"),
        ([RAW[:8]], "expected 2 buffers"),
        ([RAW[:8], RAW[:7]], "8 bytes, got 7"),
        ([[RAW[:3]], RAW[:8]], "expected 2 part buffers"),
        ([[RAW[:2], RAW[:6]], RAW[:8]], "3 bytes, got 2"),
        ("text", "expected a buffer"),
        (None, "expected a buffer"),
        (np.zeros((16, 2), np.uint8)[:, 0], "contiguous"),
        (CpuTensor(np.zeros(16, np.uint8), device="cuda:0"), "cuda:0"),
        (CpuTensor(np.zeros(16, np.uint8), contiguous=False), "contiguous"),
        ([(0, 8), RAW[:8]], "no memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(source, message):
    with pytest.raises(kvtier.BufferShapeError, match=message):
        record_views(source, 2, SIZES, writable=False)


def test_a_read_only_destination_is_refused():
    with pytest.raises(kvtier.BufferShapeError, match="read-only"):
        record_views(RAW, 2, SIZES, writable=True)
