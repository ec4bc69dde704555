from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock


def test_stat_counts_records_and_bytes_by_class(filled, cli):
    found = cli.facts("stat", filled)
    assert found["records"] == 7
    assert (found["chat_records"], found["agent_records"]) == (5, 2)
    assert found["payload_bytes"] == 6 * 5_000 + 9_001


def test_ls_names_every_segment(filled, cli):
    listed = json.loads(cli.run("ls", filled, "--json").stdout)
    assert [(s["cls"], s["records"]) for s in listed] == [("agent", 2), ("chat", 5)]
    assert len(cli.run("ls", filled).stdout.splitlines()) == 2


def test_verify_finds_the_one_flipped_bit_and_fsck_repairs_it(filled, make_model, cli):
    assert cli.facts("verify", filled)["bad"] == {}
    (segment,) = filled.rglob("seg-chat-*.kvs")
    raw = bytearray(segment.read_bytes())
    raw[4096 + 50] ^= 1
    segment.write_bytes(raw)
    broken = cli.run("verify", filled, "--json")
    assert broken.returncode == 1
    assert sum(json.loads(broken.stdout)["bad"].values()) == 1
    assert json.loads(broken.stdout)["checked"] == 7
    assert cli.run("fsck", filled).returncode == 1
    assert cli.facts("fsck", filled, "--repair")["repaired"] == 1
    assert cli.facts("verify", filled)["checked"] == 6
    assert cli.run("fsck", filled).returncode == 0


def test_verify_can_look_at_a_sample(filled, cli):
    assert cli.facts("verify", filled, "--sample", "0")["checked"] == 0
    one = cli.facts("verify", filled, "--sample", "0.5", "--seed", "3")
    assert one == cli.facts("verify", filled, "--sample", "0.5", "--seed", "3")


def test_gc_deletes_what_is_over_the_quota_and_dry_run_does_not(filled, cli):
    assert cli.facts("gc", filled, "--dry-run", "--quota-bytes", "1")["segments_evicted"] == 2
    assert cli.facts("stat", filled)["records"] == 7
    assert cli.facts("gc", filled, "--quota-bytes", "1", "--yes")["segments_evicted"] == 2
    assert cli.facts("stat", filled)["records"] == 0


def test_gc_deletes_what_is_past_its_time(store, make_model, cli):
    long_ago = ManualClock(start_s=1_000_000_000)
    with kvtier.open(store, clock=long_ago) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 2), durability="flushed").wait(60)
    assert cli.facts("gc", store)["segments_expired"] == 1


def test_init_makes_a_cache_and_accepts_one(store, cli):
    assert cli.run("init", store).returncode == 0
    assert cli.run("init", store).returncode == 0
    assert cli.facts("stat", store)["records"] == 0


def write_json(path, tokens):
    path.write_text(json.dumps(tokens))
    return path


def test_explain_names_the_first_different_token_and_what_it_costs(tmp_path, cli):
    tokens = list(range(1_000))
    changed = [*tokens[:300], 7_777, *tokens[301:]]
    a, b = write_json(tmp_path / "a", tokens), write_json(tmp_path / "b", {"tokens": changed})
    found = cli.facts("explain", a, b)
    assert found["first_difference"] == 300
    assert found["values"] == [300, 7_777]
    assert (found["reused_blocks"], found["recomputed_from"]) == (2, 256)
    said = cli.run("explain", a, b).stdout
    assert "first different token: index 300, 300 against 7777" in said
    assert "everything from block 2, token 256, is computed again" in said


def test_explain_of_a_continued_prompt_reuses_all_whole_blocks_but_never_all_tokens(tmp_path, cli):
    a, b = write_json(tmp_path / "a", [1] * 256), write_json(tmp_path / "b", [1] * 300)
    assert cli.facts("explain", a, b)["reused_blocks"] == 2
    assert cli.facts("explain", a, a)["reused_blocks"] == 1
    assert cli.facts("explain", a, b, "--block-tokens", "50")["reused_blocks"] == 5


def test_explain_of_texts_names_line_and_column(tmp_path, cli):
    text = "You are helpful.\nToday is Monday.\nAnswer briefly.\n"
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_text(text)
    b.write_text(text.replace("Monday", "Sunday"))
    found = cli.facts("explain", a, b)
    assert (found["unit"], found["first_difference"]) == ("character", 26)
    assert (found["line"], found["column"], found["values"]) == (2, 10, ["M", "S"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stat", "/nonexistent"), "no cache at /nonexistent"),
        (("gc", "/nonexistent"), "no cache at /nonexistent"),
        (("fsck", "/nonexistent", "--repair"), "no cache at /nonexistent"),
        (("explain", "/nonexistent", "/nonexistent"), "cannot read /nonexistent"),
        (("init", "/proc/nowhere"), "cannot create"),
        (("bogus",), "No such command"),
        (("verify", "/nonexistent", "--sample", "7"), "--sample"),
        (("drop", "/nonexistent"), "--namespace"),
        (("stat",), "Missing argument"),
        (("serve-locations", "--port", "99999"), "--port"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(arguments, message, cli):
    done = cli.run(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvtier: ")
    assert message in line


def test_without_arguments_it_helps(cli):
    done = cli.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert "serve-locations" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error(filled):
    script = "import sys; from deepinfer_kvtier.ops.cli import main; main()"
    command = [sys.executable, "-c", script, "ls", str(filled)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(60) == 1


def test_the_console_script_is_installed_and_helps(cli):
    script = Path(sys.executable).with_name("kvtier")
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("stat", "verify", "gc", "explain"))


def test_mixing_tokens_and_text_is_refused(tmp_path, cli):
    a = write_json(tmp_path / "a", [1, 2])
    b = tmp_path / "b"
    b.write_text("text")
    assert "two of a kind" in cli.run("explain", a, b).stderr


def test_simulate_prints_a_line_for_each_policy_and_capacity(tmp_path, cli):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i * 1000, "input_length": 1024, "hash_ids": [0, 1 + i % 2]} for i in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("simulate", "--trace", trace, "--capacity", "1", "--capacity", "9")
    done = cli.run(*arguments, "--policy", "lru", "--policy", "oracle")
    assert len(done.stdout.splitlines()) == 4
    rates = [r["hit_rate"] for r in json.loads(cli.run(*arguments, "--json").stdout)]
    assert rates == [0.375, 0.625]
    assert "unknown policy" in cli.run(*arguments, "--policy", "x").stderr
    chart = tmp_path / "chart.svg"
    assert (
        cli.run(*arguments, "--policy", "lru", "--policy", "session", "--svg", chart).returncode
        == 0
    )
    assert len(ElementTree.parse(chart).findall(".//{*}polyline")) == 2
    ttls = ("--ttl", "1s", "--ttl", "1h", "--json")
    lifetimes = cli.run("simulate", "--trace", trace, *ttls).stdout
    assert [r["ttl_s"] for r in json.loads(lifetimes)] == [1.0, 3600.0]
    assert "several" in cli.run("simulate", "--trace", trace, "--svg", chart).stderr
