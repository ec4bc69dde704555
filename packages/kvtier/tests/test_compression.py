"""Compressed records: any reader reads what any setting wrote; damage is a miss, not an error."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import zstandard

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.faultrun import run_faults
from deepinfer_kvtier.flow import compression
from deepinfer_kvtier.flow import compression as codec
from deepinfer_kvtier.flow.compression import open_compressed
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.compaction import reclassify
from deepinfer_kvtier.log.reading import Wanted
from deepinfer_kvtier.testing import FaultIo, ManualClock, payload_of

from .test_tiers import DictTier

KEY, SECRET = bytes(range(32)), bytes(32)
BLOCKS, INDEX, MAIN, STATE = 6, 3_000, 30_001, 9_000
PAYLOAD = INDEX + MAIN
LAYOUT = kvtier.LayoutSpec(
    128,
    {
        "block": kvtier.parts(("L2.index", INDEX), ("L2.main", MAIN)),
        "state": kvtier.parts(("swa", STATE)),
    },
)
PROMPT = list(range(BLOCKS * 128 + 1))
SETTINGS = ["zstd-1", "shuffle+zstd-1", {"*": "shuffle4+zstd-1", "L2.index": "none"}]


def content(digest: bytes, nbytes: int = PAYLOAD) -> np.ndarray:
    """Checkable, and zstd halves it at least: every byte eight times."""
    return np.repeat(payload_of(digest, nbytes // 8 + 1), 8)[:nbytes]


def namespace(cache, **keywords):
    return cache.namespace(LAYOUT, model="m", salt="t", **keywords)


def store_into(cache, *, copy=True, cls="chat", noise=False):
    ns = namespace(cache)
    digests = ns.match(PROMPT).digests
    make = payload_of if noise else content
    source = np.stack([make(digest, PAYLOAD) for digest in digests])
    assert ns.put(digests, source, durability="flushed", copy=copy, cls=cls).wait(20)
    state = content(digests[-1] + b"s", STATE)
    assert ns.put_state(digests[-1], state, n_blocks=BLOCKS, durability="flushed", cls=cls).wait(20)
    return digests


def load_from(cache, *, parts=None, noise=False):
    """(blocks matched, blocks loaded and right, whether the state is right)"""
    ns = namespace(cache)
    make = payload_of if noise else content
    with ns.match(PROMPT) as match:
        room = np.full((match.block_prefix, PAYLOAD), 0xAA, np.uint8)
        state = np.full(STATE, 0xAA, np.uint8) if match.state else None
        whole = slice(0, match.block_prefix)
        job = ns.load(match, blocks=whole, dst=room, state_dst=state, parts=parts, wait=True)
        result = job.wait()
        good = 0
        for i, status in enumerate(result.blocks):
            if status is kvtier.Status.OK:
                assert np.array_equal(room[i], make(match.digests[i], PAYLOAD)), f"block {i}"
                good += 1
        if result.state is kvtier.Status.OK:
            assert np.array_equal(state, content(match.digests[-1] + b"s", STATE))
        return match.block_prefix, good, result.state is kvtier.Status.OK


ALL = (BLOCKS, BLOCKS, True)


@pytest.fixture
def without_library(monkeypatch):
    """A process that lacks the extra."""
    monkeypatch.setattr(codec, "installed", lambda: False)
    compression._warned.clear()


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("host_bytes", "copy"),
    [(1 << 20, True), (1 << 20, False), (0, False)],
)
@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_a_reader_with_any_setting_reads_what_any_setting_wrote(
    store, setting, host_bytes, copy, key
):
    settings = {"encryption_key": key} if key else {}
    writer = {"host_bytes": host_bytes, "compression": setting}
    with kvtier.open(store, **writer, **settings) as cache:
        store_into(cache, copy=copy)
        assert load_from(cache) == ALL
        stats = cache.stats()["compression"]
        assert stats["records"] == BLOCKS + 1
        assert stats["bytes_before"] == BLOCKS * PAYLOAD + STATE
        assert stats["bytes_after"] < stats["bytes_before"] * 0.6
        assert cache.stats()["disk"]["written_file_bytes"] < stats["bytes_before"] * 0.7
        text = cache.metrics()
        assert f"kvtier_compression_bytes_after_total {stats['bytes_after']}\n" in text
        assert f"kvtier_compression_records_total {BLOCKS + 1}\n" in text
    for other in ("none", "zstd-1"):
        with kvtier.open(store, compression=other, **settings) as cache:
            assert load_from(cache) == ALL
            assert load_from(cache) == ALL, "from memory"
    for parts in (["L2.main"], ["L2.index", "L2.*"]):
        with kvtier.open(store, part_sums=True, **settings) as cache:
            assert load_from(cache, parts=parts) == ALL, "whole records, with the first stage"


def trailers_of(store) -> list[fmt.Trailer]:
    found = []
    for path in sorted(store.rglob("*.kvs")):
        raw = path.read_bytes()
        at = raw.find(fmt.TRAILER_MAGIC)
        while at >= 0:
            found.append(fmt.parse_trailer(raw[at : at + fmt.TRAILER_BYTES]))
            at = raw.find(fmt.TRAILER_MAGIC, at + 8)
    return found


def test_what_does_not_shrink_is_stored_as_if_nothing_was_asked_for(tmp_path, make_store):
    slots = {}
    for setting in ("none", "zstd-1"):
        store = make_store(tmp_path / setting)
        with kvtier.open(store, compression=setting, secret=SECRET, part_sums=True) as cache:
            ns = namespace(cache)
            digests = ns.match(PROMPT).digests
            source = np.stack([payload_of(digest, PAYLOAD) for digest in digests])
            assert ns.put(digests, source, durability="flushed").wait(20)
        assert not any(trailer.compressed for trailer in trailers_of(store))
        (path,) = store.rglob("*.kvs")
        raw = bytearray(path.read_bytes())
        step = fmt.slot_bytes(PAYLOAD)
        for i in range(BLOCKS):
            trailer = fmt.PAGE + i * step + fmt.trailer_offset(PAYLOAD)
            raw[trailer + 80 : trailer + 96] = bytes(16)  # when, and its number
            raw[trailer + 188 : trailer + 192] = bytes(4)
        slots[setting] = bytes(raw[fmt.PAGE :])
    assert slots["none"] == slots["zstd-1"]


def test_an_earlier_release_finds_no_trailer_where_a_record_is_compressed(store):
    """It knew format 1 and took the length of a layout for the length of its payload."""
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        digests = store_into(cache)
        lengths = cache.disk.index.probe(0, 0, digests)["length"]
        assert (lengths < PAYLOAD).all(), "so it looks up nothing"
    (path,) = store.rglob("*.kvs")
    raw = path.read_bytes()
    at, found = raw.find(fmt.TRAILER_MAGIC), 0
    while at >= 0:
        assert struct.unpack_from("<H", raw, at + 8) == (2,)
        found += 1
        at = raw.find(fmt.TRAILER_MAGIC, at + 8)
    assert found == BLOCKS + 1


def read_by_the_page(root) -> dict[tuple[bytes, int], bytes]:
    """FORMAT.md, zstandard and nothing of the package: digest and kind -> expanded payload."""
    found = {}
    for path in root.rglob("*.kvs"):
        raw, at = path.read_bytes(), 4096
        while at < len(raw):
            end = raw.index(b"KVTSLOT1", at)
            version, kind = struct.unpack_from("<HB", raw, end + 8)
            flags, length = struct.unpack_from("<II", raw, end + 12)
            (expanded,) = struct.unpack_from("<I", raw, end + 182)
            stored = raw[at : at + length]
            assert (version == 2) == bool(flags & 512) == bool(expanded)
            if flags & 512:
                (count,) = struct.unpack_from("<H", stored)
                body, out = 4 + 12 * count, b""
                for part in range(count):
                    size, here, code, width = struct.unpack_from("<IIBB", stored, 4 + 12 * part)
                    piece = stored[body : body + here]
                    body += here
                    if code:
                        piece = zstandard.ZstdDecompressor().decompress(piece)
                    if code == 2:
                        whole = size // width * width
                        ranks = np.frombuffer(piece[:whole], np.uint8).reshape(width, -1)
                        piece = ranks.T.tobytes() + piece[whole:]
                    assert len(piece) == size
                    out += piece
                assert (body, len(out)) == (length, expanded)
                stored = out
            found[raw[end + 24 : end + 56], kind] = stored
            at = -(-(end + 192) // 4096) * 4096
    return found


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_format_page_is_enough_to_expand_a_record(store, setting):
    with kvtier.open(store, compression=setting) as cache:
        digests = store_into(cache)
    expected = {(digest, 0): content(digest).tobytes() for digest in digests}
    expected[digests[-1], 1] = content(digests[-1] + b"s", STATE).tobytes()
    assert read_by_the_page(store) == expected


def test_checks_collection_and_moves_need_no_codec(store, cli, without_library):
    """All of it works on stored bytes; `without_library` holds from the second opening on."""
    clock = ManualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "installed", lambda: True)
        with kvtier.open(store, compression="zstd-1", host_bytes=0, clock=clock) as cache:
            digests = store_into(cache)
    assert cli.facts("fsck", store)["checked"] == BLOCKS + 1
    with kvtier.open(store, host_bytes=0, clock=clock) as cache:
        disk = cache.disk
        assert reclassify(disk, disk.index.rows(), "agent") == BLOCKS + 1
        namespace(cache).drop(digests[:-1], kinds=("block",))
        assert cache.gc().segments_expired == 1, "the old segment holds nothing any more"
    clock.advance(1)
    assert cli.facts("fsck", store)["bad"] == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "installed", lambda: True)
        with kvtier.open(store, host_bytes=0, clock=clock) as cache:
            ns = namespace(cache)
            room = np.zeros((1, PAYLOAD), np.uint8)
            rows = cache.disk.index.probe(0, 0, digests)
            assert (rows["length"] < PAYLOAD).tolist() == [False] * (BLOCKS - 1) + [True]
            again = np.stack([content(d) for d in digests[:-1]])
            assert ns.put(digests[:-1], again, durability="flushed").wait(20)
            with ns.match(PROMPT) as match:
                last = slice(BLOCKS - 1, BLOCKS)
                assert ns.load(match, blocks=last, dst=room, wait=True).wait().ok
            assert np.array_equal(room[0], content(digests[-1]))


def test_a_killed_writers_unindexed_records_are_adopted_compressed(store):
    io = FaultIo()
    cache = kvtier.open(store, compression="zstd-1", host_bytes=0, io=io)
    cache.disk._open_writer().log = lambda entries: None  # it dies before its index frame
    store_into(cache)
    io.crash()
    cache.close(timeout=0)
    with kvtier.open(store, host_bytes=0) as survivor:
        survivor.gc()
        assert load_from(survivor) == ALL


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_compressed_records_are_read_back_as_a_test_like_all_others(store, key):
    settings = {"encryption_key": key} if key else {}
    with kvtier.open(store, compression="zstd-1", readback_every=1, **settings) as cache:
        store_into(cache)
        namespace(cache).put([b"x" * 32], content(b"x"), durability="flushed").wait(20)
        stats = cache.stats()
        assert stats["readback"]["l2_readback_ok_ratio"] == 1.0
        assert stats["disk"]["read_records"] > 0
        assert stats["disk"].get("quarantined", 0) == 0


def test_quotas_count_what_is_stored(store):
    with kvtier.open(store, compression="zstd-1", quota_bytes=200_000, floor_s=0) as cache:
        store_into(cache)
        report = cache.gc()
        assert report.within_limits
        assert report.segments_evicted == 0
        assert report.bytes_left < BLOCKS * PAYLOAD


@pytest.mark.slow
def test_faults_return_no_wrong_byte_of_compressed_records(tmp_path):
    run = run_faults(tmp_path / "store", reads=3_000, seed=5, compression="shuffle+zstd-1")
    assert run.wrong == 0
    assert run.reads >= 3_000
    assert run.noticed["expanded_records"] > 1_000
    assert run.noticed["corrupt"] > 0


# -- damage


def rewrite_first_slot(store, change) -> None:
    """Change the stored payload of the first record, and make its checksum fit again."""
    (path,) = store.rglob("*.kvs")
    raw = bytearray(path.read_bytes())
    at = raw.index(fmt.TRAILER_MAGIC)
    trailer = fmt.parse_trailer(raw[at : at + fmt.TRAILER_BYTES])
    stored = bytearray(raw[fmt.PAGE : fmt.PAGE + trailer.payload_bytes])
    change(stored)
    assert len(stored) == trailer.payload_bytes
    raw[fmt.PAGE : fmt.PAGE + len(stored)] = stored
    good = replace(trailer, checksum=checksum_of([memoryview(stored)]))
    raw[at : at + fmt.TRAILER_BYTES] = good.pack()
    path.write_bytes(raw)


def larger_part(stored):
    struct.pack_into("<I", stored, 4, INDEX + 1)


def broken_frame(stored):
    stored[len(stored) // 2 :] = bytes(len(stored) - len(stored) // 2)


def no_table(stored):
    stored[:2] = b"\xff\xff"


@pytest.mark.parametrize("change", [larger_part, broken_frame, no_table])
def test_a_payload_that_does_not_expand_is_corrupt_hidden_and_stored_again(store, change):
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        digests = store_into(cache)
    rewrite_first_slot(store, change)
    with kvtier.open(store, host_bytes=0) as cache:
        assert load_from(cache)[:2] == (BLOCKS, BLOCKS - 1)
        disk = cache.stats()["disk"]
        assert (disk["corrupt"], disk["quarantined"]) == (1, 1)
        assert load_from(cache)[0] == 0
        put = namespace(cache).put(digests[:1], content(digests[0]), durability="flushed")
        assert put.wait(20)
        assert load_from(cache) == ALL


@pytest.mark.parametrize("at", [0, 5, 700, 2_500])
def test_a_flipped_bit_of_a_stored_payload_is_found_before_it_is_expanded(store, at, monkeypatch):
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        store_into(cache)
    (path,) = store.rglob("*.kvs")
    raw = bytearray(path.read_bytes())
    raw[fmt.PAGE + at] ^= 4
    path.write_bytes(raw)
    expanded = []
    real = compression.decode
    monkeypatch.setattr(compression, "decode", lambda *given: expanded.append(1) or real(*given))
    with kvtier.open(store, host_bytes=0) as cache:
        assert load_from(cache)[:2] == (BLOCKS, BLOCKS - 1)
        assert cache.stats()["disk"]["corrupt"] == 1
    assert len(expanded) == 2 * (BLOCKS - 1) + 1


@pytest.mark.parametrize("other", ["digest", "kind", "shard", "payload_bytes", "expanded_bytes"])
def test_another_record_in_its_place_is_a_miss(store, other):
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        digests = store_into(cache)
    (path,) = store.rglob("*.kvs")
    raw = path.read_bytes()
    at = raw.index(fmt.TRAILER_MAGIC)
    trailer = fmt.parse_trailer(raw[at : at + fmt.TRAILER_BYTES])
    stored = memoryview(raw)[fmt.PAGE : fmt.PAGE + trailer.payload_bytes]

    def opened(trailer):
        counts = Counter()
        want = Wanted(digests[0], [memoryview(bytearray(PAYLOAD))])
        return open_compressed(stored, trailer, want, 0, 0, counts), counts["digest_mismatch"]

    assert opened(trailer) == (Status.OK, 0)
    changed = digests[1] if other == "digest" else getattr(trailer, other) + 1
    assert opened(replace(trailer, **{other: changed})) == (Status.MISS, 1)


def test_a_short_file_is_a_miss_of_its_last_record(store):
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        store_into(cache)
    (path,) = store.rglob("*.kvs")
    path.write_bytes(path.read_bytes()[: -2 * fmt.PAGE])
    with kvtier.open(store, host_bytes=0) as cache:
        matched, good, _ = load_from(cache)
        assert matched == BLOCKS
        assert good >= BLOCKS - 1
        assert cache.stats()["disk"]["short_reads"] >= 1


# -- without the extra


def test_a_process_without_the_extra_misses_counts_warns_once_and_stores_its_own(
    store, monkeypatch, caplog
):
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        store_into(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "installed", lambda: False)
        compression._warned.clear()
        with kvtier.open(store, host_bytes=0) as cache:
            assert load_from(cache) == (BLOCKS, 0, False)
            assert cache.stats()["disk"]["codec_missing"] == BLOCKS + 1
            assert f"kvtier_disk_codec_missing_total {BLOCKS + 1}\n" in cache.metrics()
            assert cache.stats()["disk"].get("quarantined", 0) == 0
            warnings = [r for r in caplog.records if "compressed record" in r.message]
            assert len(warnings) == 1
            assert "./packages/kvtier[zstd]" in warnings[0].message
            assert load_from(cache)[0] == 0, "it does not look there again"
            store_into(cache)
            assert load_from(cache) == ALL
        with kvtier.open(store, host_bytes=0) as cache:
            load_from(cache)
            assert load_from(cache) == ALL, "of two copies, the one that can be read"
    with kvtier.open(store, host_bytes=0) as cache:
        assert load_from(cache) == ALL, "and nobody else lost anything"


def test_asking_for_compression_without_the_extra_names_it(store, without_library, cli, tmp_path):
    with pytest.raises(kvtier.ConfigError, match=r"./packages/kvtier\[zstd\]"):
        kvtier.open(store, compression="zstd-1")
    with kvtier.open(store):
        pass
    done = cli.run("migrate", store, tmp_path / "new", "--compression", "zstd-1")
    assert done.returncode == 2
    assert "./packages/kvtier[zstd]" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_package_works_where_the_library_cannot_be_imported(store):
    with kvtier.open(store, compression="zstd-1", host_bytes=0) as cache:
        store_into(cache)
    script = textwrap.dedent(
        """
        import sys
        sys.modules["zstandard"] = None
        import numpy as np
        import deepinfer_kvtier as kvtier
        block = kvtier.parts(("L2.index", 3_000), ("L2.main", 30_001))
        layout = kvtier.LayoutSpec(128, {"block": block, "state": kvtier.parts(("swa", 9_000))})
        with kvtier.open(sys.argv[1], host_bytes=0) as cache:
            ns = cache.namespace(layout, model="m", salt="t")
            with ns.match(list(range(6 * 128 + 1))) as match:
                room = np.zeros((match.n_blocks, 33_001), np.uint8)
                result = ns.load(match, dst=room, wait=True).wait()
                print(match.n_blocks, result.ok_prefix, cache.stats()["disk"]["codec_missing"])
            try:
                kvtier.open(sys.argv[1], compression="zstd-1")
            except kvtier.ConfigError as error:
                print(error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(store)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "6 0 6",
        'compression needs the extra "zstd": pip install "./packages/kvtier[zstd]"',
    ]
    assert done.stderr.count("counts as a miss") == 1


