"""What a load showed: numbers, a table for a terminal, and a page with charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from deepinfer_engine.cli.load.client import COUNTERS, Seen

POINTS = (50, 90, 95, 99)


def summary(
    seen: Sequence[Seen],
    seconds: float,
    before: dict[str, float] | None,
    after: dict[str, float] | None,
) -> dict[str, Any]:
    """Counts, rates (a second) and percentiles (seconds); `server`: what it counted meanwhile, and
    whether that is the same."""
    good = [one for one in seen if not one.error]
    counts = {
        "answers": len(good),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": sum(one.cached_tokens for one in good),
        "output_tokens": sum(one.output_tokens for one in good),
    }
    found: dict[str, Any] = {
        "requests": len(seen),
        **counts,
        "failed": dict(Counter(one.error for one in seen if one.error)),
        "seconds": seconds,
        "answers_per_second": len(good) / seconds if seconds else 0.0,
        "output_tokens_per_second": counts["output_tokens"] / seconds if seconds else 0.0,
        "prompt_tokens_per_second": counts["prompt_tokens"] / seconds if seconds else 0.0,
        "hit_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
        "ttft": percentiles([one.first for one in good if one.first is not None]),
        "token_gap": percentiles([gap for one in good for gap in one.gaps]),
        "e2e": percentiles([one.whole for one in good]),
    }
    if before is not None and after is not None:
        told = {name: int(after[name] - before[name]) for name in COUNTERS}
        found["server"] = {**told, "same": told == counts}
    return found


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Of these values, None where there are none."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in POINTS}
    return {"mean": sum(ordered) / len(ordered), **found}


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) as people read them."""
    rows = [
        ("answers", f"{found['answers']:,} of {found['requests']:,} in {found['seconds']:.1f} s"),
        ("answers/s", f"{found['answers_per_second']:.2f}"),
        ("output tokens/s", f"{found['output_tokens_per_second']:,.1f}"),
        ("prompt tokens/s", f"{found['prompt_tokens_per_second']:,.1f}"),
        ("cache hits", f"{found['hit_rate']:.1%} of {found['prompt_tokens']:,} prompt tokens"),
    ]
    for name, label in (("ttft", "first token"), ("token_gap", "token gap"), ("e2e", "answer")):
        if found[name] is not None:
            values = "  ".join(f"{p} {_time(v)}" for p, v in found[name].items())
            rows.append((label, values))
    rows += [("failed", f"{n} x {error}") for error, n in found["failed"].items()]
    if "server" in found:
        server = found["server"]
        text = "the same" if server["same"] else f"other numbers: {server}"
        rows.append(("the server counted", text))
    return rows


def _time(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def page(found: dict[str, Any], seen: Sequence[Seen], title: str) -> str:
    """One HTML file that needs nothing else: the numbers and three charts."""
    good = [one for one in seen if not one.error]
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in lines(found)
    )
    firsts = [(one.at, one.first * 1000) for one in good if one.first is not None]
    charts = [
        _scatter("First token over time", firsts, "s since the start", "ms"),
        _steps("First token", [y for _, y in firsts], "ms"),
        _steps("Token gap", [gap * 1000 for one in good for gap in one.gaps], "ms"),
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"<table>{rows}</table>{''.join(charts)}</html>\n"
    )


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
    "color:#1b1f24;background:#fff}table{border-collapse:collapse}th{text-align:left;"
    "padding:.2rem 2rem .2rem 0;font-weight:500;color:#5a6370}td{font-variant-numeric:tabular-nums}"
    "svg{width:100%;height:auto;margin:1rem 0}svg text{font:12px system-ui,sans-serif;"
    "fill:#5a6370}.t{font-size:14px;fill:#1b1f24;font-weight:600}"
)
_WIDTH, _HEIGHT, _LEFT, _LOW = 800, 260, 60, 40
_MOST_POINTS = 2000


def _scatter(title: str, points: Sequence[tuple[float, float]], x: str, y: str) -> str:
    shown = _thinned(points)
    right = max((a for a, _ in shown), default=0.0) or 1.0
    top = max((b for _, b in shown), default=0.0) or 1.0
    dots = "".join(
        f'<circle cx="{_x(a / right):.1f}" cy="{_y(b / top):.1f}" r="2.5" fill="#0b5cad" '
        'fill-opacity=".55"/>'
        for a, b in shown
    )
    return _chart(title, dots, right, top, x, y)


def _steps(title: str, values: Sequence[float], unit: str) -> str:
    """Which part of the values is at most so large."""
    ordered = sorted(values)
    right = ordered[-1] if ordered and ordered[-1] > 0 else 1.0
    n = len(ordered)
    points = _thinned([(v, (i + 1) / n) for i, v in enumerate(ordered)])
    path = " ".join(f"{_x(v / right):.1f},{_y(part):.1f}" for v, part in points)
    line = f'<polyline points="{path}" fill="none" stroke="#0b5cad" stroke-width="2"/>'
    return _chart(f"{title}: part of all at most so long", line, right, 1.0, unit, "")


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, -(-len(points) // _MOST_POINTS))]


def _x(part: float) -> float:
    return _LEFT + part * (_WIDTH - _LEFT - 20)


def _y(part: float) -> float:
    return _HEIGHT - _LOW - part * (_HEIGHT - _LOW - 36)


def _chart(title: str, inside: str, right: float, top: float, x: str, y: str) -> str:
    base = _y(0)
    marks = "".join(
        f'<text x="{_x(p):.0f}" y="{base + 16:.0f}" text-anchor="middle">{right * p:.4g}</text>'
        f'<text x="{_LEFT - 8}" y="{_y(p) + 4:.0f}" text-anchor="end">{top * p:.4g}</text>'
        f'<line x1="{_LEFT}" x2="{_x(1):.0f}" y1="{_y(p):.0f}" y2="{_y(p):.0f}" stroke="#e4e2dd"/>'
        for p in (0, 0.25, 0.5, 0.75, 1)
    )
    names = (
        f'<text class="t" x="{_LEFT}" y="20">{escape(title)}</text>'
        f'<text x="{_x(1):.0f}" y="{base + 34:.0f}" text-anchor="end">{escape(x)}</text>'
        f'<text x="8" y="20">{escape(y)}</text>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{marks}{inside}{names}</svg>"
    )
