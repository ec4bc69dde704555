"""Commands that change a directory or its policy."""

from __future__ import annotations

import json
import time

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock


def test_a_quota_over_the_policy_asks_before_it_deletes(filled, cli):
    refused = cli.run("gc", filled, "--quota-bytes", "1")
    assert refused.returncode == 1
    assert "--yes" in refused.stderr
    assert cli.facts("stat", filled)["records"] == 7


def test_init_takes_a_quota(tmp_path, cli):
    assert cli.facts("init", tmp_path / "new", "--bytes", "2M")["quota_bytes"] == 2 << 20
    assert cli.facts("quota", tmp_path / "new")["quota_bytes"] == 2 << 20


def test_quota_and_policy_are_stored_and_shown(filled, cli):
    assert cli.facts("quota", filled)["quota_bytes"] is None
    changes = ("--bytes", "10T", "--class", "scratch=100G", "--low", "0.5")
    changed = cli.facts("quota", filled, *changes)
    assert (changed["quota_bytes"], changed["low_water"]) == (10 << 40, 0.5)
    assert changed["class_quotas"] == {"scratch": 100 << 30}
    named = cli.facts("quota", filled, "--namespace", "0a1b2c3d=1M")
    assert named["namespace_quotas"] == {"0a1b2c3d": 1 << 20}
    cli.facts("quota", filled, "--class", "scratch=none", "--class", "chat=1T")
    assert cli.facts("quota", filled)["class_quotas"] == {"chat": 1 << 40}
    assert cli.facts("quota", filled, "--bytes", "none")["quota_bytes"] is None
    changes = ("--ttl", "agent=30d", "--ttl", "batch=2h", "--new-class", "--floor", "1d")
    held = cli.facts("policy", filled, *changes)
    assert (held["agent_ttl_s"], held["batch_ttl_s"]) == (30 * 86_400, 7_200)
    assert cli.facts("policy", filled, "--admission", "second_hit")["floor_s"] == 86_400
    with kvtier.open(filled, read_only=True) as cache:
        codes = {name: entry.code for name, entry in cache.config.classes.items()}
        assert codes == {"scratch": 0, "agent": 1, "chat": 2, "pin": 3, "batch": 4}
        assert cache.config.admission == "second_hit"


def test_gc_keeps_what_the_stored_policy_keeps(store, make_model, cli):
    """What would lose data: collecting by the defaults a directory that has other rules."""
    two_weeks_ago = ManualClock(start_s=time.time() - 14 * 86_400)
    with kvtier.open(store, clock=two_weeks_ago) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 2), cls="agent", durability="flushed").wait(60)
    cli.facts("policy", store, "--ttl", "agent=30d")
    assert cli.facts("gc", store)["segments_expired"] == 0
    cli.facts("policy", store, "--ttl", "agent=3d")
    assert cli.facts("gc", store)["segments_expired"] == 1


def test_a_directory_with_its_secret_in_it_is_not_called_foreign(filled, cli, caplog):
    assert cli.run("gc", filled).returncode == 0
    assert "secret" not in caplog.text


def test_fsck_repair_evicts_nothing_whatever_the_policy_says(filled, cli):
    cli.facts("quota", filled, "--bytes", "1")
    cli.facts("policy", filled, "--min-free-share", "0.99")
    assert cli.facts("fsck", filled, "--repair")["checked"] == 7
    assert cli.facts("stat", filled)["records"] == 7


def test_namespaces_are_listed_pinned_unpinned_and_dropped(filled, make_model, cli):
    with kvtier.open(filled) as cache:
        other = make_model(cache, salt="other")
        other.store(other.prompt(5, 3), durability="flushed").wait(60)
        name = make_model(cache).ns.id
        digest = other.digests(other.prompt(5, 3))[0]
    listed = json.loads(cli.run("ls", filled, "--namespaces", "--json").stdout)
    assert [(n["name"], n["records"]) for n in listed] == [(name[:8], 7), (other.ns.id[:8], 3)]
    assert cli.run("ls", filled, "--namespaces").stdout.startswith(name[:8])
    moved = cli.facts("pin", filled, "--namespace", name)
    assert (moved["found"], moved["moved"]) == (7, 7)
    assert cli.facts("pin", filled, "--namespace", name)["moved"] == 0
    assert cli.facts("pin", filled, "--key", digest[:16].hex())["moved"] == 1
    assert cli.facts("verify", filled)["checked"] == 10
    assert cli.facts("unpin", filled, "--namespace", name, "--cls", "agent")["moved"] == 7
    assert cli.facts("unpin", filled, "--namespace", other.ns.id)["found"] == 1
    asked = cli.run("drop", filled, "--namespace", name)
    assert (asked.returncode, "--yes" in asked.stderr) == (1, True)
    assert cli.facts("drop", filled, "--namespace", name, "--yes")["dropped"] == 7
    left = json.loads(cli.run("ls", filled, "--namespaces", "--json").stdout)
    assert [n["name"] for n in left] == [other.ns.id[:8]]


