"""Every setting of the cache: by flag, environment and file, and passed on to the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_engine.cli import main as cli
from deepinfer_engine.cli.launch import (
    engine_config,
    read_cache_secret,
    window_exchange,
    worker_argv,
)
from deepinfer_engine.core.config import ALL_WINDOWS
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings, load_settings

VALUES = {
    "overlap": True,
    "coupled": True,
    "batch_invariant": True,
    "cache_dir": Path("/kv"),
    "cache_local": False,
    "cache_shared": True,
    "cache_location": ("redis://127.0.0.1:6379/0", "tcp://10.0.0.1:7420"),
    "cache_tiers": ("s3://bucket/kv?poll_s=5", "mooncake://10.0.0.1:50051?segment_bytes=0"),
    "cache_secret_file": Path("/secret"),
    "cache_memory_bytes": 1 << 30,
    "prefill_rate": 60e3,
    "persist_state": "all",
    "window_recovery": "bounded",
    "window_memory_bytes": 1 << 29,
    "window_ttl_s": 60.0,
    "window_exchange": False,
    "window_listen": "10.0.0.2:7000",
    "window_directory": "redis://127.0.0.1:6379/1",
    "window_deadline_ms": 20.0,
}
FLAGS = {"cache_tiers": "--cache-tier"}


def flags(name, value):
    flag = FLAGS.get(name, "--" + name.replace("_", "-"))
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    values = value if isinstance(value, tuple) else (value,)
    return [text for one in values for text in (flag, str(one))]


@pytest.fixture
def parsed(monkeypatch):
    """The settings that a command was called with."""

    def parse(command, argv):
        found = []

        def serve(settings, *_):
            found.append(settings)
            return 0

        monkeypatch.setattr("deepinfer_engine.cli.serve.run_serve", serve)
        monkeypatch.setattr("deepinfer_engine.cli.worker.run_worker", lambda _, s, __: serve(s))
        assert cli.run([command, *argv]) == 0
        return found[0]

    return parse


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("command", ["serve", "prefill", "decode"])
def test_a_flag_sets_it(parsed, command, name):
    assert getattr(parsed(command, flags(name, VALUES[name])), name) == VALUES[name]


@pytest.mark.parametrize("name", VALUES)
def test_environment_and_file_set_it(name, tmp_path):
    value = VALUES[name]
    assert getattr(Settings(), name) != value, "the test must see a difference"
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    found = load_settings({}, environ={f"DEEPINFER_{name.upper()}": text})
    assert getattr(found, name) == value
    if isinstance(value, bool):
        written = str(value).lower()
    elif isinstance(value, tuple):
        written = str(list(value))
    else:
        written = repr(str(value) if isinstance(value, Path) else value)
    path = tmp_path / "deepinfer.toml"
    path.write_text(f"{name} = {written}\n")
    assert getattr(load_settings({}, config=path, environ={}), name) == value


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_are_told_all_of_it(parsed, role):
    wanted = Settings.model_validate(VALUES)
    argv = worker_argv(role, wanted)
    found = parsed(role, argv[argv.index(role) + 1 :])
    assert {name: getattr(found, name) for name in VALUES} == VALUES
    plain = worker_argv(role, Settings())
    found = parsed(role, plain[plain.index(role) + 1 :])
    assert {n: getattr(found, n) for n in VALUES} == {n: getattr(Settings(), n) for n in VALUES}


@pytest.mark.parametrize(
    ("changes", "persisted"),
    [
        ({}, "last"),
        ({"cache_shared": True}, "none"),
        ({"cache_tiers": ("s3://b",)}, "none"),
        ({"cache_location": ("redis://r/0",)}, "none"),
        ({"cache_local": False}, "none"),
        ({"cache_shared": True, "persist_state": "last"}, "last"),
        ({"persist_state": "none"}, "none"),
    ],
)
def test_shared_stores_hold_blocks_alone_unless_told_otherwise(changes, persisted):
    settings = Settings.model_validate(changes)
    assert settings.persisted_states == persisted
    assert engine_config(settings, 1000).persist_state == persisted


def test_one_prompt_does_not_push_the_windows_of_others_out_of_memory():
    settings = Settings(window_memory_bytes=80 << 20)
    assert engine_config(settings, 1 << 20).prompt_windows == 10
    assert engine_config(settings, 1 << 30).prompt_windows == 2
    assert engine_config(settings, 0).prompt_windows == ALL_WINDOWS
    every = Settings(window_memory_bytes=80 << 20, persist_state="all")
    assert engine_config(every, 1 << 20).prompt_windows == ALL_WINDOWS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_tiers", "ftp://bucket"),
        ("cache_location", "http://host"),
        ("window_directory", "somewhere"),
        ("window_listen", "nowhere"),
        ("persist_state", "some"),
        ("window_recovery", "maybe"),
        ("window_ttl_s", "0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=name):
        load_settings({}, environ={f"DEEPINFER_{name.upper()}": value})


@pytest.mark.parametrize("text", ["5b" * 31, "no", ""])
def test_a_secret_file_that_holds_none_is_refused(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_cache_secret(path)
    path.write_text("5b" * 32)
    assert read_cache_secret(path) == b"[" * 32
    assert read_cache_secret(None) is None


KEY = "ab" * 32


@pytest.mark.parametrize(
    ("listen", "changes", "key", "own"),
    [
        ("127.0.0.1:0", {}, None, "127.0.0.1:0"),
        ("127.0.0.1:0", {"window_exchange": False}, None, None),
        ("10.0.0.2:7000", {}, KEY, None),
        ("worker-3:7000", {}, KEY, None),
        ("10.0.0.2:7000", {"window_listen": "10.0.0.2:7001"}, KEY, "10.0.0.2:7001"),
    ],
)
def test_windows_leave_this_machine_only_by_name(monkeypatch, listen, changes, key, own):
    monkeypatch.delenv("DEEPINFER_CLUSTER_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("DEEPINFER_CLUSTER_KEY", key)
    found = window_exchange(Settings.model_validate(changes), listen)
    assert (None if found is None else found.listen) == own


def test_and_only_with_the_cluster_key(monkeypatch):
    monkeypatch.delenv("DEEPINFER_CLUSTER_KEY", raising=False)
    with pytest.raises(ConfigError, match="cluster key"):
        window_exchange(Settings(window_listen="10.0.0.2:7001"), "127.0.0.1:0")