# -- other tiers


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_object_storage_keeps_and_returns_compressed_records(tmp_path, key):
    pytest.importorskip("obstore")
    settings = {"secret": SECRET, "tiers": [f"file://{tmp_path}/bucket?linger_s=0"]}
    settings |= {"encryption_key": key} if key else {}
    with kvtier.open(host_bytes=0, compression="zstd-1", **settings) as one:
        ns = namespace(one)
        digests = ns.match(PROMPT).digests
        ns.put(digests, np.stack([content(d) for d in digests]))
        ns.put_state(digests[-1], content(digests[-1] + b"s", STATE), n_blocks=BLOCKS)
        assert one.flush().done
    stored = sum(path.stat().st_size for path in (tmp_path / "bucket").rglob("*.kvs"))
    assert stored < 0.7 * BLOCKS * PAYLOAD
    with kvtier.open(host_bytes=0, **settings) as two:
        assert load_from(two) == ALL


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_a_mooncake_pool_keeps_and_returns_compressed_records(monkeypatch, key):
    from deepinfer_kvtier.remote.tiers import build

    from .tiers.test_mooncake import FakePool

    pool = FakePool()
    monkeypatch.setattr(build, "connect", lambda config: pool)
    settings = {"secret": SECRET, "tiers": ["mooncake://127.0.0.1:1"]}
    settings |= {"encryption_key": key} if key else {}
    with kvtier.open(host_bytes=0, compression="zstd-1", **settings) as one:
        ns = namespace(one)
        digests = ns.match(PROMPT).digests
        ns.put(digests, np.stack([content(d) for d in digests]))
        ns.put_state(digests[-1], content(digests[-1] + b"s", STATE), n_blocks=BLOCKS)
        assert one.flush().done
    assert sum(map(len, pool.values.values())) < 0.7 * BLOCKS * PAYLOAD
    with kvtier.open(host_bytes=0, **settings) as two:
        assert load_from(two) == ALL
    with pytest.MonkeyPatch.context() as patch, kvtier.open(host_bytes=0, **settings) as three:
        patch.setattr(codec, "installed", lambda: False)
        assert load_from(three) == (BLOCKS, 0, False)
        assert three.stats()["tiers"]["mooncake"]["codec_missing"] == BLOCKS + 1


