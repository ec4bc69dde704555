"""Traces of requests: who asked for which blocks, and when.

A trace is a JSON object a line: `timestamp` (ms), `input_length` (tokens) and `hash_ids` (one id
for each block of the input; an equal id at an equal position means an equal prefix).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from deepinfer_kvtier.base.errors import ConfigError

_MAX_LINE = 16 << 20


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

    raises: ConfigError with the number of the first line that cannot be read, or when there is no
            request.
    """
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE), b""), start=1):
                if line.strip():
                    requests.append(_request(path, number, line))
    except OSError as cause:
        raise ConfigError(f"cannot read {path}: {cause.strerror}") from cause
    if not requests:
        raise ConfigError(f"{path} holds no request")
    requests.sort(key=lambda request: request.at_s)
    return requests


def _request(path: Path, number: int, line: bytes) -> Request:
    try:
        return _parse(line)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as cause:
        raise ConfigError(
            f"{path}, line {number}: expected timestamp, input_length and hash_ids: {cause!r}"
        ) from cause


def _parse(line: bytes) -> Request:
    record: Any = json.loads(line)
    ids, at_ms, tokens = record["hash_ids"], record["timestamp"], record["input_length"]
    if not (isinstance(ids, list) and all(type(block) is int for block in cast("list[Any]", ids))):
        raise ValueError("hash_ids is no list of whole numbers")
    if type(tokens) is not int or tokens < 0:
        raise ValueError("input_length is no number of tokens")
    if isinstance(at_ms, bool) or not math.isfinite(at_ms):
        raise ValueError("timestamp is no number of milliseconds")
    return Request(at_ms / 1000, tokens, tuple(cast("list[int]", ids)))
