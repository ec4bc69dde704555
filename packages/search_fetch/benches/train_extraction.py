"""Fit the keep/drop and page-type models and write `extract/model.json`.

    python benches/train_extraction.py CORPUS_FOLDER [--cross-validate]

Needs the `train` extra. With --cross-validate it first prints the scores on hosts that were not
trained on (5 folds by host), which is the figure to believe.
"""

from __future__ import annotations

import argparse
import difflib
import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from extraction_corpus import Sample, read_corpus, score
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

from deepinfer_search_fetch.extract import candidates, select
from deepinfer_search_fetch.extract.dom import parse_html
from deepinfer_search_fetch.extract.features import run_features
from deepinfer_search_fetch.extract.hidden import remove_invisible, strip_invisible_characters
from deepinfer_search_fetch.extract.metadata import read_metadata
from deepinfer_search_fetch.extract.normalise import normalise
from deepinfer_search_fetch.extract.tree import build_tree, words
from deepinfer_search_fetch.net.charset import decode_text

MODEL_FILE = Path(candidates.__file__).with_name("model.json")
FOLDS = 5


@dataclass
class Page:
    sample: Sample
    rows: np.ndarray
    page_row: np.ndarray
    labels: np.ndarray  # share of a run's words that are content; nan where unknown
    sizes: np.ndarray
    texts: list[str]


def read_page(sample: Sample) -> Page | None:
    text = strip_invisible_characters(decode_text(sample.page)[0])
    tree, _ = parse_html(text)
    if tree is None:
        return None
    normalise(tree)
    original = deepcopy(tree)
    remove_invisible(tree)
    page = build_tree(tree)
    if not page.runs:
        return None
    run_words = candidates.runs_words(page.runs)
    vote_a = candidates.votes(run_words, candidates.trafilatura_text(original, fast=False))
    vote_b = candidates.votes(run_words, candidates.resiliparse_text(text))
    meta = read_metadata(original, None, "")
    rows, page_row = run_features(
        page, run_words, vote_a, vote_b, meta.title or "", meta.type_flags
    )
    texts = [r.text for r in page.runs]
    if sample.gold:
        labels = label_by_text(run_words, sample.gold)
    else:
        labels = label_by_segments(texts, sample.wanted, sample.unwanted)
    sizes = np.array([len(w) for w in run_words], dtype=float)
    return Page(sample, np.array(rows), np.array(page_row), labels, sizes, texts)


def label_by_text(run_words: list[list[str]], gold: str) -> np.ndarray:
    """How much of each run the reference text holds, by an alignment of the word sequences."""
    gold_words = words(gold)
    page_words = [w for run in run_words for w in run]
    owner = [i for i, run in enumerate(run_words) for _ in run]
    hits = np.zeros(len(run_words))
    small = len(page_words) * len(gold_words) < 3e7
    matcher = difflib.SequenceMatcher(None, page_words, gold_words, autojunk=not small)
    for block in matcher.get_matching_blocks():
        for k in range(block.a, block.a + block.size):
            hits[owner[k]] += 1.0 if block.size >= 2 else 0.5
    joined = " " + " ".join(gold_words) + " "
    shares = []
    for run, hit in zip(run_words, hits, strict=True):
        whole = len(run) >= 5 and f" {' '.join(run)} " in joined
        shares.append(1.0 if whole else min(1.0, hit / max(1, len(run))))
    return np.array(shares)


def label_by_segments(texts: list[str], wanted: list[str], unwanted: list[str]) -> np.ndarray:
    def touches(text: str, segments: list[str]) -> bool:
        return any(s in text or (len(text) > 25 and text in s) for s in segments)

    good = [" ".join(s.split()) for s in wanted]
    bad = [" ".join(s.split()) for s in unwanted]
    return np.array(
        [1.0 if touches(t, good) else 0.0 if touches(t, bad) else np.nan for t in texts]
    )


