from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepinfer_search_fetch import __version__

Listener = Any  # see conftest
TEXT = "<title>Newts</title><p>" + "Newts live in ponds and eat small insects. " * 20


def cli(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepinfer_search_fetch.cli", *arguments]
    if home is not None:
        command += ["--home", str(home)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_commands_work_together(tmp_path: Path, site: Listener) -> None:
    site.page("/newts", TEXT)
    allow = ["--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port)]
    url = f"http://127.0.0.2:{site.port}/newts"
    read = cli("fetch", url, "--raw", *allow, home=tmp_path)
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
