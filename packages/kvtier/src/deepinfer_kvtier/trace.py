"""Traces of requests: who asked for which blocks, and when.

A trace is a JSON object a line: `timestamp` (ms), `input_length` (tokens) and `hash_ids` (one id
for each block of the input; an equal id at an equal position means an equal prefix).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_kvtier.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Request:
    """One request: arrival in seconds, prompt length in tokens, ids of its blocks.

    cls: retention class of its blocks, where lifetimes are simulated by class.
    """

    at_s: float
    tokens: int
    blocks: tuple[int, ...]
    cls: str = "chat"


def read_trace(path: Path) -> list[Request]:
    """Requests of a trace file, in order of arrival.

    raises: ConfigError with the number of the first line that cannot be read.
    """
    requests: list[Request] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as cause:
        raise ConfigError(f"cannot read {path}: {cause}") from cause
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
            blocks = tuple(int(block) for block in record["hash_ids"])
            at_s, tokens = float(record["timestamp"]) / 1000, int(record["input_length"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as cause:
            raise ConfigError(
                f"{path}, line {number}: expected timestamp, input_length and hash_ids: {cause!r}"
            ) from cause
        requests.append(Request(at_s, tokens, blocks))
    return requests
