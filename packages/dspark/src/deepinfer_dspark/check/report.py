"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Report:
    """kept: the distribution is the target's as far as this check can see; method: how it looked;
    worst: largest deviation of a probability (enumeration) or largest statistic over its limit
    (sampling, 1 = at the limit); findings: one line each, worst first."""

    kept: bool
    method: str
    worst: float
    findings: tuple[str, ...] = ()

    def __str__(self) -> str:
        verdict = "kept" if self.kept else "NOT KEPT"
        head = f"target distribution {verdict}: {self.method}, worst {self.worst:.3g}"
        return "\n".join([head, *(f"  {f}" for f in self.findings)])
