"""The whole cache on object storage: two machines with nothing in common but the bucket."""

from __future__ import annotations

import os
import sys
import time

import pytest
import xxhash

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.remote.tiers.manifest import parse_manifest

SECRET = bytes(range(32))

pytest.importorskip("obstore", reason="object-storage tests need the extra s3")


@pytest.fixture
def bucket(tmp_path):
    return f"file://{tmp_path}/bucket?linger_s=0&poll_s=0.05"


def eventually(check, seconds=20.0):
    """Wait for another thread; a generous limit, no assertion about time."""
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return check()


def test_a_second_machine_reuses_what_the_first_has_computed(tmp_path, bucket, make_model):
    with kvtier.open(tmp_path / "one", secret=SECRET, tiers=[bucket]) as one:
        model = make_model(one)
        tokens = model.prompt(1, 12)
        assert model.store(tokens, states=(12,)).wait(60)
        assert one.flush().done
    with kvtier.open(tmp_path / "two", secret=SECRET, tiers=[bucket]) as two:
        other = make_model(two)
        with other.ns.match(tokens) as match:
            assert match.n_blocks == 12
            assert [span.tier for span in match.spans] == ["s3"]
            assert match.state is not None
        assert other.load_all(tokens) == (12, 12)
        with other.ns.match(tokens) as match:
            assert [span.tier for span in match.spans] == ["host"], "read once, then in memory"


def test_it_works_without_a_local_directory(bucket, make_model):
    with kvtier.open(host_bytes=1 << 20, secret=SECRET, tiers=[bucket]) as one:
        model = make_model(one)
        tokens = model.prompt(2, 5)
        assert model.store(tokens, durability="flushed").wait(20)
    with kvtier.open(host_bytes=1 << 20, secret=SECRET, tiers=[bucket]) as two:
        assert make_model(two).load_all(tokens) == (5, 5)


def test_a_running_machine_sees_the_others_blocks_at_its_next_poll(tmp_path, bucket, make_model):
    with (
        kvtier.open(tmp_path / "one", secret=SECRET, tiers=[bucket]) as one,
        kvtier.open(tmp_path / "two", secret=SECRET, tiers=[bucket]) as two,
    ):
        model, other = make_model(one), make_model(two)
        tokens = model.prompt(3, 4)
        model.store(tokens)
        one.flush()
        assert eventually(lambda: other.block_hits(tokens) == 4)


def test_a_drop_on_one_machine_empties_memory_and_directory_of_the_other(
    tmp_path, bucket, make_model
):
    with (
        kvtier.open(tmp_path / "one", secret=SECRET, tiers=[bucket]) as one,
        kvtier.open(tmp_path / "two", secret=SECRET, tiers=[bucket]) as two,
    ):
        model, other = make_model(one), make_model(two)
        tokens = model.prompt(4, 4)
        for m in (model, other):
            m.store(tokens)
            m.cache.flush()
        assert other.load_all(tokens) == (4, 4)
        assert model.ns.drop(model.digests(tokens)) == 4
        assert eventually(lambda: other.block_hits(tokens) == 0)
        assert two.disk is not None
        assert len(two.disk.index) == 0


def test_small_puts_share_a_segment_object(tmp_path, make_model):
    bucket = f"file://{tmp_path}/bucket?linger_s=60"
    with kvtier.open(tmp_path / "one", secret=SECRET, tiers=[bucket]) as one:
        model = make_model(one)
        for seed in range(10):
            model.store(model.prompt(seed, 2))
        assert one.flush().done
        assert one.stats()["tiers"]["s3"]["stored_records"] == 20
        assert one.stats()["tiers"]["s3"]["stored_segments"] <= 2


def test_a_dead_endpoint_costs_nothing_but_the_tier(tmp_path, make_model, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    config = kvtier.S3TierConfig(
        url="s3://bucket/prefix",
        endpoint="http://127.0.0.1:9",
        allow_http=True,
        timeout_s=0.3,
        max_retries=0,
    )
    with kvtier.open(tmp_path / "one", secret=SECRET, tiers=[config]) as cache:
        model = make_model(cache)
        tokens = model.prompt(5, 6)
        model.store(tokens)
        assert model.load_all(tokens) == (6, 6)
        assert cache.flush(0.1).pending >= 0
        assert "test-secret" not in repr(cache.stats())
        cache.close(timeout=0.1)


def test_a_shared_tier_without_a_common_secret_is_refused(tmp_path, bucket):
    with pytest.raises(ConfigError, match="secret"):
        kvtier.open(tmp_path / "one", tiers=[bucket])


def test_without_the_extra_the_error_names_it(tmp_path, bucket, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"./packages/kvtier\[s3\]"):
        kvtier.open(tmp_path / "one", secret=SECRET, tiers=[bucket])


def test_a_bucket_that_hangs_does_not_keep_the_cache_from_opening(
    tmp_path, make_model, monkeypatch
):
    import socket

    from deepinfer_kvtier.remote.tiers import build

    monkeypatch.setattr(build, "FIRST_POLL_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = kvtier.S3TierConfig.model_validate(
            {
                "url": "s3://bucket/prefix",
                "endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
                "access_key_id": "test",
                "secret_access_key": "test",
                "allow_http": True,
                "timeout_s": 1.0,
                "max_retries": 0,
            }
        )
        cache = kvtier.open(tmp_path / "one", secret=SECRET, tiers=[config])
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens)
        assert model.load_all(tokens) == (3, 3)
        cache.close(timeout=0.1)


def test_a_drop_reaches_machines_that_keep_everything_in_memory(bucket, make_model):
    with (
        kvtier.open(host_bytes=1 << 20, secret=SECRET, tiers=[bucket]) as one,
        kvtier.open(host_bytes=1 << 20, secret=SECRET, tiers=[bucket]) as two,
    ):
        model, other = make_model(one), make_model(two)
        tokens = model.prompt(6, 4)
        model.store(tokens)
        one.flush()
        assert eventually(lambda: other.block_hits(tokens) == 4)
        assert other.load_all(tokens) == (4, 4)
        model.ns.drop(model.digests(tokens))
        assert eventually(lambda: other.block_hits(tokens) == 0)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_a_shortened_object_is_a_miss_and_no_panic(tmp_path, bucket, make_model, share):
    with kvtier.open(tmp_path / "one", secret=SECRET, tiers=[bucket]) as one:
        model = make_model(one)
        tokens = model.prompt(3, 12)
        assert model.store(tokens).wait(60)
        assert one.flush().done
    (segment,) = (tmp_path / "bucket").glob("seg/*/*.kvs")
    os.truncate(segment, int(segment.stat().st_size * share))
    with kvtier.open(tmp_path / "two", secret=SECRET, tiers=[bucket]) as two:
        matched, good = make_model(two).load_all(tokens)
        assert (matched, good < 12) == (12, True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"format": 1, "segments": [[0, "chat", 0, 1e999, 1, 1]], "tombs": [], "grave": []}',
        b'{"format": 1, "segments": [], "tombs": [1e999], "grave": []}',
        b"[" * 60_000,
    ],
)
def test_a_manifest_nobody_could_have_written_is_bad_and_ends_no_thread(body):
    raw = xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body
    assert parse_manifest("ab" * 16, 1, raw) is None
