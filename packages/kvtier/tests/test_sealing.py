"""Encryption at rest: below host memory nothing is readable without the tenant's key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="encryption needs the extra crypto")

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.flow.encryption import SEAL_BYTES, Sealer, WriterIdentity
from deepinfer_kvtier.testing import payload_of

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
PAYLOAD = 4_000
LAYOUT = kvtier.LayoutSpec(
    128, {"block": kvtier.parts(("a", 1_000), ("b", 3_000)), "state": kvtier.parts(("s", 777))}
)
PROMPT = list(range(5 * 128 + 1))


def namespace(cache, key=None, salt="tenant"):
    return cache.namespace(LAYOUT, model="sealed", salt=salt, encryption_key=key)


def store_into(cache, key=None, *, copy=True):
    ns = namespace(cache, key)
    digests = ns.match(PROMPT).digests
    source = np.stack([payload_of(digest, PAYLOAD) for digest in digests])
    ticket = ns.put(digests, source, durability="flushed", copy=copy)
    state = ns.put_state(digests[4], b"s" * 777, n_blocks=5, durability="flushed")
    assert ticket.wait(60)
    assert state.wait(60)
    return source


def load_from(cache, key=None, parts=None):
    """(blocks matched, blocks loaded, bytes)"""
    ns = namespace(cache, key)
    with ns.match(PROMPT, want=("block",)) as match:
        dst = np.zeros((match.n_blocks, PAYLOAD), np.uint8)
        result = ns.load(match, dst=dst, parts=parts, wait=True).wait()
        return match.n_blocks, result.blocks.count(kvtier.Status.OK), dst


def files_of(store):
    return b"".join(path.read_bytes() for path in store.glob("w/*/seg-*.kvs"))


@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("part_sums", [True, False])
def test_sealed_records_come_back_and_lie_unreadable_on_disk(store, host_bytes, copy, part_sums):
    settings = {"encryption_key": KEY, "part_sums": part_sums}
    with kvtier.open(store, host_bytes=host_bytes, **settings) as cache:
        source = store_into(cache, copy=copy)
        assert np.array_equal(load_from(cache)[2], source)
    with kvtier.open(store, **settings) as cache:
        for parts in (None, ["b"]):
            matched, loaded, dst = load_from(cache, parts=parts)
            assert (matched, loaded) == (5, 5)
            assert np.array_equal(dst, source)
        ns = namespace(cache)
        with ns.match(PROMPT) as match:
            window = bytearray(777)
            assert ns.load(match, state_dst=window, wait=True).wait().ok
            assert window == b"s" * 777
    raw = files_of(store)
    assert not any(row[i : i + 16].tobytes() in raw for row in source for i in range(0, 4_000, 500))
    assert b"s" * 16 not in raw


@pytest.mark.parametrize(("wrote", "reads"), [(KEY, OTHER), (KEY, None), (None, KEY)])
def test_another_key_finds_nothing_and_keeps_records_of_its_own(store, wrote, reads):
    with kvtier.open(store, host_bytes=0) as cache:
        store_into(cache, wrote)
        assert load_from(cache, reads)[0] == 0
        for key in (reads, wrote):
            source = store_into(cache, key)
            matched, loaded, dst = load_from(cache, key)
            assert (matched, loaded) == (5, 5)
            assert np.array_equal(dst, source)


@pytest.mark.parametrize(("wrote", "reads"), [(KEY, OTHER), (KEY, None), (None, KEY)])
def test_bytes_that_a_key_does_not_open_are_a_miss(store, wrote, reads, monkeypatch):
    """Should a record be found in spite of its key, its bytes are not believed."""
    monkeypatch.setattr(Sealer, "bind", lambda self, root: root)
    with kvtier.open(store, host_bytes=0) as cache:
        source = store_into(cache, wrote)
        matched, loaded, dst = load_from(cache, reads)
        assert (matched, loaded) == (5, 0)
        assert wrote is None or not np.array_equal(dst, source)
        assert cache.stats()["loads"]["not_opened"] == 5
        assert load_from(cache, wrote)[1] == 5, "who has the right key lost nothing by it"


def test_a_tenant_whose_key_is_forgotten_is_unreadable_and_the_others_are_not(store):
    keys = {"one": KEY, "two": OTHER}
    with kvtier.open(store, host_bytes=0) as cache:
        for salt, key in keys.items():
            ns = namespace(cache, key, salt)
            digests = ns.match(PROMPT).digests
            source = np.stack([payload_of(digest, PAYLOAD) for digest in digests])
            assert ns.put(digests, source, durability="flushed").wait(60)
    with kvtier.open(store, host_bytes=0) as cache:
        results = {}
        for salt, key in (("one", bytes(32)), ("two", OTHER)):
            ns = namespace(cache, key, salt)
            with ns.match(PROMPT, want=("block",)) as match:
                dst = np.zeros((match.n_blocks, PAYLOAD), np.uint8)
                results[salt] = ns.load(match, dst=dst, wait=True).wait().ok_prefix
        assert results == {"one": 0, "two": 5}


@pytest.mark.parametrize("at", [5, 4_000 + 24, 4_000 + 112, 4_000 + 130])
def test_any_changed_byte_is_noticed(store, at):
    """Payload, digest, tag, key id: each one makes the record a miss."""
    with kvtier.open(store, host_bytes=0, encryption_key=KEY) as cache:
        store_into(cache)
        (path,) = store.glob("w/*/seg-*.kvs")
        raw = bytearray(path.read_bytes())
        raw[4096 + at] ^= 1
        path.write_bytes(raw)
        assert load_from(cache)[1] == 4


def test_records_move_between_files_without_their_key(store):
    """Collection and checks know no keys: what they copy must still open."""
    with kvtier.open(store, host_bytes=0, encryption_key=KEY) as cache:
        source = store_into(cache)
    with kvtier.open(store, host_bytes=0) as cache:
        from deepinfer_kvtier.log.compaction import reclassify
        from deepinfer_kvtier.ops.check import verify

        disk = cache.disk
        assert verify(disk).bad == {}
        assert reclassify(disk, disk.index.rows(), "agent") == 6
    with kvtier.open(store, host_bytes=0, encryption_key=KEY) as cache:
        assert np.array_equal(load_from(cache)[2], source)


def test_the_seal_is_what_the_format_page_says():
    writer = WriterIdentity()
    sealer = Sealer(KEY, salt=b"salt", fingerprint=b"f" * 32, writer=writer)
    sealed, seal = sealer.seal([memoryview(b"hello "), memoryview(b"world")], b"d" * 32, 1, 9)
    assert len(seal) == SEAL_BYTES == 64

    def derive(key, salt, info):
        return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key)

    key = derive(KEY, b"salt", b"kvtier v1 namespace" + b"f" * 32)
    key = derive(key, None, b"kvtier v1 record" + seal[16:32])
    bound = b"d" * 32 + b"\1" + (9).to_bytes(4, "little")
    assert AESGCM(key).decrypt(seal[32:44], bytes(sealed) + seal[:16], bound) == b"hello world"
    assert seal[16:32] == writer.id
    assert seal[44:] == bytes(20)


@given(st.binary(max_size=200), st.integers(0, 1), st.integers(0, 2**32 - 1), st.integers(0, 3))
def test_a_record_opens_only_as_what_it_was_sealed_for(plain, kind, depth, change):
    sealer = Sealer(KEY, salt=b"", fingerprint=b"f", writer=WriterIdentity())
    sealed, seal = sealer.seal([memoryview(plain)], b"d" * 32, kind, depth)
    digest = b"x" * 32 if change == 1 else b"d" * 32
    room = bytearray(sealed)
    opened = sealer.open(
        [memoryview(room)], seal, digest, kind ^ (change == 2), (depth + (change == 3)) % 2**32
    )
    assert opened == (change == 0)
    assert (bytes(room) == plain) if opened else bytes(room) == bytes(sealed)


def test_nonces_never_repeat_under_a_key():
    writers = [WriterIdentity() for _ in range(3)]
    seen = {(w.id, w.next_nonce()) for w in writers for _ in range(1_000)}
    assert len(seen) == 3_000


def test_a_key_of_another_length_is_refused(store):
    with pytest.raises(kvtier.ConfigError, match="encryption_key"):
        kvtier.open(store, encryption_key=b"short")
    with (
        kvtier.open(store) as cache,
        pytest.raises(kvtier.ConfigError, match="32 bytes, got 5"),
    ):
        namespace(cache, b"short")
