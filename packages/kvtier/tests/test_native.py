"""The compiled routines and their pure forms: equal in every answer, whatever lies in the file."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base import native
from deepinfer_kvtier.base.buffers import checksums_of
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.format import EncodedRecord, Origin, trailers_of
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
    assert native.routines.sum_records([[memoryview(data)], halves]) == [expected, expected]


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
        native.routines.sum_records("views")
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