def test_a_tier_that_cannot_expand_is_given_what_was_put():
    far = DictTier()
    with kvtier.open(host_bytes=0, compression="zstd-1", tiers=[far]) as cache:
        ns = namespace(cache)
        digests = ns.match(PROMPT).digests
        ns.put(digests, np.stack([content(d) for d in digests]))
        assert cache.flush().done
        assert {len(payload) for payload, _ in far.stored.values()} == {PAYLOAD}
        assert load_from(cache)[:2] == (BLOCKS, BLOCKS)


def test_a_shorter_record_of_a_tier_that_compresses_nothing_is_no_hit():
    """It costs neither a read nor a plan that counts on it."""
    far = DictTier()
    with kvtier.open(host_bytes=0, tiers=[far]) as cache:
        ns = namespace(cache)
        digests = ns.match(PROMPT).digests
        ns.put(digests, np.stack([content(d) for d in digests]))
        ns.put_state(digests[-1], content(digests[-1] + b"s", STATE), n_blocks=BLOCKS)
        assert cache.flush().done
        assert ns.match(PROMPT).n_blocks == BLOCKS
        far.stored = {key: (payload[:-1], out) for key, (payload, out) in far.stored.items()}
        match = ns.match(PROMPT)
        assert (match.block_prefix, match.state) == (0, None)


