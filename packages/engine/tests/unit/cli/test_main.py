"""The command line as a user meets it: one line of error, the right exit code, a fast `--help`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from deepinfer_engine import __version__
from deepinfer_engine.cli import main as cli

LIGHT = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "COLUMNS": "100"}


def deepinfer(*argv, cwd=None, env=None):
    return subprocess.run(
        [sys.executable, "-m", "deepinfer_engine.cli.main", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**LIGHT, **(env or {})},
        timeout=60,
        check=False,
    )


def assert_one_line(result, code, *words):
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("deepinfer: error: ")
    for word in words:
        assert word in lines[0]


def test_version_and_help():
    assert deepinfer("version").stdout.strip() == __version__
    result = deepinfer("--help")
    assert result.returncode == 0
    for command in ("serve", "prefill", "decode", "router", "chat", "generate", "demo", "doctor"):
        assert command in result.stdout


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["config", "show"], ["version"]])
def test_light_commands_load_no_heavy_library(argv):
    code = (
        "import sys; from deepinfer_engine.cli.main import run; run(sys.argv[1:]);"
        "heavy = {'torch', 'fastapi', 'uvicorn', 'tokenizers', 'transformers'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=LIGHT, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("cli.serve server.app codec.recipe_codec router.remote", "torch"),
        ("cli.worker pd.prefill pd.decode", "fastapi uvicorn rich"),
    ],
    ids=["the HTTP process no torch", "a worker no web framework"],
)
def test_a_process_loads_what_it_is_for(modules, absent):
    code = (
        "import importlib, sys; modules, absent = map(str.split, sys.argv[1:])\n"
        "for name in modules: importlib.import_module(f'deepinfer_engine.{name}')\n"
        "sys.exit(str({*absent} & {*sys.modules} or '') or 0)"
    )
    argv = [sys.executable, "-c", code, modules, absent]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--prot", "1"], ["--prot"]),
        (["serve", "--port", "many"], ["--port"]),
        (["frobnicate"], ["frobnicate"]),
        (["router"], ["--prefill", "--decode"]),
        (["generate", "only-one"], ["OUT"]),
        (["chat", "hi", "--max-tokens"], ["--max-tokens"]),
        (["chat", "hi", "--max-tokens", "0"], ["--max-tokens", "equal to 1"]),
        (["chat", "hi", "--temperature", "9"], ["--temperature", "equal to 2"]),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(argv, words):
    assert_one_line(deepinfer(*argv), 2, *words)


def test_a_bad_setting_is_one_line_and_code_3(tmp_path):
    assert_one_line(deepinfer("serve", "--port", "99999", cwd=tmp_path), 3, "port", "99999")
    (tmp_path / "deepinfer.toml").write_text("prt = 3\n")
    assert_one_line(deepinfer("serve", cwd=tmp_path), 3, "prt", "did you mean port")


def test_a_missing_model_directory_is_one_line_and_code_3(tmp_path):
    for command in (["serve", "--port", "0"], ["chat", "hi"], ["prefill"], ["decode"]):
        result = deepinfer(*command, "--model", str(tmp_path / "nowhere"), cwd=tmp_path)
        lines = [line for line in result.stderr.splitlines() if "error" in line]
        assert result.returncode == 3
        assert len(lines) == 1
        assert "nowhere" in lines[0]


@pytest.mark.parametrize("argv", [["serve", "--model", "smolm2"], ["pull", "SmolLM2x"]])
def test_a_name_nearly_known_is_guessed(argv, tmp_path):
    result = deepinfer(*argv, cwd=tmp_path)
    assert result.returncode == 3
    assert "did you mean smollm2?" in result.stderr


def test_a_busy_port_is_one_line_and_code_3(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_one_line(
            deepinfer("serve", "--port", port, cwd=tmp_path), 3, port, "in use", "--port"
        )


def test_no_server_at_an_url_is_one_line_and_code_4(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert_one_line(deepinfer("chat", "hi", "--url", url, cwd=tmp_path), 4, url)
        # host:port alone is meant as http
        bare = url.removeprefix("http://")
        asks = (["chat", "hi", "--url"], ["usage", "--url"], ["top"], ["bench"])
        for command in asks:
            assert_one_line(deepinfer(*command, bare, cwd=tmp_path), 4, url)


def test_a_prompt_that_is_not_utf8_is_refused_before_a_model_is_loaded(tmp_path):
    for argv in ([b"chat", b"\xff"], [b"chat", b"hi", b"--system", b"\xff"]):
        assert_one_line(deepinfer(*argv, cwd=tmp_path), 1, "is not UTF-8 text")


def test_an_unexpected_exception_is_one_line_and_code_1(monkeypatch, capsys):
    def explode(*args, **kwargs):
        raise KeyError("inside\nout")

    monkeypatch.setattr(cli, "_settings", explode)
    assert cli.run(["serve"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "internal error: KeyError" in err


def test_config_show_prints_every_setting_and_takes_the_environment(tmp_path):
    result = deepinfer("config", "show", "--json", cwd=tmp_path, env={"DEEPINFER_NUM_BLOCKS": "99"})
    shown = json.loads(result.stdout)
    assert shown["num_blocks"] == 99
    plain = deepinfer("config", "show", cwd=tmp_path).stdout
    assert set(shown) == {line.split(" = ")[0] for line in plain.splitlines()}


def test_config_schema_is_json_schema(tmp_path):
    schema = json.loads(deepinfer("config", "schema", cwd=tmp_path).stdout)
    assert schema["additionalProperties"] is False
    assert "port" in schema["properties"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\nlate\n"])
def test_a_key_file_that_holds_no_key_is_named(content, tmp_path):
    key = tmp_path / "admin.key"
    if content is not None:
        key.write_bytes(content)
    result = deepinfer("drain", "127.0.0.1:1", "--admin-key-file", str(key), cwd=tmp_path)
    assert_one_line(result, 3, "admin.key")


def test_generate_names_an_input_that_cannot_be_read(tmp_path):
    result = deepinfer("generate", "none.jsonl", "out.jsonl", cwd=tmp_path)
    assert_one_line(result, 3, "none.jsonl")
