# /// script
# requires-python = ">=3.10,<3.13"
# dependencies = ["aider-chat"]
# ///
"""aider: one message about one file, without git, as a script would call it."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import KEY, MODEL, OPENAI, Report, check

report = Report("aider-chat")
FOLDER = Path(tempfile.mkdtemp())
(FOLDER / "hello.py").write_text('print("hello")\n')


def edit(streams):
    command = [
        shutil.which("aider") or str(Path(sys.executable).parent / "aider"),
        "--model", f"openai/{MODEL}", "--no-git", "--yes-always", "--no-show-model-warnings",
        "--no-check-update", "--analytics-disable", "--no-auto-lint", "--map-tokens", "0",
        "--stream" if streams else "--no-stream",
        "--message", "Say hello politely.", "hello.py",
    ]  # fmt: skip
    env = {**os.environ, "OPENAI_API_BASE": OPENAI, "OPENAI_API_KEY": KEY, "HOME": str(FOLDER)}
    done = subprocess.run(command, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=500)
    text = done.stdout + done.stderr
    check(done.returncode == 0 and "APIError" not in text and "BadRequest" not in text, text[-300:])


report.step("message", lambda: edit(False))
report.step("message stream", lambda: edit(True))
report.done()
