"""Memory of large bodies goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, json
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from deepinfer_engine.server.run import give_large_blocks_back
def rss_mb():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024
if sys.argv[1] == "yes": give_large_blocks_back()
kept = []
body = json.dumps({"a": "fox " * 500_000}).encode()
def one(i):
    text = json.loads(body)["a"]
    other = "<" + text + ">"
    kept.append(bytearray(2000))
    again = other.replace("fox", "cat")
    kept.append(bytearray(2000))
    return len(again.encode())
before = rss_mb()
with ThreadPoolExecutor(8) as pool:
    for _ in range(3):
        list(pool.map(one, range(16)))
    print(rss_mb() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc")
def test_what_large_bodies_took_goes_back_to_the_system() -> None:
    grown = {
        asked: float(subprocess.check_output([sys.executable, "-c", SCRIPT, asked]))
        for asked in ("yes", "no")
    }
    assert 2 * grown["yes"] < grown["no"], grown
