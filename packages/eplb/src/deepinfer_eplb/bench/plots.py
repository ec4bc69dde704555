"""Pictures, drawn with matplotlib (extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import ShapeError

FORMATS: Final = (".svg", ".png", ".pdf")
USUAL, BUSIEST = "#4a78b0", "#c0392b"


def draw_loads(
    path: str | os.PathLike[str],
    panels: Sequence[tuple[str, npt.NDArray[Any]]],
    caption: str,
) -> None:
    """Bars of rank loads, one panel below the other on one scale; format by the file's ending.

    panels: (title, float [G] load of each rank over the mean rank's).
    """
    target = Path(path)
    if target.suffix not in FORMATS:
        raise ShapeError(f"the picture wants to end in {', '.join(FORMATS)}, got {target.name!r}")
    try:
        import matplotlib as mpl  # pyright: ignore[reportMissingImports]
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        from matplotlib.ticker import MaxNLocator  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise ImportError("drawing needs matplotlib: pip install './packages/eplb[plot]'") from e
    # the same input gives the same file
    with mpl.rc_context({"svg.hashsalt": "deepinfer-eplb"}):
        figure: Any = Figure(figsize=(9.0, 2.4 * len(panels) + 0.6), layout="constrained")
        axes: Any = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        mean: Any = None
        for axis, (title, loads) in zip(axes, panels, strict=True):
            busiest = int(np.argmax(loads))
            colours = [BUSIEST if g == busiest else USUAL for g in range(loads.size)]
            axis.bar(np.arange(loads.size), loads, width=0.85, color=colours)
            mean = axis.axhline(1.0, color="black", linewidth=1.0, linestyle="--")
            axis.set_title(title, loc="left", fontsize=11)
            axis.set_ylabel("load / mean")
            axis.margins(x=0.01)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1].set_xlabel("rank")
        bars = [axes[0].patches[int(np.argmax(panels[0][1]))]]
        figure.legend(
            [mean, *bars], ["mean rank", "busiest rank"], loc="outside upper right", ncols=2,
            frameon=False,
        )  # fmt: skip
        figure.supxlabel(caption, fontsize=9, color="#444444")
        figure.savefig(
            target, dpi=120, metadata={"Date": None} if target.suffix == ".svg" else None
        )
