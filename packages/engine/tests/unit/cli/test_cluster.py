"""`deepinfer up` without Ray: its file, its key, its directory, and what it says without Ray."""

from __future__ import annotations

import stat
import sys

import pytest

from deepinfer_engine.cli import main as cli
from deepinfer_engine.cli.cluster.actors import FORGET_S, Directory
from deepinfer_engine.cli.cluster.control import read_key
from deepinfer_engine.cli.cluster.spec import read_spec
from deepinfer_engine.errors import ConfigError

TEXT = """
name = "mine"
[settings]
model = "demo"
threads = 2
[router]
settings = { port = 8080 }
[prefill]
count = 4
gpus = 1
[decode]
count = 2
cpus = 8
resources = { big = 1 }
settings = { max_num_seqs = 64 }
"""


def written(tmp_path, text):
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_a_role_has_the_common_settings_and_its_own(tmp_path):
    spec = read_spec(written(tmp_path, TEXT))
    assert (spec.prefill.count, spec.decode.count, spec.router.count) == (4, 2, 1)
    assert spec.of("decode").max_num_seqs == 64
    assert spec.of("prefill").max_num_seqs == 16
    assert spec.of("prefill").threads == spec.of("router").threads == 2
    assert spec.of("router").port == 8080
    assert spec.prefill.bundle == {"CPU": 1.0, "GPU": 1.0}
    assert spec.decode.bundle == {"CPU": 8.0, "big": 1.0}


def test_encode_workers_are_used_where_there_are_some(tmp_path):
    spec = read_spec(written(tmp_path, TEXT))
    assert (spec.encode.count, spec.of("prefill").encoded_by) == (0, "own")
    spec = read_spec(written(tmp_path, TEXT + "[encode]\ncount = 2\n"))
    assert [spec.of(role).encoded_by for role in ("prefill", "decode")] == ["workers", "own"]
    either = TEXT.replace("gpus = 1", 'gpus = 1\nsettings = { encoding = "either" }')
    spec = read_spec(written(tmp_path, either + "[encode]\ncount = 2\n"))
    assert spec.of("prefill").encoded_by == "either"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("count = 4", "count = -1", "prefill.count"),
        ("count = 4", "cuont = 4", "prefill.cuont"),
        ('"mine"', '"My Cluster"', "name"),
        ("max_num_seqs = 64", "max_num_seqs = 0", "max_num_seqs"),
        ("threads = 2", "thread = 2", "thread"),
        ("port = 8080", 'api_key = "secret"', "api_key_file"),
        ("[decode]", "[decoder]", "decoder"),
        ('name = "mine"', "name = ", "not TOML"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_field(tmp_path, old, new, words):
    assert old in TEXT
    with pytest.raises(ConfigError, match=words):
        read_spec(written(tmp_path, TEXT.replace(old, new)))


def test_the_key_is_made_once_for_its_owner_alone(tmp_path):
    spec = read_spec(written(tmp_path, TEXT))
    key = read_key(spec)
    assert len(bytes.fromhex(key)) == 32
    assert stat.S_IMODE(spec.key_file.stat().st_mode) == 0o600
    assert read_key(spec) == key
    for text in ("no hex", "ab" * 31):
        spec.key_file.write_text(text)
        with pytest.raises(ConfigError, match="64 hexadecimal"):
            read_key(spec)


def test_the_directory_forgets_who_is_not_named_any_more():
    now = [0.0]
    directory = Directory(clock=lambda: now[0])
    directory.tell("mine/decode/1", "decode", "10.0.0.2:7")
    directory.tell("mine/decode/0", "decode", "10.0.0.1:7")
    directory.tell("mine/prefill/0", "prefill", "10.0.0.3:7")
    assert directory.members() == {
        "prefill": ["10.0.0.3:7"],
        "decode": ["10.0.0.1:7", "10.0.0.2:7"],
        "encode": [],
    }
    now[0] = FORGET_S - 1
    directory.tell("mine/decode/0", "decode", "10.0.0.1:8")  # it listens elsewhere now
    directory.tell("mine/prefill/0", "prefill", "")
    decodes = ["10.0.0.1:8", "10.0.0.2:7"]
    assert directory.members() == {"prefill": [], "decode": decodes, "encode": []}
    now[0] = FORGET_S + 1
    assert directory.members()["decode"] == ["10.0.0.1:8"]


def test_without_ray_the_command_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)  # as where it is not installed
    assert cli.run(["up", str(written(tmp_path, TEXT))]) == 3
    assert "./packages/engine[ray]" in capsys.readouterr().err
    assert cli.run(["up", str(tmp_path / "none.toml")]) == 3
    assert cli.run(["up", str(written(tmp_path, TEXT)), "--restart", "engines"]) == 2
