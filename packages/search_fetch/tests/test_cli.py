from __future__ import annotations

import contextlib
import json
import os
import re
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from forked_command import cli, start

from deepinfer_search_fetch import __version__
from deepinfer_search_fetch.cli import app
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.service.metering import Charge, Ledger

Listener = Any  # see conftest
TEXT = "<title>Newts</title><p>" + "Newts live in ponds and eat small insects. " * 20


def test_the_commands_work_together(tmp_path: Path, site: Listener) -> None:
    site.page("/newts", TEXT)
    allow = ["--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port)]
    url = f"http://127.0.0.2:{site.port}/newts"
    workers = {"DEEPINFER_SEARCH_FETCH_EXTRACT_WORKERS": "1"}  # as it is installed, here
    read = cli("fetch", url, "--raw", *allow, home=tmp_path, **workers)
    assert "Newts live in ponds" in read.stdout, read.stderr
    report = json.loads(cli("ingest", url, *allow, home=tmp_path).stdout)
    assert report["indexed"] == 1
    found = json.loads(cli("search", "pond newts", "--json", home=tmp_path).stdout)
    assert found["results"][0]["url"] == url
    assert "Newts" in cli("search", "newts", home=tmp_path).stdout
    assert json.loads(cli("index", "stats", home=tmp_path).stdout)["documents"] == 1


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    made = json.loads(cli("keys", "create", "me", home=tmp_path).stdout)
    listed = cli("keys", "list", home=tmp_path).stdout
    assert made["key"] not in listed
    assert json.loads(listed)[0]["id"] == made["id"]
    assert cli("keys", "revoke", made["id"], home=tmp_path).returncode == 0
    assert cli("keys", "revoke", made["id"], home=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["fetch", "http://127.0.0.1/"], 1, "blocked_address"),
        (["fetch", "http://a@b/"], 2, "invalid_url"),
        (["fetch", "http://a.example/", "--mode", "best"], 2, "mode"),
        (["ingest", "/no/such/folder"], 2, "does not exist"),
        (["serve", "--no-auth", "--host", "0.0.0.0"], 2, "loopback"),
        (["fetch", "http://a.example/", "--allow-cidr", "nonsense"], 2, "allow-cidr"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    arguments: list[str], code: int, word: str, tmp_path: Path
) -> None:
    done = cli(*arguments, home=tmp_path)
    assert done.returncode == code
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_version_and_authority() -> None:
    assert cli("--version").stdout.strip() == __version__
    explained = json.loads(cli("authority", "explain", "cdc.gov").stdout)
    assert explained["prior_kind"] == "government"


def on_a_terminal(*arguments: str) -> str:
    """Run the command with a terminal of 80 columns as its output."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    terminal = {"TERM": "xterm-256color", "COLUMNS": "80"}
    process = start(arguments, terminal, theirs, theirs)
    os.close(theirs)
    parts: list[bytes] = []
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while chunk := os.read(ours, 65536):
            parts.append(chunk)
    os.close(ours)
    process.join(60)
    assert process.exitcode == 0
    return b"".join(parts).decode()


def test_a_terminal_gets_layout_and_a_pipe_the_markdown(tmp_path: Path, site: Listener) -> None:
    hostile = "\x1b]0;owned\x07"
    site.page(
        "/newts",
        f"<title>Newts {hostile}</title><h1>Newts</h1><h2>Where</h2><p>"
        + "Newts live in <b>ponds</b> and eat insects. " * 20,
    )
    url = f"http://127.0.0.2:{site.port}/newts"
    allow = ["--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port)]
    arguments = ["fetch", url, *allow, "--home", str(tmp_path)]
    shown = on_a_terminal(*arguments)
    assert "\x1b[" in shown
    assert "\x1b]0;owned" not in shown
    assert url in re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "**ponds**" not in shown
    piped = cli(*arguments).stdout
    assert "\x1b" not in piped
    assert "**ponds**" in piped
    outline = cli(*arguments, "--format", "outline", "--mode", "full").stdout
    assert "## Where\t" in outline
    part = on_a_terminal(*arguments, "--max-tokens", "30", "--mode", "full")
    assert "continues: --offset" in part


def test_a_batch_prints_one_line_for_each_url(tmp_path: Path, site: Listener) -> None:
    site.page("/newts", TEXT)
    urls = tmp_path / "urls.txt"
    urls.write_text(f"http://127.0.0.2:{site.port}/newts\n\nhttp://127.0.0.1/\n")
    allow = ["--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port)]
    done = cli("batch", str(urls), *allow, home=tmp_path / "home")
    lines = {line["index"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert lines[0]["response"]["title"] == "Newts"
    assert lines[1]["error"]["code"] == "blocked_address"
    assert done.returncode == 1


def test_usage_sums_what_the_ledger_holds(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    for n in range(3):
        ledger.record(Charge(f"r{n}", "key_1", "search", 1, False, 0, 1, ""))
    ledger.close()
    report = json.loads(cli("usage", "--group-by", "endpoint", home=tmp_path).stdout)
    assert report["totals"][0]["price_micros"] == 15_000
    assert "0.015000 CNY" in on_a_terminal("usage", "--home", str(tmp_path))
    assert cli("usage", "--from", "someday", home=tmp_path).returncode == 2


def test_a_page_cannot_command_the_terminal(tmp_path: Path) -> None:
    hostile = "Newts \x1b]0;owned\x07\x9b2J"
    backend = TantivyBackend(tmp_path / "index")
    backend.index(
        [IndexedPage("https://a.example/", hostile, f"{hostile} swim. " * 20, "2026-01-01")]
    )
    backend.commit()
    shown = on_a_terminal("search", "newts", "--home", str(tmp_path))
    assert "Newts" in shown
    assert "\x1b]0" not in shown
    assert "\x9b" not in shown


def test_every_argument_and_option_says_what_it_is() -> None:
    def silent(command: Any, path: str) -> Iterator[str]:
        for inner in getattr(command, "commands", {}).values():
            yield from silent(inner, f"{path} {inner.name}")
        yield from (f"{path} {p.name}" for p in command.params if not getattr(p, "help", None))

    assert list(silent(typer.main.get_command(app), "search-fetch")) == []