def test_migrate_writes_what_is_readable_and_the_same_prompts_hit(
    filled, tmp_path, make_model, cli
):
    with kvtier.open(filled) as cache:
        model = make_model(cache)
        model.ns.drop(model.digests(model.prompt(2, 2)))
    (segment,) = filled.rglob("seg-chat-*.kvs")
    raw = bytearray(segment.read_bytes())
    first = raw.index(b"KVTSLOT1", 4096 + 12_288)  # the state slot lies before the blocks
    raw[raw.index(b"KVTSLOT1", first + 8) - 500] ^= 1
    segment.write_bytes(raw)
    cli.facts("policy", filled, "--ttl", "agent=30d")
    target = tmp_path / "new"
    moved = cli.facts("migrate", filled, target)
    assert (moved["records"], moved["left_behind"]) == (4, 1)
    assert cli.facts("policy", target)["agent_ttl_s"] == 30 * 86_400
    with kvtier.open(target) as cache:
        model = make_model(cache)
        matched, good = model.load_all(model.prompt(1, 4))
        assert matched == good == 1
        assert cache.stats()["disk"]["entries"] == 4
    assert cli.facts("verify", target)["bad"] == {}
    assert "not empty" in cli.run("migrate", filled, target).stderr
    assert "inside" in cli.run("migrate", filled, filled / "sub").stderr


@pytest.mark.parametrize(("version", "says"), [(0, "older than any"), (2, "open it read-only")])
def test_a_format_of_another_release_is_not_migrated_or_written(
    filled, tmp_path, version, says, cli
):
    content = (filled / "FORMAT.json").read_text()
    (filled / "FORMAT.json").write_text(content.replace('"format": 1', f'"format": {version}'))
    for arguments in (("migrate", filled, tmp_path / "new"), ("gc", filled), ("init", filled)):
        done = cli.run(*arguments)
        assert (done.returncode, says in done.stderr) == (2, True)
    assert not (tmp_path / "new").exists()
    assert cli.run("stat", filled).returncode == (0 if version > 1 else 2)
    assert len(list(filled.rglob("*.kvs"))) == 2, "nothing was touched"


def test_warm_reads_the_newest_up_to_its_limit(filled, cli):
    assert cli.facts("warm", filled)["records"] == 7
    some = cli.facts("warm", filled, "--bytes", "20000")
    assert (some["records"], some["bytes"]) == (2, 16_384)


def test_bench_measures_and_leaves_nothing(tmp_path, cli):
    found = cli.facts("bench", tmp_path, "--blocks", "128", "--block-bytes", "4000")
    assert found["blocks"] == 128
    assert found["put_ratio"] > 0
    assert found["load_ratio"] > 0
    assert list(tmp_path.iterdir()) == []


def test_size_of_the_published_traffic_is_about_a_hundred_petabytes(cli):
    day = ("size", "--tokens-per-day", "155e12")
    found = cli.facts(*day)
    assert found["new_bytes_per_day"] == pytest.approx(5.5e15, rel=0.01)
    assert found["disk_bytes"] == pytest.approx(100e15, rel=0.02)
    assert 0.3 < found["window_share"] < 0.4
    three = cli.facts(*day, "--class", "agent=1:3", "--replicas", "1")
    seven = cli.facts(*day, "--class", "chat=1:7", "--replicas", "1")
    assert three["disk_bytes"] == pytest.approx(16.6e15, rel=0.01)
    assert seven["disk_bytes"] == pytest.approx(38.7e15, rel=0.01)
    assert three["blocks_per_day"] == pytest.approx(48e9, rel=0.02)
    assert "PB" in cli.run(*day).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quota", "S", "--bytes", "ten"), "a size looks like"),
        (("quota", "S", "--class", "nope=1G"), "nope"),
        (("quota", "S", "--namespace", "xyz=1G"), "namespace_quotas"),
        (("quota", "S", "--low", "0.99"), "low_water"),
        (("policy", "S", "--ttl", "agent"), "name=value"),
        (("policy", "S", "--ttl", "agent=soon"), "a time looks like"),
        (("policy", "S", "--ttl", "A-B=1d", "--new-class"), "class name"),
        (("policy", "S", "--ttl", "agnet=1d"), "there are agent, chat, pin, scratch"),
        (("policy", "S", "--admission", "never"), "admission"),
        (("pin", "S"), "either --namespace or --key"),
        (("pin", "S", "--key", "zz"), "32 hex digits"),
        (("unpin", "S", "--namespace", "00000000", "--cls", "x"), "unknown class"),
        (("drop", "S", "--namespace", "1", "--yes"), "8 hex digits"),
        (("migrate", "/nonexistent", "/nonexistent2"), "no cache at"),
        (("bench", "/nonexistent"), "not a directory"),
        (("simulate",), "either --trace FILE or --stretch"),
        (("size", "--tokens-per-day", "1", "--class", "a=0.5:3"), "add up to 1"),
        (("size", "--tokens-per-day", "1", "--class", "a=x"), "share and days"),
        (("size", "--tokens-per-day", "nan"), "values above 0"),
        (("size", "--tokens-per-day", "inf"), "values above 0"),
        (("quota", "S", "--class", "nobody=1G"), "cache configuration: class_quotas names"),
    ],
)
def test_wrong_arguments_are_named(filled, arguments, message, cli):
    done = cli.run(*[filled if argument == "S" else argument for argument in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_pinning_needs_the_class_for_it(store, cli):
    kvtier.init(store, classes={"chat": kvtier.RetentionClass(2, 60.0)})
    for command in ("pin", "unpin"):
        done = cli.run(command, store, "--namespace", "00000000")
        assert (done.returncode, "unknown class 'pin'" in done.stderr) == (2, True)