@pytest.mark.parametrize(
    ("seals", "setting", "arrives"),
    [
        (True, "none", True),
        (True, "zstd-1", False),
        (False, "none", False),
        (False, "zstd-1", False),
    ],
)
def test_an_encrypted_record_goes_only_to_tiers_that_can_give_it_back(seals, setting, arrives):
    far = DictTier()
    far.caps = replace(far.caps, seals=seals)
    with kvtier.open(host_bytes=0, compression=setting, encryption_key=KEY, tiers=[far]) as cache:
        ns = namespace(cache)
        digests = ns.match(PROMPT).digests
        ns.put(digests, np.stack([content(d) for d in digests]))
        assert cache.flush().done
        assert len(far.stored) == (BLOCKS if arrives else 0)
        skipped = cache.stats()["tiers"]["far"].get("sealed_skipped", 0)
        assert skipped == (0 if arrives else BLOCKS)


def test_a_tier_behind_the_directory_gets_each_record_compressed_once(store, tmp_path):
    pytest.importorskip("obstore")
    tiers = [f"file://{tmp_path}/bucket?linger_s=0"]
    with kvtier.open(store, compression="zstd-1", secret=SECRET, tiers=tiers) as cache:
        store_into(cache)
        assert cache.flush().done
        assert cache.stats()["compression"]["records"] == BLOCKS + 1
        assert cache.stats()["tiers"]["s3"]["stored_records"] == BLOCKS + 1
    with kvtier.open(host_bytes=0, secret=SECRET, tiers=tiers) as other:
        assert load_from(other) == ALL


