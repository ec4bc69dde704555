"""The compiled routines and their pure forms: equal in every answer, whatever lies in the file."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.buffers import checksums_of
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.base.identity import ChainHasher, MediaItem
from deepinfer_kvtier.host.memory import Slab, gather, scatter
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord, Origin, trailers_of
from deepinfer_kvtier.log.index import ROW, EntryTable
from deepinfer_kvtier.log.reading import Wanted, read_run
from deepinfer_kvtier.testing import payload_of

compiled = pytest.mark.skipif(native.routines is None, reason=native.STATE)
ORIGIN = Origin(0, 0, "chat", 2, bytes(32), 7)
OTHER = Origin(0, 0, "chat", 2, bytes(32), 7, approximate=True, generation=3)
SIZES = (1, 240, 241, 255, 1_024, 4_096, 5_000, 113_920)


class Pure(PosixIo):
    """An engine that compiled code must not stand in for."""


@pytest.fixture(params=["compiled", "pure"])
def form(request, monkeypatch):
    """Both forms; the compiled one only where there is one."""
    if request.param == "pure":
        monkeypatch.setattr(native, "routines", None)
    elif native.routines is None:
        pytest.skip(native.STATE)
    return request.param


@pytest.fixture(params=["plain", "avx2", "avx512"])
def mixer(request):
    """Every form of the sum that this processor can run."""
    if not native.routines.use_mixer(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    yield
    for name in ("plain", "avx2", "avx512"):  # the last that can run is the one that is chosen
        native.routines.use_mixer(name)


@compiled
@given(st.binary(min_size=0, max_size=6_000), st.lists(st.integers(0, 6_000), max_size=5))
def test_a_sum_does_not_depend_on_where_the_bytes_are_cut(data, cuts):
    ends = sorted(min(cut, len(data)) for cut in cuts)
    views = [memoryview(data)[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]
    assert checksums_of([views]) == [xxhash.xxh3_128_digest(data)]


@compiled
@pytest.mark.parametrize("length", [241, 256, 1_023, 1_024, 1_025, 1_088, 65_536, 113_920])
def test_every_form_of_the_sum_is_xxh3(mixer, length):
    data = payload_of(bytes([length % 251]), length).tobytes()
    halves = [memoryview(data)[: length // 3], memoryview(data)[length // 3 :]]
    expected = xxhash.xxh3_128_digest(data)
    assert native.routines.sum_records([[memoryview(data)], halves], 0) == [expected, expected]
    assert native.routines.sum_records([[memoryview(data)], halves], 1 << 30) == [
        expected,
        expected,
    ]


@compiled
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(min_size=32, max_size=32), st.integers(1, 992), st.integers(0, 5), st.data())
def test_every_form_of_a_chain_is_the_library_s_blake3(mixer, key, size, count, data):
    raw = data.draw(st.binary(min_size=size * count, max_size=size * count))
    expected, digest = [], key[::-1]
    for at in range(0, len(raw), size):
        digest = blake3(digest + raw[at : at + size], key=key).digest()
        expected.append(digest)
    assert native.routines.chain_digests(key, key[::-1], raw, size) == expected


@pytest.mark.parametrize("block_tokens", [1, 128, 248, 249, 512])
def test_a_chain_is_the_same_in_both_forms_with_and_without_media(monkeypatch, block_tokens):
    tokens = np.random.default_rng(0).integers(0, 2**32, 5 * block_tokens + 3)
    found = []
    for routines in (native.routines, None):
        monkeypatch.setattr(native, "routines", routines)
        plain, shown = (ChainHasher(bytes(32), b"r" * 32, block_tokens) for _ in range(2))
        plain.extend(tokens[: block_tokens + 1])
        plain.extend(tokens[block_tokens + 1 :])
        shown.extend(tokens, [MediaItem(block_tokens, 1, bytes(32))])
        found.append((plain.digests, shown.digests))
        assert plain.digests[:1] == shown.digests[:1]
        assert plain.digests[1] != shown.digests[1]
    assert found[0] == found[1]


@pytest.mark.parametrize("width", [0, 1, 63, 64, 65, 4_096, 113_920])
@pytest.mark.parametrize("gap", [0, 13])
def test_rows_are_copied_alike_in_both_forms(form, width, gap):
    slab, count = Slab(width, 40), 23
    chosen = np.random.default_rng(width).permutation(40)[:count].astype(np.int64)
    wide = np.random.default_rng(1).integers(0, 256, (count, width + gap), dtype=np.uint8)
    source = wide[:, gap:]
    scatter(source, slab, chosen)
    assert np.array_equal(slab.rows[chosen], source)
    assert not np.delete(slab.rows, chosen, axis=0).any()
    for step in (1, -1):  # rows upside down are rows, too
        room = np.zeros_like(wide)
        gather(slab, chosen, room[::step, gap:])
        assert np.array_equal(room[::step, gap:], source)
        assert not room[:, :gap].any()


@given(st.data())
def test_a_table_answers_alike_in_both_forms(data):
    """Few keys in a small table: probes run into each other, and over rows that were removed."""
    small = st.integers(0, 20)
    keys = data.draw(st.lists(st.tuples(small, small, st.integers(0, 1), small), max_size=60))
    rows = np.zeros(len(keys), ROW)
    for row, (low, high, kind, shard) in zip(rows, keys, strict=True):
        row["key_lo"], row["key_hi"], row["kind"], row["shard"] = low, high, kind, shard
    table = EntryTable(4)
    table.insert(rows)
    if len(table):
        table.remove(
            np.array(data.draw(st.lists(st.integers(0, len(table) - 1), max_size=20)), int)
        )
    asked = np.concatenate([rows, np.zeros(1, ROW)])
    found = table.find_rows(asked)
    with mock.patch.object(native, "routines", None):
        table.audit()
        assert np.array_equal(found, table.find_rows(asked))


@compiled
def test_arrays_that_do_not_fit_are_refused():
    rows, out = np.zeros((3, 8), np.uint8), np.zeros(2, np.int64)
    copy, find, chain = (
        getattr(native.routines, name) for name in ("copy_rows", "find_rows", "chain_digests")
    )
    for slots in ([0, 3], [-1, 0], [0, 1, 2]):
        with pytest.raises(ValueError, match="do not fit"):
            copy(rows, rows[:2].copy(), np.array(slots), False)
    with pytest.raises(ValueError, match="rows of bytes"):
        copy(rows.T, rows.copy(), np.arange(3), True)
    with pytest.raises((ValueError, BufferError)):
        copy(rows, rows.tobytes(), np.arange(3), False)
    words, bytes_ = np.zeros(2, np.uint64), np.zeros(2, np.uint8)
    slots = np.zeros(4, np.uint32)
    for wrong in (
        (slots[:3], np.zeros(1, ROW), words, words, bytes_, bytes_, out),
        (slots, rows, words, words, bytes_, bytes_, out),
        (slots, np.zeros(1, ROW), words, words[:1], bytes_, bytes_, out),
        (slots, np.zeros(1, ROW), words, words, bytes_, words, out),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            find(*wrong)
    find(np.full(4, 7, np.uint32), np.zeros(1, ROW), words, words, bytes_, bytes_, out)
    assert (out == -1).all(), "slots that name no row"
    for size, blocks in ((0, b""), (993, bytes(993)), (4, bytes(5))):
        with pytest.raises(ValueError, match="whole"):
            chain(bytes(32), bytes(32), blocks, size)
    with pytest.raises(TypeError):
        chain(bytes(31), bytes(32), b"", 4)


def records_of(size, count=5):
    """Records of some sizes of parts, and their trailers."""
    records = []
    for i in range(count):
        payload = payload_of(bytes([i, 1]), size).tobytes()
        cut = size * i // count
        views = [memoryview(payload)[:cut], memoryview(payload)[cut:]]
        origin = OTHER if i == 3 else ORIGIN
        record = EncodedRecord(origin, bytes([i]) * 32, bytes([i + 9]) * 32, i + 1, views, size)
        (record.checksum,) = checksums_of([views])
        records.append(record)
    return records, bytes(trailers_of(records, 1_000, 0))


def slots_of(records, trailers):
    """The file that these records make, byte for byte, written down here a second time."""
    made = b""
    for i, record in enumerate(records):
        payload = b"".join(record.views)
        slot = payload.ljust(fmt.trailer_offset(len(payload)), b"\0")
        slot += trailers[i * fmt.TRAILER_BYTES : (i + 1) * fmt.TRAILER_BYTES]
        made += slot.ljust(fmt.slot_bytes(len(payload)), b"\0")
    return made


@compiled
@pytest.mark.parametrize("size", SIZES)
def test_slots_are_written_as_the_format_says(tmp_path, size):
    records, trailers = records_of(size)
    with (tmp_path / "file").open("w+b") as file:
        lists = [record.views for record in records]
        native.routines.write_records(file.fileno(), 4_096, lists, trailers)
        file.seek(4_096)
        assert file.read() == slots_of(records, trailers)


@pytest.mark.parametrize("size", SIZES)
def test_a_cache_writes_the_same_files_in_both_forms(tmp_path, monkeypatch, size):
    """All but ids, times and the trailers' checks over them."""
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", size))})
    written = []
    for routines in (native.routines, None):
        monkeypatch.setattr(native, "routines", routines)
        store = tmp_path / f"store-{routines is None}"
        with kvtier.open(store, secret=bytes(32), host_bytes=0) as cache:
            ns = cache.namespace(layout, model="m", salt="s")
            digests = ns.match(np.arange(6 * 128 + 1)).digests
            source = [payload_of(digest, size) for digest in digests]
            assert ns.put(digests, source, durability="flushed").wait(20)
        (segment,) = store.rglob("*.kvs")
        slots = np.fromfile(segment, np.uint8)[fmt.PAGE :].reshape(6, -1)
        at = fmt.trailer_offset(size)
        trailers = slots[:, at : at + fmt.TRAILER_BYTES].copy().view(fmt.TRAILER)[:, 0]
        rows = [
            tuple(trailers[name].tobytes() for name in fmt.TRAILER.names if name not in VARYING)
        ]
        slots[:, at : at + fmt.TRAILER_BYTES] = 0
        written.append((rows, slots.tobytes()))
    assert written[0] == written[1]


