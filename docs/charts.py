"""Bar charts of the benchmarks page, drawn from results that packages keep as JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

WIDTH, LABEL, BAR, ROW = 720, 190, 400, 22
COLOURS = ("#3949ab", "#90a4ae", "#26a69a", "#ffb300")
FONT = 'font-family="system-ui,sans-serif" font-size="13" fill="#263238"'

Rows = Sequence[tuple[str, Sequence[tuple[str, float]]]]
"""(label, (series, value) ...) a group of bars."""


def bars(title: str, rows: Rows, *, start: float = 0.0, unit: str = "", digits: int = 2) -> str:
    """Horizontal bars from `start`, one a series, grouped; as SVG."""
    series = list(dict.fromkeys(name for _, values in rows for name, _ in values))
    most = max(value for _, values in rows for _, value in values) - start
    y, out = (
        54 if len(series) > 1 else 36,
        [f'<text x="12" y="22" font-weight="600">{title}</text>'],
    )
    if len(series) > 1:
        for i, name in enumerate(series):
            x = 12 + 170 * i
            out.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{COLOURS[i]}"/>')
            out.append(f'<text x="{x + 17}" y="44">{escape(name)}</text>')
    for label, values in rows:
        y += 6
        middle = y + len(values) * ROW / 2 + 4
        out.append(f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>')
        for name, value in values:
            long = max(1.0, BAR * (value - start) / most)
            colour = COLOURS[series.index(name)]
            out.append(
                f'<rect x="{LABEL}" y="{y + 3}" width="{long:.1f}" height="{ROW - 6}" '
                f'fill="{colour}"/><text x="{LABEL + long + 6:.1f}" y="{y + 16}">'
                f"{value:.{digits}f}{unit}</text>"
            )
            y += ROW
    height = y + 12
    body = "\n".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}"><rect width="{WIDTH}" height="{height}" rx="8" '
        f'fill="#fafafa"/><g {FONT}>\n{body}\n</g></svg>\n'
    )


def drawn(root: Path) -> dict[str, str]:
    """Name -> SVG, of every chart."""

    def read(path: str) -> Any:
        return json.loads((root / "packages" / path).read_text(encoding="utf-8"))

    return {
        "bench-kernels": _kernels(read("kernels/benches/results/cpu.json")),
        "bench-eplb": _eplb(read("eplb/benches/results_eight_seeds.json")),
        "bench-dspark": _dspark(read("dspark/benches/gain.json")),
        "bench-extraction": _extraction(read("search_fetch/benches/extraction_floors.json")),
    }


def _kernels(found: Any) -> str:
    best: dict[str, list[float]] = defaultdict(list)
    for row in found["rows"]:
        if row["backend"] == "native":
            best[row["op"]].append(row["times_reference"])
    rows = [(op, [("native", mean(times))]) for op, times in best.items()]
    rows.sort(key=lambda row: -row[1][0][1])
    title = f"Compiled CPU forms over the torch reference, {found['threads']} thread: times as fast"
    return bars(title, rows, unit="x", digits=1)


def _eplb(found: Any) -> str:
    names = {"linear": "one slot an expert more", "totals": "totals policy"}
    names |= {"per-step": "per-step policy", "plan, from old": "plan"}
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in found["rows"]:
        if row["case"] == "main" and row["policy"] in ("totals", "per-step", "plan, from old"):
            values[row["kind"], row["policy"]].append(row["B"] - 1)
    kinds = list(dict.fromkeys(kind for kind, _ in values))
    rows = [
        (kind, [(names[p], 100 * mean(values[kind, p])) for k, p in values if k == kind])
        for kind in kinds
    ]
    return bars("Load of the busiest rank above the mean, by kind of load", rows, unit=" %")


def _dspark(found: Any) -> str:
    outcomes = found["curves"]["default"]["outcomes"]
    rows = [
        (f"{o['requests']} requests", [("gain", 100 * o["gain"])])
        for o in outcomes
        if o["gain"] > 0
    ]
    return bars(
        "Budgeted over fixed verification, simulated: more tokens a second", rows, unit=" %"
    )


def _extraction(found: Any) -> str:
    # The mode that is told by kind of page, on hosts that no training has seen.
    floors = max((f for name, f in found.items() if "cross-validated" in name), key=len)
    kinds = {k.partition(".")[2]: v for k, v in floors.items() if k.startswith("word_f1.")}
    rows = [(kind, [("word F1", value)]) for kind, value in sorted(kinds.items())]
    return bars("Least word F1 that the gate accepts, hosts not seen in training", rows)
