"""Codecs and the table of a compressed payload: exact, bounded, and calm with whatever they get."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.flow import compression
from deepinfer_kvtier.flow.compression import (
    CODECS,
    PLAIN,
    Compressor,
    decode,
    encode,
    expand,
    open_compressor,
    read_table,
)

NAMES = [name for name in CODECS if name != "none"]


def split(room: bytearray, cuts: list[int]) -> list[memoryview]:
    edges = [0, *sorted(cut % (len(room) + 1) for cut in cuts), len(room)]
    return [memoryview(room)[a:b] for a, b in pairwise(edges)]


@given(
    st.sampled_from(NAMES),
    st.binary(min_size=1, max_size=3_000),
    st.lists(st.integers(0, 3_000), max_size=3),
)
def test_what_was_encoded_is_decoded_wherever_it_goes(name, raw, cuts):
    room = bytearray(len(raw))
    assert decode(
        memoryview(encode(memoryview(raw), CODECS[name])), CODECS[name], split(room, cuts)
    )
    assert room == raw


def test_the_shuffle_puts_bytes_of_one_rank_together_and_the_rest_last():
    raw = bytes(range(11))
    for name, width in (("shuffle+zstd-1", 2), ("shuffle4+zstd-1", 4)):
        plain = zstandard.decompress(encode(memoryview(raw), CODECS[name]))
        whole = len(raw) // width * width
        ranks = b"".join(raw[:whole][rank::width] for rank in range(width))
        assert plain == ranks + raw[whole:]


def test_a_frame_of_another_size_writes_nothing_beyond_and_is_refused():
    frame = memoryview(zstandard.compress(bytes(1_000)))
    for size in (0, 1, 999, 1_001):
        room = bytearray(b"\xaa" * (size + 64))
        assert not decode(frame, CODECS["zstd-1"], [memoryview(room)[:size]])
        assert room[size:] == b"\xaa" * 64


def frame_claiming(size: int) -> bytes:
    """A zstd frame header with an 8-byte content size and no window limit, then one empty block."""
    return b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", size) + b"\x01\x00\x00"


@pytest.mark.parametrize("claimed", [1 << 30, 1 << 45, (1 << 64) - 1])
def test_a_frame_that_claims_to_be_huge_allocates_nothing(claimed):
    bomb = memoryview(frame_claiming(claimed))
    room = bytearray(4_096)
    tracemalloc.start()
    try:
        assert not decode(bomb, CODECS["zstd-1"], [memoryview(room)])
        assert not decode(bomb, CODECS["shuffle+zstd-1"], [memoryview(room)])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_whose_window_is_larger_than_ours_is_refused():
    """A window is memory besides a destination in pieces: 8 MiB of it at most."""
    params = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    maker = zstandard.ZstdCompressor(compression_params=params).compressobj(size=64 << 20)
    frame = b"".join(maker.compress(bytes(1 << 20)) for _ in range(64)) + maker.flush()
    assert zstandard.get_frame_parameters(frame).window_size > 8 << 20
    room = memoryview(bytearray(64 << 20))
    assert not decode(memoryview(frame), CODECS["zstd-1"], [room[:1_000], room[1_000:]])


PARTS = kvtier.parts(("noise", 5_000), ("flat", 20_000), ("empty", 0), ("floats", 10_001))


def payload() -> bytes:
    noise = np.random.default_rng(1).bytes(5_000)
    ramp = np.repeat(np.arange(626, dtype="<u2"), 8).tobytes()[:10_001]
    return noise + b"flat" * 5_000 + ramp


def packed(setting="zstd-1") -> bytes:
    compressor = open_compressor(setting)
    assert compressor is not None
    found = compressor.packing(PARTS).compress(memoryview(payload()))
    assert found is not None
    return found


@pytest.mark.parametrize("setting", [*NAMES, {"*": "zstd-1", "flat": "none"}])
def test_a_payload_comes_back_and_its_parts_have_the_codecs_that_pay(setting):
    stored = packed(setting)
    table = read_table(memoryview(stored))
    assert [size for size, _, _ in table] == [5_000, 20_000, 0, 10_001]
    assert table[0][1:] == (5_000, PLAIN), "noise is stored as it is"
    assert table[2][1:] == (0, PLAIN)
    assert (table[1][2] == PLAIN) == isinstance(setting, dict)
    assert table[3][1] < 10_001
    room = bytearray(35_001)
    assert expand(memoryview(stored), split(room, [17, 30_000])) is Status.OK
    assert room == payload()


def test_what_does_not_lose_a_sixteenth_or_a_page_is_left_alone():
    compressor = open_compressor("zstd-1")
    noise = np.random.default_rng(1).bytes(384_000) + bytes(16_000)
    assert len(zstandard.compress(noise, 1)) < 390_000
    little = compressor.compress(memoryview(noise), [(400_000, CODECS["zstd-1"])])
    assert little is None, "a part of 25 could be won"
    assert compressor.compress(memoryview(bytes(2_000)), [(2_000, CODECS["zstd-1"])]) is None, (
        "a slot has at least one page"
    )
    assert compressor.stats()["plain_records"] == 2
    assert compressor.stats()["bytes_after"] == compressor.stats()["bytes_before"] == 402_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("L2.main", "none"),
        ("L2.index", "shuffle+zstd-1"),
        ("L8.index", "shuffle4+zstd-1"),
        ("L8.main", "zstd-1"),
    ],
)
def test_of_the_patterns_that_fit_the_longest_decides(name, expected):
    setting = {
        "L2.main": "none",
        "*": "zstd-1",
        "*.index": "shuffle4+zstd-1",
        "L2.inde?": "shuffle+zstd-1",
    }
    for order in (list(setting), list(reversed(setting))):
        compressor = open_compressor({pattern: setting[pattern] for pattern in order})
        packing = compressor.packing(kvtier.parts((name, 10), ("L99", 10)))
        assert packing.parts == ((10, CODECS[expected]), (10, CODECS["zstd-1"]))


def test_settings_that_compress_nothing_cost_nothing():
    assert open_compressor("none") is None
    assert open_compressor({"*": "none", "x": "none"}) is None
    assert open_compressor({"other": "zstd-1"}).packing(PARTS) is None


def test_only_its_own_bytes_expand_a_destination():
    stored = memoryview(packed())
    for nbytes in (0, 35_000, 35_002):
        room = bytearray(nbytes + 8)
        assert expand(stored, [memoryview(room)[:nbytes]]) is Status.CORRUPT
        assert room[nbytes:] == bytes(8)


def test_every_stored_byte_belongs_to_a_part():
    stored = packed()
    room = [memoryview(bytearray(35_001))]
    for other in (stored + b"x", stored[:-1]):
        assert read_table(memoryview(other)) is None
        assert expand(memoryview(other), room) is Status.CORRUPT


@pytest.mark.parametrize(("size", "length", "codec"), [(10, 8, 0), (8, 10, 0), (0, 10, 1)])
def test_a_table_that_contradicts_itself_is_corrupt(size, length, codec):
    entry = struct.pack("<IIBBH", size, length, codec, 1, 0)
    stored = struct.pack("<HH", 1, 0) + entry + bytes(length)
    assert expand(memoryview(stored), [memoryview(bytearray(size))]) is Status.CORRUPT


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_are_corrupt_at_worst(raw, nbytes):
    assert expand(memoryview(raw), [memoryview(bytearray(nbytes))]) in (
        Status.OK,
        Status.CORRUPT,
        Status.SKIPPED,
    )


@given(st.data())
def test_any_change_of_a_stored_payload_is_no_exception(data):
    stored = bytearray(packed("shuffle+zstd-1"))
    for _ in range(data.draw(st.integers(1, 4))):
        # The table most of the time: what it says is what could do harm.
        at = data.draw(st.one_of(st.integers(0, 60), st.integers(0, len(stored) - 1)))
        stored[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 7, len(stored) - 20]))
    room = bytearray(35_001 + 64)
    expand(memoryview(stored)[: len(stored) - cut], [memoryview(room)[:35_001]])
    assert room[35_001:] == bytes(64)


def test_a_codec_of_a_later_release_is_skipped_and_said_once(caplog):
    stored = bytearray(packed())
    stored[4 + 12 + 8] = 9
    compression._warned.clear()
    for _ in range(3):
        assert expand(memoryview(stored), [memoryview(bytearray(35_001))]) is Status.SKIPPED
    assert [r.message for r in caplog.records] == [
        "a compressed record cannot be read and counts as a miss: it uses a codec that this release"
        " does not know"
    ]


@pytest.mark.parametrize("setting", ["zstd", "zstd-3", {"*": "lz4"}, "", {"*": ""}])
def test_an_unknown_codec_is_named_with_those_there_are(setting):
    with pytest.raises(kvtier.ConfigError, match=r"compression: .*none, zstd-1, shuffle\+zstd-1"):
        kvtier.open(compression=setting, host_bytes=0)


def test_compressors_may_be_shared_by_threads():
    from concurrent.futures import ThreadPoolExecutor

    compressor = Compressor({"*": CODECS["zstd-1"]})
    packing, raw = compressor.packing(PARTS), memoryview(payload())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: packing.compress(raw), range(64)))
    assert len(set(results)) == 1
    assert compressor.stats()["records"] == 64
