"""Line charts as SVG without a plotting library, from the rows a simulation wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT, PAD = 640, 360, 56
COLOURS = ("#2c5f9e", "#c0392b", "#2e8b57", "#8e44ad")


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (x, y); dots only where `dots` is set (published values)."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def chart(lines: Sequence[Line], title: str, x_label: str, y_label: str) -> str:
    """One chart; axes span all series and zero."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [0.0, *(y for line in lines for _, y in line.points)]
    x0, x1 = min(xs), max(xs)
    y0, y1 = min(ys), max(ys)
    y1 = y1 if y1 > y0 else y0 + 1.0
    x1 = x1 if x1 > x0 else x0 + 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        px = PAD + (x - x0) / (x1 - x0) * (WIDTH - 2 * PAD)
        py = HEIGHT - PAD - (y - y0) / (y1 - y0) * (HEIGHT - 2 * PAD)
        return round(px, 1), round(py, 1)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{PAD}" y="22" font-weight="bold">{_escape(title)}</text>',
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 12}" text-anchor="middle">{_escape(x_label)}</text>',
        f'<text x="{PAD}" y="40" fill="#555">{_escape(y_label)}</text>',
    ]
    for i in range(6):
        y = y0 + (y1 - y0) * i / 5
        left, level = at(x0, y)
        out.append(
            f'<line x1="{left}" x2="{WIDTH - PAD}" y1="{level}" y2="{level}" stroke="#ddd"/>'
            f'<text x="{PAD - 6}" y="{level + 4}" text-anchor="end">{y:.1f}</text>'
        )
    zero = at(x0, 0.0)[1]
    out.append(f'<line x1="{PAD}" x2="{WIDTH - PAD}" y1="{zero}" y2="{zero}" stroke="#333"/>')
    below = HEIGHT - PAD + 16
    out += [
        f'<text x="{at(x, y0)[0]}" y="{below}" text-anchor="middle">{x:g}</text>'
        for x in sorted(set(xs))
    ]
    for i, line in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        points = [at(x, y) for x, y in line.points]
        if line.dots:
            out += [f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>' for x, y in points]
        else:
            path = " ".join(f"{x},{y}" for x, y in points)
            out.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        out.append(
            f'<text x="{WIDTH - PAD}" y="{52 + 16 * i}" text-anchor="end" fill="{colour}">'
            f"{_escape(line.name)}</text>"
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
