"""Slow twin of `sampling` and `verification`: one request, plain Python, written to be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LawSpec:
    """Sampling parameters of one request; see `SamplingBatch` for their meaning."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    banned: Collection[int] = ()


def law_of(
    logits: Sequence[float],
    spec: LawSpec,
    *,
    output: Sequence[int] = (),
    prompt: Collection[int] = (),
    allowed: Collection[int] | None = None,
) -> list[float]:
    """Probability of every token. `output`: committed output and the drafts before this row."""
    x = [float(v) for v in logits]
    for t in set(output) | set(prompt):
        x[t] = x[t] / spec.repetition if x[t] > 0 else x[t] * spec.repetition
    for t in set(output):
        x[t] -= spec.presence + spec.frequency * list(output).count(t)
    for t, value in spec.bias.items():
        x[t] += value
    for t in range(len(x)):
        if t in spec.banned or (allowed is not None and t not in allowed):
            x[t] = -math.inf
    if spec.temperature == 0:
        best = max(range(len(x)), key=lambda t: (x[t], -t))
        return [1.0 if t == best else 0.0 for t in range(len(x))]
    p = _softmax([v / spec.temperature for v in x])
    order = sorted(range(len(x)), key=lambda t: (-p[t], t))
    kept: list[int] = []
    before = 0.0
    for rank, t in enumerate(order):
        outside = before > spec.top_p or (spec.top_k >= 1 and rank >= spec.top_k)
        if not outside and p[t] >= spec.min_p * p[order[0]]:
            kept.append(t)
        before += p[t]
    total = sum(p[t] for t in kept)
    return [p[t] / total if t in kept else 0.0 for t in range(len(x))]


def _softmax(x: Sequence[float]) -> list[float]:
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    """norm(max(p - q, 0)), or p where nothing is left."""
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    total = sum(rest)
    return [r / total for r in rest] if total > 0 else list(p)


def invert(law: Sequence[float], u: float) -> int:
    """The token whose slice of [0, 1) holds u."""
    below = 0.0
    last = 0
    for t, mass in enumerate(law):
        if mass > 0:
            last = t
            if u < below + mass:
                return t
        below += mass
    return last


def verify_one(
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    drafts: Sequence[int],
    accept_u: Sequence[float],
    final_u: float,
) -> list[int]:
    """Tokens of one request. p: l + 1 laws; q: l laws; drafts: l tokens; accept_u: l uniforms."""
    out: list[int] = []
    for k, x in enumerate(drafts):
        if accept_u[k] < min(1.0, p[k][x] / q[k][x]):
            out.append(x)
        else:
            return [*out, invert(residual(p[k], q[k]), final_u)]
    return [*out, invert(p[len(drafts)], final_u)]


def verify_tree_one(
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    tokens: Sequence[int],
    parents: Sequence[int],
    uniform: Callable[[], float],
) -> list[int]:
    """Tokens of one request. p: laws after the anchor and after each node; q: law of each node
    given its elder siblings; uniform: asked once a child that is tried and once at the end."""
    out: list[int] = []
    node = -1
    while True:
        law = list(p[node + 1])
        for child in (i for i, parent in enumerate(parents) if parent == node):
            x = tokens[child]
            if uniform() < min(1.0, law[x] / q[child][x]):
                out.append(x)
                node = child
                break
            law = residual(law, q[child])
        else:
            return [*out, invert(law, uniform())]
