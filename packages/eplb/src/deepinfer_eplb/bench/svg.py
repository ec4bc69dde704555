"""Rank loads before and after, as an SVG without a plotting library."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

WIDTH, PANEL, PAD = 760, 150, 46


def load_svg(
    before: npt.NDArray[Any], after: npt.NDArray[Any], titles: tuple[str, str], caption: str
) -> str:
    """Two bar panels on one scale. before, after: [G] load of each rank over the mean."""
    top = max(float(before.max()), float(after.max()), 1.0) * 1.05
    height = 2 * (PANEL + PAD) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for i, (loads, title) in enumerate(((before, titles[0]), (after, titles[1]))):
        parts += _panel(loads, title, top, 30 + i * (PANEL + PAD))
    parts.append(f'<text x="{PAD}" y="{height - 12}" fill="#555">{_escape(caption)}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(loads: npt.NDArray[Any], title: str, top: float, y0: int) -> list[str]:
    inner = WIDTH - 2 * PAD
    step = inner / loads.size
    out = [f'<text x="{PAD}" y="{y0 - 8}" font-weight="bold">{_escape(title)}</text>']
    busiest = int(np.argmax(loads))
    for g, load in enumerate(loads.tolist()):
        h = load / top * PANEL
        colour = "#c0392b" if g == busiest else "#4a78b0"
        out.append(
            f'<rect x="{PAD + g * step:.2f}" y="{y0 + PANEL - h:.2f}" width="{step * 0.82:.2f}" '
            f'height="{h:.2f}" fill="{colour}"><title>rank {g}: {load:.3f}</title></rect>'
        )
    mean = y0 + PANEL - PANEL / top
    out.append(
        f'<line x1="{PAD}" x2="{WIDTH - PAD}" y1="{mean:.2f}" y2="{mean:.2f}" stroke="#222" '
        'stroke-dasharray="4 3"/>'
    )
    out.append(f'<text x="8" y="{mean + 4:.2f}">mean</text>')
    out.append(f'<text x="8" y="{y0 + 10}">{top:.2f}x</text>')
    return out


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
