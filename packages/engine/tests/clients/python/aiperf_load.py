# /// script
# dependencies = ["aiperf"]
# ///
"""AIPerf: synthetic prompts, two at a time, eight requests, streaming."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL, Report, check

report = Report("aiperf")


def load():
    program = shutil.which("aiperf") or str(Path(sys.executable).parent / "aiperf")
    folder = tempfile.mkdtemp()
    command = [
        program, "profile", "--model", MODEL, "--url", URL, "--endpoint-type", "chat",
        "--streaming", "--concurrency", "2", "--request-count", "8",
        "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16",
        "--tokenizer", os.environ["DEEPINFER_TOKENIZER"], "--ui", "none",
    ]  # fmt: skip
    # Where the hub is switched off it takes the folder of a tokenizer for a name of the hub.
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    text = done.stdout + done.stderr
    check(done.returncode == 0, text[-400:])


report.step("eight requests", load)
report.done()
