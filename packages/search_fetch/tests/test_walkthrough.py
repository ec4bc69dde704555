"""The README's walkthrough, run as it stands by a shell that knows nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_walkthrough_ends_with_answers_and_their_bill(tmp_path: Path) -> None:
    [script] = re.findall(r"^```sh\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)
    for port in ("8900", "8901"):
        script = script.replace(port, str(free_port()))
    bin_folder = Path(sys.executable).parent
    environ = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    assert shutil.which("search-fetch", path=environ["PATH"]), "the command is not installed"
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = shell.communicate(timeout=240)
    finally:
        if shell.poll() is None:  # its servers must not outlive the test
            os.killpg(shell.pid, 9)
            shell.communicate()
    assert shell.returncode == 0, err
    assert "Traceback" not in err
    assert "hears them in the grass" in out
    answers = [json.loads(line) for line in out.splitlines() if line.startswith('{"')]
    search, page, drop_in = answers
    assert {r["title"] for r in search["results"]} == {"The kestrel", "The owl"}
    assert page["title"] == "The owl"
    assert drop_in["results"][0]["rerank_score"] > 0
    usage = json.loads(out[out.rindex('{\n  "since"') :])
    assert {r["endpoint"]: r["quantity"] for r in usage["usage"]} == {"fetch": 1, "search": 2}
