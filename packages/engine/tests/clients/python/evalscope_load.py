# /// script
# dependencies = ["evalscope[perf]"]
# ///
"""EvalScope's performance test: two at a time, eight requests."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import KEY, MODEL, OPENAI, Report, check

report = Report("evalscope")


def load():
    program = shutil.which("evalscope") or str(Path(sys.executable).parent / "evalscope")
    folder = tempfile.mkdtemp()
    command = [
        program, "perf", "--url", f"{OPENAI}/chat/completions", "--model", MODEL, "--api", "openai",
        "--api-key", KEY, "--parallel", "2", "--number", "8", "--max-tokens", "16",
        "--prompt", "Tell me a story about a fox.", "--outputs-dir", folder,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    text = done.stdout + done.stderr
    check(done.returncode == 0 and "Traceback" not in text, text[-400:])


report.step("eight requests", load)
report.done()
