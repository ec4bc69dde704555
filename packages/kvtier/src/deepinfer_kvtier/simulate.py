"""What hit rate a capacity, a lifetime and a policy would give on a trace of requests.

A trace is a JSON object a line: `timestamp` (ms), `input_length` (tokens) and `hash_ids` (one id
for each block of the input; an equal id at an equal position means an equal prefix). The hit rate
is tokens hit / tokens asked for, as a request sees it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.policies import POLICIES, Request
from deepinfer_kvtier.retention import RetentionClass


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Totals of one run; `peak_blocks` is the largest number of blocks held at once.

    Requests before `measure_from_s` warm the cache and are not counted.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    peak_blocks: int
    evicted_blocks: int
    hit_rate_by_class: dict[str, float]


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


def simulate(
    requests: Sequence[Request],
    *,
    capacity_blocks: int | None = None,
    ttl_s: float | None = None,
    refresh: bool = True,
    policy: str = "tail-lru",
    block_tokens: int = 512,
    classes: Mapping[str, RetentionClass] | None = None,
    measure_from_s: float = 0.0,
) -> SimulationResult:
    """Replay a trace against a prefix cache.

    capacity_blocks: None = without limit.
    ttl_s:           seconds after which a block is no hit any more; None = never.
    refresh:         whether a hit renews the lifetime.
    block_tokens:    tokens a block id of the trace stands for.
    classes:         lifetimes by the class of the request that used a block last; in place of
                     `ttl_s`.
    measure_from_s:  arrival of the first request that counts.
    raises:          ConfigError.
    """
    if policy not in POLICIES:
        raise ConfigError(f"unknown policy {policy!r}: use one of {sorted(POLICIES)}")
    if capacity_blocks is not None and capacity_blocks < 0:
        raise ConfigError(f"capacity_blocks must be at least 0, got {capacity_blocks}")
    order = POLICIES[policy](requests, block_tokens)
    fresh_until: dict[int, float] = {}
    hit: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    counted = peak = evicted = 0
    for number, request in enumerate(requests):
        leading = 0
        for block in request.blocks:
            if fresh_until.get(block, -1.0) < request.at_s:
                break
            leading += 1
        if request.at_s >= measure_from_s:
            counted += 1
            asked[request.cls] += request.tokens
            hit[request.cls] += min(leading * block_tokens, request.tokens)
        lifetime = _lifetime(request, ttl_s, classes)
        for block in request.blocks:
            if refresh or fresh_until.get(block, -1.0) < request.at_s:
                fresh_until[block] = request.at_s + lifetime
        order.use(request, number)
        while capacity_blocks is not None and len(fresh_until) > capacity_blocks:
            del fresh_until[order.victim()]
            evicted += 1
        peak = max(peak, len(fresh_until))
    return SimulationResult(
        requests=counted,
        prompt_tokens=asked.total(),
        hit_tokens=hit.total(),
        hit_rate=hit.total() / asked.total() if asked.total() else 0.0,
        peak_blocks=peak,
        evicted_blocks=evicted,
        hit_rate_by_class={cls: hit[cls] / tokens for cls, tokens in asked.items() if tokens},
    )


def _lifetime(
    request: Request, ttl_s: float | None, classes: Mapping[str, RetentionClass] | None
) -> float:
    if classes is not None:
        if request.cls not in classes:
            raise ConfigError(
                f"unknown class {request.cls!r}: lifetimes are given for {sorted(classes)}"
            )
        ttl_s = classes[request.cls].ttl_s
    return float("inf") if ttl_s is None else ttl_s