def test_machines_on_a_mount_read_each_others_compressed_records(tmp_path):
    kvtier.init(tmp_path / "mount", mode="shared-fs", min_free_share=0.0)
    with kvtier.open(tmp_path / "mount", compression="zstd-1") as one:
        store_into(one)
        with kvtier.open(tmp_path / "mount", host_bytes=0) as two:
            assert load_from(two) == ALL


# -- migrate


@pytest.mark.parametrize(
    ("wrote", "wanted"), [("none", "zstd-1"), ("zstd-1", "shuffle+zstd-1"), ("zstd-1", "none")]
)
def test_migration_compresses_recompresses_and_expands(store, tmp_path, cli, wrote, wanted):
    with kvtier.open(store, compression=wrote, host_bytes=0) as cache:
        digests = store_into(cache)
    facts = cli.facts("migrate", store, tmp_path / "new", "--compression", wanted)
    assert (facts["records"], facts["left_behind"], facts["not_recompressed"]) == (BLOCKS + 1, 0, 0)
    whole = BLOCKS * PAYLOAD + STATE
    assert facts["payload_bytes"] == whole if wanted == "none" else facts["payload_bytes"] < whole
    compressed = [trailer.compressed for trailer in trailers_of(tmp_path / "new")]
    assert compressed == [wanted != "none"] * (BLOCKS + 1)
    assert read_by_the_page(tmp_path / "new")[digests[0], 0] == content(digests[0]).tobytes()
    with kvtier.open(tmp_path / "new", host_bytes=0) as cache:
        assert load_from(cache) == ALL
    kept = cli.facts("migrate", tmp_path / "new", tmp_path / "again")
    assert kept["payload_bytes"] == facts["payload_bytes"], "as they are, without the option"


