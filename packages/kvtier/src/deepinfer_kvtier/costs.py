"""The cost model of one cache, kept up to date by what loads really took."""

from __future__ import annotations

import threading
from dataclasses import replace

from deepinfer_kvtier.plan import UNKNOWN_TIER, Cost

WEIGHT = 0.2
"""Of the newest observation in the exponential averages."""
SMALL_BYTES = 64 << 10
"""Loads below this size say something about latency, larger ones about the rate."""


class CostModel:
    """Exponential averages of observed loads and prefills over a starting `Cost`. Thread-safe."""

    def __init__(self, start: Cost | None = None) -> None:
        self._lock = threading.Lock()
        self._cost = start or Cost()
        self.observations = 0

    def current(self) -> Cost:
        """The model as it stands."""
        return self._cost

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` from one tier alone took `seconds`."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            latency, rate = self._cost.tiers.get(tier, UNKNOWN_TIER)
            if nbytes < SMALL_BYTES:
                latency = _blend(latency, max(0.0, seconds - nbytes / rate))
            else:
                # A load as short as the latency believed in shows that the latency was less.
                latency = min(latency, seconds / 2)
                # Times are averaged, not rates: one lucky load must not hide many slow ones.
                rate = 1 / _blend(1 / rate, (seconds - latency) / nbytes)
            tiers = {**self._cost.tiers, tier: (latency, rate)}
            self._cost = replace(self._cost, tiers=tiers)
            self.observations += 1

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Computing `tokens` without hits took `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        with self._lock:
            per_token = _blend(1 / self._cost.prefill_tok_s, seconds / tokens)
            self._cost = replace(self._cost, prefill_tok_s=1 / per_token)
            self.observations += 1


def _blend(old: float, new: float) -> float:
    return old + WEIGHT * (new - old)
