"""Encrypted records in tiers that machines share: readable with the key, and only with it."""

from __future__ import annotations

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.remote.tiers import build
from deepinfer_kvtier.testing import payload_of

from .test_mooncake import FakePool

SECRET, KEY, OTHER = bytes(range(32)), b"k" * 32, b"o" * 32

pytest.importorskip("cryptography", reason="needs the extra crypto")


def store_and_share(tmp_path, make_model, url):
    """(blocks another machine reads with the key, blocks read with another key, plain bytes)."""
    with kvtier.open(tmp_path / "one", secret=SECRET, tiers=[url], encryption_key=KEY) as one:
        model = make_model(one)
        tokens = model.prompt(1, 6)
        digests = model.digests(tokens)
        model.store(tokens)
        assert one.flush().done
    plain = [payload_of(digest, 5_000).tobytes() for digest in digests]
    read = []
    for key in (KEY, OTHER):
        with kvtier.open(host_bytes=0, secret=SECRET, tiers=[url], encryption_key=key) as two:
            read.append(make_model(two).load_all(tokens)[1])
    return (*read, plain)


def test_sealed_records_in_object_storage(tmp_path, make_model):
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}/bucket?linger_s=0"
    with_key, without, plain = store_and_share(tmp_path, make_model, url)
    assert (with_key, without) == (6, 0)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "bucket").rglob("*.kvs"))
    assert len(stored) > 6 * 5_000
    assert not any(payload[:64] in stored for payload in plain)


def test_sealed_records_in_a_mooncake_pool(tmp_path, make_model, monkeypatch):
    pool = FakePool()
    monkeypatch.setattr(build, "connect", lambda config: pool)
    with_key, without, plain = store_and_share(tmp_path, make_model, "mooncake://127.0.0.1:1")
    assert (with_key, without) == (6, 0)
    stored = b"".join(pool.values.values())
    assert len(stored) > 6 * 5_000
    assert not any(payload[:64] in stored for payload in plain)


def test_a_changed_byte_of_a_sealed_record_is_a_miss(tmp_path, make_model):
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}/bucket?linger_s=0"
    with kvtier.open(host_bytes=0, secret=SECRET, tiers=[url], encryption_key=KEY) as one:
        model = make_model(one)
        tokens = model.prompt(1, 3)
        model.store(tokens)
        assert one.flush().done
    (path,) = (tmp_path / "bucket").rglob("*.kvs")
    raw = np.frombuffer(path.read_bytes(), dtype=np.uint8).copy()
    raw[4096 + 2_500] ^= 1
    path.write_bytes(raw.tobytes())
    with kvtier.open(host_bytes=0, secret=SECRET, tiers=[url], encryption_key=KEY) as two:
        assert make_model(two).load_all(tokens) == (3, 2)
