"""What an operator may get wrong: one clear error, nothing created elsewhere."""

from __future__ import annotations

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.remote.location.client import LocationClient
from deepinfer_kvtier.testing import ManualClock

SECRET = bytes(32)


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ("s3://bucket/prefix", "tiers is a list"),
        ([""], "tier URL"),
        (["s3://"], "s3://bucket/prefix"),
        (["s3:bucket"], "tier URL"),
        (["file://relative/path"], "file:///path"),
        (["s3://b/p?segment_bytes=1"], "segment_bytes"),
        (["s3://b/p?name=disk"], "different names"),
        (["memory:///a", "memory:///b"], "different names"),
        (["mooncake://"], "master"),
        (["mooncake://host"], "master"),
        (["mooncake://h:1?prefix=a/b"], "prefix"),
    ],
)
def test_wrong_tiers_are_refused_in_words(tiers, said):
    pytest.importorskip("obstore")
    with pytest.raises(ConfigError, match=said):
        kvtier.open(host_bytes=0, secret=SECRET, tiers=tiers)


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ((), "1 to 1024"),
        (("tcp://127.0.0.1:1", "tcp://127.0.0.1:1"), "different"),
        (("tcp://127.0.0.1:99999",), "port"),
        (("tcp://127.0.0.1:x",), "port"),
        (("http://127.0.0.1",), "tcp://host:port"),
        (("tcp:///path",), "tcp://host:port"),
    ],
)
def test_wrong_shards_are_refused_in_words(urls, said):
    with pytest.raises(ConfigError, match=said):
        LocationClient(urls, key=b"", prefix=b"", clock=ManualClock())


def test_a_mounted_store_needs_a_place():
    with pytest.raises(ConfigError, match="needs a path"):
        kvtier.open(mode="shared-fs")


def test_a_fleet_needs_a_store_of_its_mode(tmp_path):
    kvtier.open(tmp_path / "local").close()
    fleet = kvtier.FleetTierConfig(path=tmp_path / "local", locations=("tcp://127.0.0.1:1",))
    with pytest.raises(ConfigError, match="'embedded'"):
        kvtier.open(host_bytes=0, secret=SECRET, tiers=[fleet])


def test_a_refused_opening_leaves_nothing_running_and_the_callers_tiers_alone(tmp_path):
    import threading

    pytest.importorskip("obstore")
    from deepinfer_kvtier.remote.tiers.build import open_tiers

    config = kvtier.KVTierConfig(secret=SECRET)
    from deepinfer_kvtier.base.files import PosixIo

    (mine,) = open_tiers(["memory:///a"], config, ManualClock(), PosixIo())
    before = threading.active_count()
    fleet = kvtier.FleetTierConfig(path=tmp_path / "m", locations=("http://wrong",))
    for wrong in ("memory:///b", fleet, "gopher://x"):
        with pytest.raises(ConfigError):
            kvtier.open(host_bytes=0, secret=SECRET, tiers=[mine, "memory:///c?name=c", wrong])
    assert threading.active_count() == before
    assert mine.put_from([]) == []
    mine.close()