@pytest.mark.parametrize("wrote", ["none", "zstd-1"])
def test_migration_copies_encrypted_records_as_they_are(store, tmp_path, cli, wrote):
    with kvtier.open(store, compression=wrote, host_bytes=0, encryption_key=KEY) as cache:
        store_into(cache)
    facts = cli.facts("migrate", store, tmp_path / "new", "--compression", "shuffle+zstd-1")
    assert facts["not_recompressed"] == BLOCKS + 1
    with kvtier.open(tmp_path / "new", host_bytes=0, encryption_key=KEY) as cache:
        assert load_from(cache) == ALL


def test_recompressed_records_keep_no_sums_of_parts(store, tmp_path, cli):
    with kvtier.open(store, part_sums=True, host_bytes=0) as cache:
        store_into(cache)
    assert any(any(trailer.extra) for trailer in trailers_of(store))
    cli.facts("migrate", store, tmp_path / "new", "--compression", "zstd-1")
    assert not any(any(trailer.extra) for trailer in trailers_of(tmp_path / "new"))


def test_migration_to_an_unknown_codec_is_refused_before_anything_is_made(store, tmp_path, cli):
    with kvtier.open(store, host_bytes=0) as cache:
        store_into(cache)
    done = cli.run("migrate", store, tmp_path / "new", "--compression", "lz4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "none, zstd-1" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_setting_is_no_part_of_the_identity(store):
    with kvtier.open(store, compression="zstd-1") as one, kvtier.open(store) as two:
        assert namespace(one).root == namespace(two).root


def test_queue_books_balance_while_records_shrink_in_it(store, check_leaks):
    with kvtier.open(store, compression="zstd-1", queue_bytes=BLOCKS * PAYLOAD * 2) as cache:
        for _ in range(3):
            digests = store_into(cache)
            namespace(cache).drop(digests)
        check_leaks(cache)
        assert cache.queue.queued_bytes == 0


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_memory_keeps_the_checksum_of_what_was_put_not_of_what_is_stored(store, copy, key):
    settings = {"encryption_key": key} if key else {}
    with kvtier.open(store, compression="zstd-1", **settings) as cache:
        digests = store_into(cache, copy=copy)
        for digest in digests:
            record = cache.host.peek(0, digest)
            assert record.checksum == checksum_of([record.data.data])
    with kvtier.open(store, **settings) as cache:
        assert load_from(cache) == ALL
        record = cache.host.peek(0, digests[0])
        assert record.checksum == checksum_of([record.data.data])
