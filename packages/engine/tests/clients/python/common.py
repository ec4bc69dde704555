"""What the client scripts share: where the server is, and how they report.

A script runs one client as its own documentation shows it, at its defaults: only the address, a
key and the model's name are given. It prints one JSON object: what was tried, and what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable
from importlib import metadata
from typing import Any

URL = os.environ["DEEPINFER_URL"]  # http://127.0.0.1:PORT
OPENAI = f"{URL}/v1"
MODEL = os.environ.get("DEEPINFER_MODEL", "deepinfer-demo")
KEY = os.environ.get("DEEPINFER_KEY", "sk-local")

QUESTION = "What is the weather in the garden?"
FOX = "Tell me a story about a fox."


class Report:
    """Runs the named steps of one client; a step that raises is a failure with its reason."""

    def __init__(self, client: str, distribution: str | None = None) -> None:
        self.client = client
        try:
            self.version = metadata.version(distribution or client)
        except metadata.PackageNotFoundError:
            self.version = "?"
        self.steps: dict[str, str] = {}

    def step(self, name: str, call: Callable[[], Any]) -> Any:
        """The value of a call, kept as `ok`, or None and the reason."""
        try:
            value = call()
        except BaseException as error:  # a client may exit, too: that is a result
            traceback.print_exc()
            self.steps[name] = f"{type(error).__name__}: {error}"[:300]
            return None
        self.steps[name] = "ok"
        return value

    def done(self) -> None:
        """Print the result as the last line; exit with 1 if a step failed."""
        print(json.dumps({"client": self.client, "version": self.version, "steps": self.steps}))
        sys.stdout.flush()
        os._exit(any(value != "ok" for value in self.steps.values()))


def counters() -> dict[str, float]:
    """What the server says it has read, generated and found in its cache."""
    text = urllib.request.urlopen(f"{URL}/metrics", timeout=30).read().decode()
    names = {f"deepinfer_{kind}_tokens_total": kind for kind in ("prompt", "generated", "cached")}
    lines = (line.split() for line in text.splitlines())
    return {names[line[0]]: float(line[-1]) for line in lines if line and line[0] in names}


def weather(city: str) -> str:
    """Get the weather of a place.

    Args:
        city: the place.
    """
    return f"sunny in {city}"


def check(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)