VARYING = ("created_ms", "crc")

DAMAGE = {
    "none": lambda raw, slot, size: raw,
    "payload": lambda raw, slot, size: flipped(raw, slot + size // 2),
    "trailer": lambda raw, slot, size: flipped(raw, slot + fmt.trailer_offset(size) + 40),
    "check of the trailer": lambda raw, slot, size: flipped(
        raw, slot + fmt.trailer_offset(size) + fmt.TRAILER_BYTES - 1
    ),
    "swapped": lambda raw, slot, size: raw[slot : 2 * slot] + raw[:slot] + raw[2 * slot :],
    "cut": lambda raw, slot, size: raw[: 3 * slot + 17],
    "empty": lambda raw, slot, size: b"",
}


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", [0, 1])
def test_both_forms_judge_what_is_read_alike(tmp_path, monkeypatch, size, damage, kind):
    records, trailers = records_of(size)
    slot = fmt.slot_bytes(size)
    (tmp_path / "file").write_bytes(DAMAGE[damage](slots_of(records, trailers), slot, size))
    answers = []
    with (tmp_path / "file").open("rb") as file:
        for routines, io in (
            (native.routines, PosixIo()),
            (native.routines, Pure()),
            (None, Pure()),
        ):
            monkeypatch.setattr(native, "routines", routines)
            rooms = [bytearray(size) for _ in records]
            wanted = [
                Wanted(record.digest, [memoryview(room)[: i * 7], memoryview(room)[i * 7 :]])
                for i, (record, room) in enumerate(zip(records, rooms, strict=True))
            ]
            found = read_run(io, file.fileno(), 0, kind, 0, wanted)
            told = [
                (w.checksum, w.parent, w.depth, w.approximate, w.generation, w.seal) for w in wanted
            ]
            answers.append((found.statuses, found.counts, told, rooms))
    assert answers[0] == answers[1] == answers[2]
    good = answers[0][0].count(kvtier.Status.OK)
    expected = {"none": 5, "swapped": 3, "cut": 3, "empty": 0}.get(damage, 4)
    assert good == (expected if kind == 0 else 0)
    if damage == "none" and kind == 0:
        assert [told[3:5] for told in answers[0][2]][3] == (True, 3)


@compiled
def test_what_cannot_be_read_or_written_is_an_error_with_its_number(tmp_path):
    records, trailers = records_of(5_000)
    path = tmp_path / "file"
    path.write_bytes(b"")
    fd = os.open(path, os.O_RDONLY)
    os.close(fd)
    lists = [record.views for record in records]
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.routines.write_records(fd, 0, lists, trailers)
    wanted = [Wanted(record.digest, [memoryview(bytearray(5_000))]) for record in records]
    tails = bytearray(5 * (fmt.slot_bytes(5_000) - 5_000))
    with pytest.raises(OSError, match="Bad file descriptor"):
        native.routines.read_records(
            fd, 0, wanted, tails, 5_000, fmt.slot_bytes(5_000), 0, 0, fmt.FLAG_SEALED, 0
        )


@compiled
def test_sizes_that_do_not_fit_are_refused():
    records, trailers = records_of(5_000)
    lists = [record.views for record in records]
    with pytest.raises(ValueError, match="trailer"):
        native.routines.write_records(0, 0, lists, trailers[:-1])
    with pytest.raises(TypeError):
        native.routines.sum_records("views", 0)
    slot, flag = fmt.slot_bytes(5_000), fmt.FLAG_SEALED
    for size, room in ((4_999, 5_000), (5_000, 4_999)):
        wanted = [Wanted(bytes(32), [memoryview(bytearray(room))])]
        tails = bytearray(slot - 5_000)
        with pytest.raises(ValueError, match="do not fit"):
            native.routines.read_records(-1, 0, wanted, tails, size, slot, 0, 0, flag, slot)
    wanted = [Wanted(b"short", [memoryview(bytearray(5_000))])]
    with pytest.raises(ValueError, match="32 bytes"):
        native.routines.read_records(-1, 0, wanted, bytearray(slot), 5_000, slot, 0, 0, flag, slot)


def test_a_cache_works_in_both_forms(form, tmp_path):
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("a", 700), ("b", 4_300))})
    with kvtier.open(tmp_path, host_bytes=0) as cache:
        ns = cache.namespace(layout, model="m", salt="s")
        tokens = np.arange(9 * 128 + 1)
        digests = ns.match(tokens).digests
        source = np.stack([payload_of(digest, 5_000) for digest in digests])
        assert ns.put(digests, source, copy=False, durability="flushed").wait(20)
        with ns.match(tokens) as match:
            parts = [[bytearray(700), bytearray(4_300)] for _ in digests]
            assert ns.load(match, dst=parts, wait=True).wait().ok
        assert [b"".join(two) for two in parts] == [row.tobytes() for row in source]


def test_the_switch_leaves_the_compiled_form_out():
    code = "from deepinfer_kvtier.base import native; print(native.routines, native.STATE)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEEPINFER_KVTIER_PURE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "None pure Python: DEEPINFER_KVTIER_PURE is set\n"
