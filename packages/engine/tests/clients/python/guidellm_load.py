# /// script
# dependencies = ["guidellm"]
# ///
"""GuideLLM: synthetic prompts, one stream at a time, eight requests."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL, Report, check

report = Report("guidellm")
FOLDER = Path(tempfile.mkdtemp())


def load():
    program = shutil.which("guidellm") or str(Path(sys.executable).parent / "guidellm")
    tokenizer = os.environ["DEEPINFER_TOKENIZER"]
    command = [
        program, "benchmark", "--target", URL, "--model", MODEL, "--profile", "synchronous",
        "--max-requests", "8", "--data", "prompt_tokens=64,output_tokens=16",
        "--processor", tokenizer, "--output-dir", str(FOLDER), "--outputs", "json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=900)
    check(done.returncode == 0, (done.stdout + done.stderr)[-400:])
    [path] = FOLDER.glob("*.json")
    [run] = json.loads(path.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    check(totals["successful"] == 8 and totals["errored"] == 0, str(totals))


report.step("eight requests", load)
report.done()
