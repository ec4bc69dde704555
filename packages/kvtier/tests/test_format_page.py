"""A reader written from FORMAT.md alone, with nothing of the package, must find every record."""

from __future__ import annotations

import json
import struct
import zlib

import blake3
import numpy as np
import xxhash

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of


def crc_without(raw: bytes, at: int) -> int:
    return zlib.crc32(raw[:at] + bytes(4) + raw[at + 4 :])


def read_store(root) -> dict[tuple[bytes, int], bytes]:
    """(digest, kind) -> payload of everything the logs name, checked on the way."""
    store = bytes.fromhex(json.loads((root / "FORMAT.json").read_text())["store"])
    found = {}
    for folder in (root / "w").iterdir():
        segments = {int(p.stem.rsplit("-", 1)[1]): p.read_bytes() for p in folder.glob("*.kvs")}
        for number, raw in segments.items():
            assert raw[:8] == b"KVTSEG1\0"
            assert struct.unpack_from("<I", raw, 24) == (number,)
            assert (raw[28:44], raw[44:60].hex()) == (store, folder.name)
            assert struct.unpack_from("<I", raw, 60) == (zlib.crc32(raw[:60]),)
        log = (folder / "idx-0.kvx").read_bytes()
        for at in range(0, len(log), 4096):
            frame = log[at : at + 4096]
            magic, number, count, crc = struct.unpack_from("<8sQII", frame)
            assert (magic, number, crc) == (b"KVTIDX1\0", at // 4096, crc_without(frame, 20))
            for i in range(count):
                entry = frame[64 + 64 * i : 128 + 64 * i]
                segment, page, length = struct.unpack_from("<III", entry, 24)
                kind, _, flags = struct.unpack_from("<BBH", entry, 36)
                if flags & ~1:
                    continue
                slot = segments[segment][page * 4096 :]
                trailer = slot[(length + 7) // 8 * 8 :][:192]
                payload = slot[:length]
                assert trailer[:8] == b"KVTSLOT1"
                assert struct.unpack_from("<I", trailer, 188) == (zlib.crc32(trailer[:188]),)
                assert struct.unpack_from("<BxII", trailer, 10)[0] == kind
                assert struct.unpack_from("<I", trailer, 16) == (length,)
                assert trailer[96:112] == xxhash.xxh3_128(payload).digest()
                assert entry[:16] == trailer[24:40]
                assert entry[48:56] == trailer[104:112]
                found[trailer[24:56], kind] = payload
    return found


def read_snapshot(path, store: bytes) -> tuple[int, list[bytes]]:
    """(next frame, entries) of a snapshot."""
    raw = path.read_bytes()
    magic, version, number, frame, count = struct.unpack_from("<8sHxxIQQ", raw)
    assert (magic, version, f"snap-{number}.kvi") == (b"KVTSNP1\0", 1, path.name)
    assert (raw[32:48], raw[48:64].hex()) == (store, path.parent.name)
    assert raw[64:80] == xxhash.xxh3_128(raw[4096:]).digest()
    assert struct.unpack_from("<I", raw, 80) == (zlib.crc32(raw[:80]),)
    entries = [raw[at : at + 64] for at in range(4096, len(raw), 64)]
    assert len(entries) == count
    return frame, entries


def test_the_page_is_enough_to_read_a_snapshot(store, make_model, monkeypatch):
    monkeypatch.setattr("deepinfer_kvtier.log.writer._LAST_SNAPSHOT_FRAMES", 2)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 70)
        model.store(tokens, durability="flushed").wait(60)
        digests = model.digests(tokens)
    (path,) = store.glob("w/*/snap-*.kvi")
    store_id = bytes.fromhex(json.loads((store / "FORMAT.json").read_text())["store"])
    frame, entries = read_snapshot(path, store_id)
    assert frame == (path.parent / "idx-0.kvx").stat().st_size // 4096
    flags = [struct.unpack_from("<H", entry, 38)[0] & ~1 for entry in entries]
    keys = [entry[:16] for entry, flag in zip(entries, flags, strict=True) if not flag]
    assert sorted(keys) == sorted(digest[:16] for digest in digests)
    assert [int.from_bytes(key[:8], "little") for key in keys] == sorted(
        int.from_bytes(key[:8], "little") for key in keys
    )
    assert flags[-1] == 32


def test_the_page_is_enough_to_read_a_store(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 70)
        model.store(tokens, states=(3,), durability="flushed").wait(60)
        digests = model.digests(tokens)
    expected = {(d, 0): payload_of(d, 5_000).tobytes() for d in digests}
    expected[digests[2], 1] = payload_of(digests[2] + b"s", 9_001).tobytes()
    assert read_store(store) == expected
    secret = (store / "SECRET").read_bytes()
    canonical = (
        '{"adapters":[],"identity_version":1,"layout":{"block_tokens":128,"kinds":{"block":'
        '[["index",0,1000],["main",1000,4000]],"state":[["swa",0,9001]]}},"model":"model","numerics":"",'
        '"quantisation":{},"rope":{},"shard":[0,1,""],"tables":{}}'
    )
    derived = blake3.blake3(canonical.encode(), derive_key_context="kvtier v1 fingerprint")
    print_ = derived.digest()
    previous = blake3.blake3(print_ + struct.pack("<I", 6) + b"tenant", key=secret).digest()
    for i, digest in enumerate(digests):
        words = np.asarray(tokens[128 * i : 128 * i + 128], dtype="<u4").tobytes()
        previous = blake3.blake3(previous + words, key=secret).digest()
        assert previous == digest
