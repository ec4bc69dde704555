"""The command line: what it prints, and one clear line when it cannot."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from deepinfer_recipe import __version__, native
from deepinfer_recipe.cli import main

REQUEST = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(REQUEST))
    return str(path)


def test_render_prints_the_prompt(request_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", request_file]) == 0
    assert "<｜User｜>hi<｜Assistant｜><think>" in capsys.readouterr().out


def test_render_highlights_exactly_the_special_tokens(
    request_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["render", request_file, "--color"])
    assert "\x1b[7m<｜User｜>\x1b[0mhi\x1b[7m<｜Assistant｜>" in capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_parse_prints_a_response(
    protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "output.txt"
    path.write_text("hm</think>\n\nyes")
    assert main(["parse", str(path), "--protocol", protocol, "--thinking"]) == 0
    out = capsys.readouterr().out
    json.loads(out)
    assert '"yes"' in out
    assert '"hm"' in out


def test_parse_reports_repairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "output.txt"
    path.write_text('<｜DSML｜ calls><｜DSML｜ invoke name="f">')
    assert main(["parse", str(path), "--events", "--no-thinking"]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("data: [DONE]\n\n")
    assert captured.err == "repaired: a call cut short was closed\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model": "x", "messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        ('{"model": "x", "messages": [{"role": "user", "content": "a"}]}', "passed x"),
        ("nope", "invalid JSON"),
    ],
)
def test_bad_request_is_one_line_and_status_one(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(content)
    assert main(["render", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_file_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "/nonexistent/request.json"]) == 1
    assert capsys.readouterr().err.startswith("deepinfer-recipe: ")


def test_wrong_usage_is_status_two() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["render"])
    assert caught.value.code == 2


def test_version_tells_whether_the_compiled_part_is_in_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"deepinfer-recipe {__version__} ({native.STATE})\n"


def test_a_dead_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["check", "--url", f"http://127.0.0.1:{port}"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"deepinfer-recipe: no server at http://127.0.0.1:{port}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("output", "flags", "told", "reasoning"),
    [
        ("hm</think>yes", [], "assumed thinking", "hm"),
        ("yes", [], "assumed no thinking", None),
        ("hm</think>yes", ["--thinking"], "", "hm"),
        ("yes", ["--no-thinking"], "", None),
    ],
)
def test_parse_says_what_it_assumed_about_thinking(
    output: str,
    flags: list[str],
    told: str,
    reasoning: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "output.txt"
    path.write_text(output, encoding="utf-8")
    assert main(["parse", str(path), *flags]) == 0
    out, err = capsys.readouterr()
    message = json.loads(out)["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("yes", reasoning)
    assert err.startswith(told) if told else err == ""
