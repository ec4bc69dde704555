"""Where a setting comes from, and what happens to one that nobody knows."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from deepinfer_engine.cli.launch import engine_config, worker_argv
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings, load_settings, split_address


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "deepinfer.toml"
        path.write_text(text)
        return path

    return write


def test_flag_beats_environment_beats_file_beats_default(toml):
    path = toml("port = 1\nnum_blocks = 10\nmax_num_seqs = 5\n")
    environ = {"DEEPINFER_PORT": "2", "DEEPINFER_NUM_BLOCKS": "20"}
    settings = load_settings({"port": 3, "host": None}, config=path, environ=environ)
    assert (settings.port, settings.num_blocks, settings.max_num_seqs) == (3, 20, 5)
    assert settings.host == "127.0.0.1"


def test_an_unknown_key_of_a_file_is_an_error_with_a_suggestion(toml):
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        load_settings({}, config=toml("max_num_seq = 3"), environ={})
    with pytest.raises(ConfigError, match="unknown setting 'zzz'"):
        load_settings({}, config=toml("zzz = 3"), environ={})


def test_a_slip_in_an_environment_variable_is_an_error_but_strangers_are_not():
    with pytest.raises(ConfigError, match="did you mean DEEPINFER_NUM_BLOCKS"):
        load_settings({}, environ={"DEEPINFER_NUM_BLOCK": "3"})
    load_settings({}, environ={"DEEPINFER_SOMEBODY_ELSES": "3", "OTHER": "1"})


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"port": 70000}, "port"),
        ({"nextn": -1}, "nextn"),
        ({"dtype": "int4"}, "dtype"),
        ({"prefill": ("nowhere",)}, "prefill"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_a_value_out_of_range_is_named(flags, name):
    with pytest.raises(ConfigError, match=name):
        load_settings(flags, environ={})


def test_broken_and_missing_files_are_named(toml, tmp_path):
    with pytest.raises(ConfigError, match="not TOML"):
        load_settings({}, config=toml("port = = 3"), environ={})
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, config=tmp_path / "none.toml", environ={})


def test_the_working_directorys_file_is_used_when_there_is_one(toml, tmp_path, monkeypatch):
    toml("port = 77")
    monkeypatch.chdir(tmp_path)
    assert load_settings({}, environ={}).port == 77


def test_lists_in_the_environment_are_split_at_commas():
    settings = load_settings({}, environ={"DEEPINFER_PREFILL": "a:1, b:2"})
    assert settings.prefill == ("a:1", "b:2")


def test_settings_never_change():
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_model_names_come_from_the_directory_unless_given(tmp_path):
    assert Settings().model_names == ("deepinfer-demo",)
    assert Settings(model=tmp_path / "v41").model_names == ("v41",)
    assert Settings(served_model_name=("a", "b")).model_names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "parts"),
    [("h:1", ("h", 1)), ("[::1]:80", ("::1", 80)), ("10.0.0.1:0", ("10.0.0.1", 0))],
)
def test_addresses_split(text, parts):
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["h", ":1", "h:", "h:x", "h:99999", "h:-1"])
def test_broken_addresses_are_refused(text):
    with pytest.raises(ValueError, match="host:port"):
        split_address(text)


def test_each_role_is_told_of_its_own_target():
    settings = load_settings({"ttft_target_ms": 400, "token_target_ms": 25}, environ={})
    prefill, decode = (worker_argv(role, settings) for role in ("prefill", "decode"))
    assert prefill[prefill.index("--ttft-target-ms") + 1] == "400.0"
    assert decode[decode.index("--token-target-ms") + 1] == "25.0"
    assert "--token-target-ms" not in prefill
    assert "--ttft-target-ms" not in decode
    config = engine_config(settings)
    assert (config.ttft_target_s, config.token_target_s) == (0.4, 0.025)
    assert "--ttft-target-ms" not in worker_argv("prefill", Settings())
