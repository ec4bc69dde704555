# /// script
# dependencies = ["llm"]
# ///
"""The `llm` command with a model of its `extra-openai-models.yaml`."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import FOX, KEY, MODEL, OPENAI, Report, check

report = Report("llm")
HOME = tempfile.mkdtemp()
Path(HOME, "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {MODEL}\n  api_base: {OPENAI}\n"
    "  can_stream: true\n  supports_tools: true\n  supports_schema: true\n"
)
ENV = {**os.environ, "LLM_USER_PATH": HOME, "OPENAI_API_KEY": KEY}


def llm(*words):
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=300)
    check(done.returncode == 0, done.stderr[-300:])
    return done.stdout


report.step("prompt", lambda: check(llm("-m", "local", "-o", "max_tokens", "60", FOX), "no text"))
report.step("no stream", lambda: llm("-m", "local", "--no-stream", "-o", "max_tokens", "60", FOX))
report.step(
    "schema",
    lambda: llm("-m", "local", "--schema", "name, age int", "-o", "max_tokens", "800", "Ana is 7."),
)
report.step(
    "tools", lambda: llm("-m", "local", "-T", "llm_version", "-o", "max_tokens", "200", "x")
)
report.done()
