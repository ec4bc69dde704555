"""Line charts of what a simulation wrote, drawn with matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deepinfer_dspark.errors import ShapeError

FORMATS: Final = (".svg", ".png", ".pdf")
COLOURS: Final = ("#2c5f9e", "#c0392b", "#2e8b57", "#8e44ad")


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of (x, y); dots only where `dots` is set (published values)."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def draw_lines(path: Path, lines: Sequence[Line], title: str, x_label: str, y_label: str) -> None:
    """One chart, its format by the ending of the file. The batch sizes stand on a scale of powers
    of two, since they are chosen so; the same lines give the same file."""
    if path.suffix not in FORMATS:
        raise ShapeError(f"the picture wants to end in {', '.join(FORMATS)}, got {path.name!r}")
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        from matplotlib.ticker import (  # pyright: ignore[reportMissingImports]
            NullLocator,
            ScalarFormatter,
        )
    except ImportError as e:
        raise ImportError("drawing needs matplotlib: pip install './packages/dspark[plot]'") from e
    with mpl.rc_context({"svg.hashsalt": "deepinfer-dspark"}):
        figure: Any = Figure(figsize=(7.0, 4.2), layout="constrained")
        axis: Any = figure.subplots()
        for line, colour in zip(lines, COLOURS, strict=False):
            xs, ys = zip(*line.points, strict=True)
            style = {"marker": "o", "linestyle": "" if line.dots else "-", "markersize": 4}
            axis.plot(xs, ys, label=line.name, color=colour, **style | {"gid": line.name})
        axis.axhline(0.0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(axis="y", color="#dddddd")
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(lines), frameon=False)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
