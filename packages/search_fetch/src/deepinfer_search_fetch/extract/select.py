"""Which runs of a page are its content: a small tree ensemble over `features`, kept as data.

The weights (`model.json`) come from `benches/train_extraction.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.extract.tables import cells_of, is_data_table, rows_of
from deepinfer_search_fetch.extract.tree import Box, PageTree, Run
from deepinfer_search_fetch.models import PageType

Floats = NDArray[np.float64]

# Pages made of many small parts: there the best expected F1 asks for more than each part's own
# odds; on prose the plain majority is better.
WIDE_TYPES: Final = frozenset({"collection", "listing", "service"})
_TABLE_MAJORITY = 0.5


@dataclass(frozen=True, slots=True)
class Model:
    """Trees as flat arrays: node i goes left if x[feature[i]] <= threshold[i]; leaves have
    feature -1 and add `value` to the score."""

    feature: NDArray[np.int64]
    threshold: Floats
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: Floats
    roots: NDArray[np.int64]
    depth: int
    bias: float
    classes: tuple[PageType, ...]
    page_mean: Floats
    page_scale: Floats
    page_weights: Floats
    page_bias: Floats

    def keep_probability(self, rows: Floats) -> Floats:
        """rows: float64 [runs, features]; returns float64 [runs], the odds of being content."""
        position = np.tile(self.roots, (len(rows), 1))
        index = np.arange(len(rows))[:, None]
        for _ in range(self.depth):
            feature = self.feature[position]
            goes_left = rows[index, feature] <= self.threshold[position]
            following = np.where(goes_left, self.left[position], self.right[position])
            position = np.where(feature < 0, position, following)
        score = self.bias + self.value[position].sum(axis=1)
        return 1.0 / (1.0 + np.exp(-score))

    def page_type(self, row: Floats) -> tuple[PageType, float]:
        """The likeliest page type and its probability."""
        z = self.page_weights @ ((row - self.page_mean) / self.page_scale) + self.page_bias
        odds = np.exp(z - z.max())
        best = int(np.argmax(odds))
        return self.classes[best], float(odds[best] / odds.sum())


@lru_cache(maxsize=1)
def load_model() -> Model:
    """The weights that ship with the package."""
    text = (files("deepinfer_search_fetch.extract") / "model.json").read_text("utf-8")
    return model_from_json(cast(dict[str, Any], json.loads(text)))


def model_from_json(data: dict[str, Any]) -> Model:
    """A model from the object `benches/train_extraction.py` writes."""
    trees, page = data["trees"], data["page_type"]
    return Model(
        feature=np.array(trees["feature"], dtype=np.int64),
        threshold=np.array(trees["threshold"], dtype=np.float64),
        left=np.array(trees["left"], dtype=np.int64),
        right=np.array(trees["right"], dtype=np.int64),
        value=np.array(trees["value"], dtype=np.float64),
        roots=np.array(trees["roots"], dtype=np.int64),
        depth=int(trees["depth"]),
        bias=float(trees["bias"]),
        classes=tuple(page["classes"]),
        page_mean=np.array(page["mean"], dtype=np.float64),
        page_scale=np.array(page["scale"], dtype=np.float64),
        page_weights=np.array(page["weights"], dtype=np.float64),
        page_bias=np.array(page["bias"], dtype=np.float64),
    )


def choose(probability: Floats, weights: Floats, page_type: PageType) -> NDArray[np.bool_]:
    """Which runs to keep.

    probability: float64 [runs]; weights: words per run. For WIDE_TYPES the set with the largest
    expected F1, 2·Σp·w(kept) / (Σw(kept) + Σp·w(all)), which is a prefix of the runs by odds.
    """
    if page_type not in WIDE_TYPES:
        kept = probability > 0.5
        if kept.any():
            return kept
    order = np.argsort(-probability, kind="stable")
    gained = np.cumsum((probability * weights)[order])
    spent = np.cumsum(weights[order])
    expected = 2 * gained / (spent + gained[-1] + 1e-9)
    cut = probability[order[int(np.argmax(expected))]]
    return probability >= cut


def expected_quality(probability: Floats, weights: Floats, kept: NDArray[np.bool_]) -> float:
    """Expected word F1 of keeping `kept`, 0..1."""
    mass = probability * weights
    bottom = float(weights[kept].sum() + mass.sum())
    return float(2 * mass[kept].sum() / bottom) if bottom else 0.0


def apply(page: PageTree, kept: Sequence[bool], run_words: Sequence[list[str]]) -> None:
    """Write the decision into the runs; a data table is kept or dropped as a whole."""
    for run, keep in zip(page.runs, kept, strict=True):
        run.kept = bool(keep)
    sizes = {run: len(w) for run, w in zip(page.runs, run_words, strict=True)}
    for table in _tables(page.root):
        runs = [
            run for row in rows_of(table) for cell in cells_of(row) for run in _runs_below(cell)
        ]
        total = sum(sizes[run] for run in runs)
        share = sum(sizes[run] for run in runs if run.kept) / total if total else 0.0
        for run in runs:
            run.kept = share >= _TABLE_MAJORITY


def _tables(root: Box) -> list[Box]:
    found: list[Box] = []
    stack = [root]
    while stack:
        box = stack.pop()
        if box.tag == "table" and is_data_table(box):
            found.append(box)
        else:
            stack += [c for c in box.children if isinstance(c, Box)]
    return found


def _runs_below(box: Box) -> list[Run]:
    found: list[Run] = []
    stack: list[Box | Run] = [box]
    while stack:
        current = stack.pop()
        if isinstance(current, Run):
            found.append(current)
        else:
            stack += current.children
    return found
