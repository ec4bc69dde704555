"""What happened within the last minute, from metrics that only grow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.registry import Collector

from deepinfer_engine.server.compat_metrics import summed
from deepinfer_engine.server.metrics import Metrics

WINDOW_S = 60.0
"""What `recent` looks back on, at least where somebody asked so long ago."""
_EVERY_S = 2.0
_NAMES = ("prompt_tokens", "cached_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens")


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    counts: dict[str, float]
    ttft: Sequence[tuple[float, float]]
    gaps: Sequence[tuple[float, float]]


@dataclass(slots=True)
class History:
    """Differences between now and a minute ago. Remembers the start, and a sample for every few
    seconds in which somebody looked; who looks first sees everything since the start."""

    _samples: deque[_Sample] = field(default_factory=lambda: deque[_Sample]())

    def begin(self, now: float) -> None:
        """The server's start."""
        self._samples.append(_Sample(now, {}, (), ()))

    def look(self, metrics: Metrics, now: float) -> dict[str, Any]:
        """Counts and percentiles (seconds) since about a minute ago."""
        counts = {name: _total(getattr(metrics, name)) for name in _NAMES}
        counts |= {
            name: _total(getattr(metrics, name)) for name in ("requests", "errors", "aborts")
        }
        last = _Sample(now, counts, summed(metrics.ttft)[0], summed(metrics.itl)[0])
        while len(self._samples) > 1 and self._samples[1].at <= now - WINDOW_S:
            self._samples.popleft()
        first = self._samples[0] if self._samples else _Sample(now, {}, (), ())
        if not self._samples or now - self._samples[-1].at >= _EVERY_S:
            self._samples.append(last)
        seconds = max(now - first.at, 0.0)
        grown = {name: value - first.counts.get(name, 0.0) for name, value in counts.items()}
        return {
            "seconds": round(seconds, 3),
            **{name: int(value) for name, value in grown.items()},
            "hit_rate": _part(grown["cached_tokens"], grown["prompt_tokens"]),
            "accepted_rate": _part(grown["accepted_tokens"], grown["drafted_tokens"]),
            "ttft": _percentiles(first.ttft, last.ttft),
            "token_gap": _percentiles(first.gaps, last.gaps),
        }


def _total(counter: Collector) -> float:
    return sum(
        sample.value
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


def _part(of: float, whole: float) -> float | None:
    return round(of / whole, 4) if whole > 0 else None


def _percentiles(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> dict[str, float | None]:
    old = dict(before)
    grown = [(end, value - old.get(end, 0.0)) for end, value in after]
    return {f"p{p}": percentile(grown, p / 100) for p in (50, 90, 99)}


def percentile(buckets: Sequence[tuple[float, float]], part: float) -> float | None:
    """By the buckets' ends, evenly within one, as Prometheus does; None without observations."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = part * buckets[-1][1]
    low = below = 0.0
    for end, count in buckets:
        if count >= rank:
            if end == float("inf"):
                return round(low, 6)
            inside = count - below
            return round(low + (end - low) * ((rank - below) / inside if inside else 1.0), 6)
        low, below = end, count
    return round(low, 6)
