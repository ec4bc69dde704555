from __future__ import annotations

import hashlib
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvtier.log import format as fmt

STORE, WRITER = bytes(range(16)), bytes(range(16, 32))
TRAILER = fmt.Trailer(
    kind=1,
    cls=2,
    flags=fmt.FLAG_APPROXIMATE,
    payload_bytes=113_920,
    depth=600,
    digest=bytes(range(32)),
    parent=bytes(range(16)),
    fingerprint=bytes(range(8)),
    created_ms=1_800_000_000_123,
    sequence=77,
    checksum=bytes(range(16, 32)),
    generation=3,
    shard=4,
    namespace=0xA1B2C3D4,
)


def entries(count: int) -> np.ndarray:
    raw = hashlib.shake_128(b"entries").digest(count * fmt.ENTRY.itemsize)
    return np.frombuffer(raw, dtype=fmt.ENTRY)


def test_sizes_are_those_of_the_format():
    assert fmt.TRAILER_BYTES == 192
    assert fmt.ENTRY.itemsize == 64
    assert fmt.slot_bytes(113_920) == 114_688
    assert fmt.slot_bytes(0) == 4096
    assert [fmt.trailer_offset(n) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]


@given(st.integers(0, 1 << 24))
def test_a_slot_holds_payload_and_trailer_and_less_than_a_page_more(payload):
    size = fmt.slot_bytes(payload)
    assert size % 4096 == 0
    assert 0 <= size - payload - fmt.TRAILER_BYTES < 4096 + 8


def test_a_trailer_survives_the_disk():
    assert fmt.parse_trailer(TRAILER.pack()) == TRAILER


@given(st.integers(0, 192 * 8 - 1))
def test_any_flipped_bit_makes_a_trailer_unreadable(bit):
    raw = bytearray(TRAILER.pack())
    raw[bit // 8] ^= 1 << bit % 8
    assert fmt.parse_trailer(raw) is None


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_never_a_trailer_or_a_frame(raw):
    assert fmt.parse_trailer(raw) is None
    assert fmt.parse_frame(raw.ljust(4096, b"\0"), 0, STORE, WRITER) is None


def test_a_segment_header_is_what_the_format_says():
    raw = fmt.SegmentHeader(2, 1_800_000_000, 5, STORE, WRITER).pack()
    assert len(raw) == 4096
    layout = struct.Struct("<8sHBxxxxxQI16s16sI")
    expected = b"KVTSEG1\0", 1, 2, 1_800_000_000, 5, STORE, WRITER
    *fields, crc = layout.unpack_from(raw)
    assert (*fields,) == expected
    assert crc == zlib.crc32(raw[: layout.size - 4])
    assert not any(raw[layout.size :])


@pytest.mark.parametrize("count", [1, 63, 64, 200])
def test_entries_survive_in_frames_of_63(count):
    written = entries(count)
    frames = fmt.pack_frames(written, 5, STORE, WRITER)
    assert {len(frame) for frame in frames} == {4096}
    assert len(frames) == -(-count // 63)
    read = [fmt.parse_frame(f, 5 + i, STORE, WRITER) for i, f in enumerate(frames)]
    assert np.array_equal(np.concatenate(read), written)


@given(st.integers(0, 4096 * 8 - 1))
def test_any_flipped_bit_makes_a_frame_unreadable(bit):
    (frame,) = fmt.pack_frames(entries(63), 0, STORE, WRITER)
    raw = bytearray(frame)
    raw[bit // 8] ^= 1 << bit % 8
    assert fmt.parse_frame(raw, 0, STORE, WRITER) is None


def test_a_frame_of_another_place_store_or_writer_is_refused():
    (frame,) = fmt.pack_frames(entries(3), 4, STORE, WRITER)
    assert fmt.parse_frame(frame, 4, STORE, WRITER) is not None
    assert fmt.parse_frame(frame, 5, STORE, WRITER) is None
    assert fmt.parse_frame(frame, 4, WRITER, WRITER) is None
    assert fmt.parse_frame(frame, 4, STORE, STORE) is None
