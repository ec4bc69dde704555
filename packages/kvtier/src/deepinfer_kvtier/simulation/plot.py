"""Line charts as SVG text, for hit rates over capacity or lifetime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 56, 56
_COLOURS = ("#1f5fa8", "#c4502e", "#3b8a4e", "#7a4fa3", "#8a6d1f", "#40808a")

Points = Sequence[tuple[float, float]]


def line_chart(
    series: Mapping[str, Points], *, title: str, x_label: str, y_label: str = "hit rate"
) -> str:
    """One line for each series; x is logarithmic, y runs from 0 to a round number above.

    x must be above 0. returns: the text of an SVG file.
    """
    points = [point for line in series.values() for point in line]
    low = min((x for x, _ in points), default=1.0)
    high = max((x for x, _ in points), default=10.0)
    top = _round_up(max((y for _, y in points), default=1.0))
    span = math.log10(high / low) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return (
            _LEFT + width * math.log10(x / low) / span,
            _TOP + height * (1 - y / top),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 24, title, size=15),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 14, x_label, anchor="middle"),
        _text(_LEFT, _TOP - 4, y_label),
    ]
    for step in range(6):
        y = top * step / 5
        x0, y0 = at(low, y)
        parts.append(
            f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y0:.1f}"'
            ' stroke="#ddd"/>'
        )
        parts.append(_text(x0 - 6, y0 + 4, f"{y:.2g}", anchor="end"))
    for x in sorted({x for x, _ in points}):
        x0, y0 = at(x, 0)
        parts.append(_text(x0, y0 + 18, _short(x), anchor="middle"))
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for x, y in line:
            x0, y0 = at(x, y)
            parts.append(f'<circle cx="{x0:.1f}" cy="{y0:.1f}" r="3" fill="{colour}"/>')
        parts.append(_text(_WIDTH - _RIGHT + 14, _TOP + 16 + 18 * number, name, colour=colour))
    return "\n".join((*parts, "</svg>\n"))


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{colour}">{escape(text)}</text>'
    )


def _round_up(value: float) -> float:
    """The next of 0.1, 0.2, ... 1 above a share; other values stay."""
    return math.ceil(value * 10) / 10 if 0 < value <= 1 else max(value, 1.0)


def _short(value: float) -> str:
    for limit, sign in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{sign}"
    return f"{value:g}"
