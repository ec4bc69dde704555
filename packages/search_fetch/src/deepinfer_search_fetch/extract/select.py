"""Which runs of a page are its content: a small tree ensemble over `features`, kept as data.

The weights (`model.json`, and `model_fast.json` for one voter) come from
`benches/train_extraction.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_search_fetch.extract.hints import in_comments
from deepinfer_search_fetch.extract.layout import Floats
from deepinfer_search_fetch.extract.repair import repair
from deepinfer_search_fetch.extract.tables import cells_of, is_data_table, rows_of
from deepinfer_search_fetch.extract.tree import Box, PageTree, Run
from deepinfer_search_fetch.models import PageType

Comments = Literal["auto", "always", "never"]

# Pages made of many parts: there the best expected F1 asks for more than each part's own odds; on
# prose the plain majority is better.
WIDE_TYPES: Final = frozenset({"collection", "documentation", "listing", "product", "service"})
# On hosts that the model has not seen its odds are nearer to even than it says: its log odds count
# so much. Chosen on the evaluation pages by cross-validation, 0.45 to 0.6 are as good.
_TRUST = 0.5
_TABLE_MAJORITY = 0.5
_ARTICLE_ODDS = 0.5
_FORUM_ODDS = 0.2
_COMMENTS_ARE_THE_PAGE = 0.5
LEAVES: Final = 16
_LOWEST_BIT = np.array([0, *((v & -v).bit_length() - 1 for v in range(1, 1 << LEAVES))], np.uint8)
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Model:
    """An ensemble of small trees over a run's features and its page's type odds.

    Of every tree the LEAVES - 1 inner nodes side by side, so that a page is evaluated by a few
    array operations: a node whose feature exceeds its threshold rules the leaves on its left out
    (their bits are set in `ruled_out`), and the leftmost leaf no node rules out is the answer.

    feature: int64 [LEAVES - 1, trees]; threshold: float32, same; ruled_out: uint16, same;
    value: float64 [trees · LEAVES].
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float32]
    ruled_out: NDArray[np.uint16]
    value: Floats
    bias: float
    classes: tuple[PageType, ...]
    page_mean: Floats
    page_scale: Floats
    page_weights: Floats
    page_bias: Floats

    def keep_probability(self, rows: Floats, type_odds: Floats) -> Floats:
        """rows: float64 [runs, features]; type_odds: as `page_type_odds` gives them; returns
        float64 [runs], the odds of being content."""
        x = np.concatenate([rows, np.tile(type_odds, (len(rows), 1))], axis=1, dtype=np.float32)
        trees = self.feature.shape[1]
        first = np.arange(0, trees * LEAVES, LEAVES)[:, None]
        score = np.empty(len(x))
        for start in range(0, len(x), _CHUNK):
            part = np.ascontiguousarray(x[start : start + _CHUNK].T)  # a feature is one stretch
            gone = np.zeros((trees, part.shape[1]), dtype=np.uint16)
            for feature, threshold, leaves in zip(
                self.feature, self.threshold, self.ruled_out, strict=True
            ):
                gone |= (part.take(feature, axis=0) > threshold[:, None]) * leaves[:, None]
            leaf = first + _LOWEST_BIT.take(~gone)
            score[start : start + _CHUNK] = self.value.take(leaf).sum(axis=0)
        return 1.0 / (1.0 + np.exp(-(score + self.bias)))

    def page_type_odds(self, row: Floats) -> Floats:
        """Probability of every one of `classes`."""
        z = self.page_weights @ ((row - self.page_mean) / self.page_scale) + self.page_bias
        odds = np.exp(z - z.max())
        return odds / odds.sum()

    def page_type(self, type_odds: Floats) -> PageType:
        return self.classes[int(np.argmax(type_odds))]


@lru_cache(maxsize=2)
def load_model(*, quick: bool = False) -> Model:
    """The weights that ship with the package; quick: those for the quick voter alone."""
    name = "model_fast.json" if quick else "model.json"
    text = (files("deepinfer_search_fetch.extract") / name).read_text("utf-8")
    return model_from_json(cast(dict[str, Any], json.loads(text)))


def model_from_json(data: dict[str, Any]) -> Model:
    """A model from the object `benches/train_extraction.py` writes."""
    trees, page = data["trees"], data["page_type"]
    return Model(
        feature=np.array(trees["feature"], dtype=np.int64).T.copy(),
        threshold=np.array(trees["threshold"], dtype=np.float32).T.copy(),
        ruled_out=(~np.array(trees["survivors"], dtype=np.uint16)).T.copy(),
        value=np.array(trees["value"], dtype=np.float64).ravel(),
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


def doubted(probability: Floats) -> Floats:
    """The odds as they are on pages of hosts that the model has not seen."""
    odds = np.clip(probability, 1e-9, 1 - 1e-9)
    return 1.0 / (1.0 + ((1 - odds) / odds) ** _TRUST)


def expected_quality(probability: Floats, weights: Floats, kept: NDArray[np.bool_]) -> float:
    """Expected word F1 of keeping `kept`, 0..1."""
    mass = probability * weights
    bottom = float(weights[kept].sum() + mass.sum())
    return float(2 * mass[kept].sum() / bottom) if bottom else 0.0


def decide(
    model: Model,
    page: PageTree,
    run_words: Sequence[list[str]],
    rows: Floats,
    page_row: Floats,
    comments: Comments = "auto",
) -> tuple[PageType, float]:
    """Mark the runs that are content; returns the page type and the expected word F1.

    rows, page_row: as `features.run_features` gives them for the same runs.
    comments: "auto" takes readers' comments for content on forum pages only.
    """
    odds = model.page_type_odds(page_row)
    page_type = model.page_type(odds)
    probability = model.keep_probability(rows, odds)
    if page_type in WIDE_TYPES:
        probability = doubted(probability)
    weights = np.array([len(w) for w in run_words], dtype=np.float64)
    kept = choose(probability, weights, page_type)
    below = in_comments(page.runs)
    if comments == "auto" and _comments_are_extra(model, odds, below, kept, weights):
        kept &= ~below
        probability = np.where(below, 0.0, probability)  # no repair brings them back
    kept = repair(page, kept, probability, weights)
    if comments != "auto":
        kept = kept | below if comments == "always" else kept & ~below
    apply(page, kept.tolist(), run_words)
    return page_type, expected_quality(probability, weights, kept)


def _comments_are_extra(
    model: Model,
    odds: Floats,
    below: NDArray[np.bool_],
    kept: NDArray[np.bool_],
    weights: Floats,
) -> bool:
    """Whether this is surely an article, and has something beside its comments. On any other page
    the model decides: posts of a thread are named comments and replies as well."""
    share = float(weights[below].sum()) / max(float(weights.sum()), 1.0)
    article, forum = (odds[model.classes.index(name)] for name in ("article", "forum"))
    sure = article > _ARTICLE_ODDS and forum < _FORUM_ODDS
    return sure and share < _COMMENTS_ARE_THE_PAGE and bool(kept[~below].any())


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
