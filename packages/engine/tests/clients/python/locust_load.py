# /// script
# dependencies = ["locust"]
# ///
"""Locust: four users, each with one request at a time, twelve in all."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import FOX, KEY, MODEL, URL, Report, check

report = Report("locust")
FOLDER = Path(tempfile.mkdtemp())
BODY = {"model": MODEL, "max_tokens": 16, "messages": [{"role": "user", "content": FOX}]}
(FOLDER / "locustfile.py").write_text(
    f"""
import itertools
from locust import HttpUser, task
from locust.exception import StopUser

answered = itertools.count(1)


class Caller(HttpUser):
    left = 3

    @task
    def chat(self):
        self.client.post("/v1/chat/completions", json={BODY!r},
                         headers={{"authorization": "Bearer {KEY}"}})
        if next(answered) == 12:
            self.environment.runner.quit()
        self.left -= 1
        if not self.left:
            raise StopUser
"""
)


def load():
    command = [sys.executable, "-m", "locust", "--headless", "-u", "4", "-r", "4", "-t", "300s"]
    command += ["--host", URL, "--json", "--only-summary"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    rows = json.loads(done.stdout[done.stdout.index("[") :])
    check(sum(row["num_failures"] for row in rows) == 0, done.stderr[-300:])
    check(sum(row["num_requests"] for row in rows) >= 12, done.stdout[-300:])


report.step("twelve requests", load)
report.done()