def fit(pages: list[Page], seed: int) -> dict:
    """Both models as the JSON object that `select.model_from_json` reads."""
    blocks, labels, weights = [], [], []
    for page in pages:
        known = ~np.isnan(page.labels)
        weight = np.where(known, page.sizes**0.8 + 1, 0.0)
        if weight.sum() > 0:
            blocks.append(page.rows)
            labels.append(np.nan_to_num(page.labels))
            weights.append(weight / weight.sum())  # every page counts the same
    x, y, w = np.vstack(blocks), np.concatenate(labels), np.concatenate(weights)
    x2, y2, w2 = (
        np.vstack([x, x]),
        np.r_[np.ones(len(y)), np.zeros(len(y))],
        np.r_[w * y, w * (1 - y)],
    )
    used = w2 > 0
    trees = HistGradientBoostingClassifier(
        max_iter=150,
        learning_rate=0.06,
        max_leaf_nodes=15,
        min_samples_leaf=40,
        l2_regularization=5.0,
        random_state=seed,
    ).fit(x2[used], y2[used], sample_weight=w2[used] / w2[used].mean())
    typed = [p for p in pages if p.sample.page_type != "mixed"]
    rows = np.array([p.page_row for p in typed])
    mean, scale = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    types = LogisticRegression(C=0.1, max_iter=2000).fit(
        (rows - mean) / scale, [p.sample.page_type for p in typed]
    )
    return {
        "format": 1,
        "trees": flatten(trees),
        "page_type": {
            "classes": types.classes_.tolist(),
            "mean": rounded(mean),
            "scale": rounded(scale),
            "weights": [rounded(row) for row in types.coef_],
            "bias": rounded(types.intercept_),
        },
    }


def flatten(model: HistGradientBoostingClassifier) -> dict:
    out: dict[str, list] = {
        k: [] for k in ("feature", "threshold", "left", "right", "value", "roots")
    }
    depth = 0
    for (tree,) in model._predictors:
        base = len(out["feature"])
        out["roots"].append(base)
        for node in tree.nodes:
            leaf = bool(node["is_leaf"])
            depth = max(depth, int(node["depth"]))
            out["feature"].append(-1 if leaf else int(node["feature_idx"]))
            out["threshold"].append(0 if leaf else float(f"{node['num_threshold']:.7g}"))
            out["left"].append(base + (0 if leaf else int(node["left"])))
            out["right"].append(base + (0 if leaf else int(node["right"])))
            out["value"].append(float(f"{node['value']:.5g}") if leaf else 0)
    return {**out, "depth": depth, "bias": float(np.ravel(model._baseline_prediction)[0])}


def rounded(values: np.ndarray) -> list[float]:
    return [float(f"{v:.6g}") for v in values]


def choose_texts(model: select.Model, pages: list[Page]) -> dict[str, str]:
    texts = {}
    for page in pages:
        page_type, _ = model.page_type(page.page_row)
        kept = select.choose(model.keep_probability(page.rows), page.sizes, page_type)
        texts[page.sample.id] = "\n".join(t for t, k in zip(page.texts, kept, strict=True) if k)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    samples = list(read_corpus(arguments.corpus))
    pages = [p for p in map(read_page, samples) if p is not None]
    if arguments.cross_validate:
        texts = {s.id: "" for s in samples}
        hosts = [urlsplit(p.sample.url).hostname or p.sample.id for p in pages]
        split = GroupKFold(FOLDS, shuffle=True, random_state=arguments.seed)
        for train, test in split.split(pages, groups=hosts):
            model = select.model_from_json(fit([pages[i] for i in train], arguments.seed))
            texts |= choose_texts(model, [pages[i] for i in test])
        print("cross-validated:", {k: round(v, 4) for k, v in score(samples, texts).items()})
    data = fit(pages, arguments.seed)
    MODEL_FILE.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    texts = {s.id: "" for s in samples} | choose_texts(select.model_from_json(data), pages)
    print("on the training pages:", {k: round(v, 4) for k, v in score(samples, texts).items()})
    print(f"wrote {MODEL_FILE} ({MODEL_FILE.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
