# /// script
# dependencies = ["guidellm"]
# ///
"""GuideLLM: one stream at a time, eight requests."""

import json
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
    report_file, prompts = FOLDER / "report.json", FOLDER / "prompts.txt"
    prompts.write_text("".join(f"Tell me story number {n} about a fox.\n" for n in range(8)))
    command = [
        program, "run", "--backend", f"kind=openai_http,target={URL},model={MODEL}",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=8",
        "--data", f"kind=text_file,path={prompts}", "--output", f"kind=json,path={report_file}",
        "--disable-progress",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=900)
    check(done.returncode == 0, (done.stdout + done.stderr)[-400:])
    [run] = json.loads(report_file.read_text())["benchmarks"]
    totals = run["metrics"]["request_totals"]
    check(totals["successful"] == 8 and totals["errored"] == 0, str(totals))


report.step("eight requests", load)
report.done()
