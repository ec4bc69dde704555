"""Fit the models of page types and of content: `extract/model.json`, and `extract/model_fast.json`
for the mode that asks one voter only.

    python benches/train_extraction.py CORPUS_FOLDER [--cross-validate] [--no-write]

Needs the `train` extra. With --cross-validate it first prints the scores of the whole pipeline, the
Markdown writer included, on hosts that were not trained on (5 folds by host, three divisions into
folds): the figure to believe.
"""

from __future__ import annotations

import argparse
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import lightgbm
import numpy as np
from extraction_corpus import Sample, read_corpus, score
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold

from deepinfer_search_fetch.extract import candidates, select
from deepinfer_search_fetch.extract.html import HtmlOptions, Prepared, prepare, run_inputs
from deepinfer_search_fetch.extract.inline import WriterOptions
from deepinfer_search_fetch.extract.markdown import write_markdown
from deepinfer_search_fetch.extract.present import to_text
from deepinfer_search_fetch.extract.tree import words
from deepinfer_search_fetch.net.charset import decode_text

FOLDER = Path(candidates.__file__).parent
FILES = {"article": FOLDER / "model.json", "fast": FOLDER / "model_fast.json"}
BAGS = {"article": 3, "fast": 1}
FOLDS = 5
DIVISIONS = 3
TREES = 120  # a bag
RUNS_A_PAGE = 160  # more add time, not information: a page's runs are much alike


@dataclass
class Page:
    sample: Sample
    mode: str
    prepared: Prepared
    run_words: list[list[str]]
    rows: np.ndarray
    page_row: np.ndarray
    labels: np.ndarray  # share of a run's words that are content; nan where unknown
    sizes: np.ndarray


def read_page(sample: Sample, mode: str = "article") -> Page | None:
    prepared = prepare(decode_text(sample.page)[0], None, HtmlOptions())
    if prepared is None or not prepared.page.runs:
        return None
    run_words = candidates.runs_words(prepared.page.runs)
    rows, page_row = run_inputs(prepared, run_words, quick=mode == "fast")
    if sample.gold:
        labels = label_by_text(run_words, sample.gold)
    else:
        texts = [r.text for r in prepared.page.runs]
        labels = label_by_segments(texts, sample.wanted, sample.unwanted)
    sizes = np.array([len(w) for w in run_words], dtype=float)
    return Page(sample, mode, prepared, run_words, rows, page_row, labels, sizes)


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
    types = fit_types(pages)
    model = select.model_from_json({"trees": EMPTY_TREES, "page_type": types})
    odds = {id(p): model.page_type_odds(p.page_row) for p in pages}
    # What the run model learns from must not know the page's own label.
    for train, rest in grouped(pages, FOLDS, seed + 100):
        other = {"trees": EMPTY_TREES, "page_type": fit_types([pages[i] for i in train])}
        unseen = select.model_from_json(other)
        odds |= {id(pages[i]): unseen.page_type_odds(pages[i].page_row) for i in rest}
    rng = np.random.default_rng(seed)
    x, y, w = training_rows(pages, odds, rng)
    parameters = {
        "objective": "cross_entropy",
        "learning_rate": 0.08,
        "num_leaves": 15,
        "min_data_in_leaf": 30,
        "lambda_l2": 5.0,
        "feature_fraction_bynode": 0.35,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "max_bin": 63,
        "num_threads": 1,
        "deterministic": True,
        "verbose": -1,
    }
    data = lightgbm.Dataset(x, label=y, weight=w / w.mean(), params=parameters)
    bags = [
        lightgbm.train({**parameters, "seed": seed * 10 + b}, data, TREES)
        for b in range(BAGS[pages[0].mode])
    ]
    return {"format": 2, "trees": flatten(bags), "page_type": types}


def training_rows(
    pages: list[Page], odds: dict[int, np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every page counts the same; of long ones a sample, heavy runs first."""
    blocks, labels, weights = [], [], []
    for page in pages:
        known = ~np.isnan(page.labels)
        weight = np.where(known, page.sizes**0.8 + 1, 0.0)
        if weight.sum() <= 0:
            continue
        weight /= weight.sum()
        at = np.flatnonzero(weight)
        chance = np.ones(len(at))
        if len(at) > RUNS_A_PAGE:
            chance = np.minimum(1, weight[at] * RUNS_A_PAGE + RUNS_A_PAGE / len(at) / 2)
        taken = rng.random(len(at)) < chance
        kept = weight[at][taken] / chance[taken]
        rows = page.rows[at[taken]]
        blocks.append(np.hstack([rows, np.tile(odds[id(page)], (len(rows), 1))]))
        labels.append(page.labels[at[taken]])
        weights.append(kept / kept.sum())
    return np.vstack(blocks), np.concatenate(labels), np.concatenate(weights)


def fit_types(pages: list[Page]) -> dict:
    typed = [p for p in pages if p.sample.page_type != "mixed"]
    rows = np.array([p.page_row for p in typed])
    mean, scale = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    types = LogisticRegression(C=0.1, max_iter=2000).fit(
        (rows - mean) / scale, [p.sample.page_type for p in typed]
    )
    return {
        "classes": types.classes_.tolist(),
        "mean": rounded(mean),
        "scale": rounded(scale),
        "weights": [rounded(row) for row in types.coef_],
        "bias": rounded(types.intercept_),
    }


EMPTY_TREES: dict = {"feature": [], "threshold": [], "survivors": [], "value": [], "bias": 0}


def flatten(bags: list[lightgbm.Booster]) -> dict:
    """The mean of the bags as `select.Model` holds it."""
    out: dict[str, list] = {k: [] for k in ("feature", "threshold", "survivors", "value")}
    for bag in bags:
        for tree in bag.dump_model()["tree_info"]:
            nodes: list[tuple[int, float, int]] = []
            leaves: list[float] = []
            walk(tree["tree_structure"], nodes, leaves)
            nodes += [(0, 1e30, 0xFFFF)] * (select.LEAVES - 1 - len(nodes))
            leaves += [0.0] * (select.LEAVES - len(leaves))
            out["feature"].append([n[0] for n in nodes])
            out["threshold"].append([n[1] for n in nodes])
            out["survivors"].append([n[2] for n in nodes])
            out["value"].append([float(f"{v / len(bags):.4g}") for v in leaves])
    return {**out, "bias": 0.0}


def walk(node: dict, nodes: list[tuple[int, float, int]], leaves: list[float]) -> None:
    if "split_feature" not in node:
        leaves.append(node["leaf_value"])
        return
    first = len(leaves)
    place = len(nodes)
    nodes.append((0, 0.0, 0))
    walk(node["left_child"], nodes, leaves)
    lost = sum(1 << leaf for leaf in range(first, len(leaves)))
    nodes[place] = (node["split_feature"], float(f"{node['threshold']:.7g}"), 0xFFFF & ~lost)
    walk(node["right_child"], nodes, leaves)


def rounded(values: np.ndarray) -> list[float]:
    return [float(f"{v:.6g}") for v in values]


def write_texts(model: select.Model, pages: list[Page]) -> dict[str, str]:
    """Text of the Markdown of every page, as the pipeline would print it with this model."""
    texts = {}
    for page in pages:
        select.decide(model, page.prepared.page, page.run_words, page.rows, page.page_row)
        texts[page.sample.id] = to_text(write_markdown(page.prepared.page, WriterOptions()))
    return texts


def grouped(pages: list[Page], folds: int, seed: int):
    hosts = [urlsplit(p.sample.url).hostname or p.sample.id for p in pages]
    return GroupKFold(folds, shuffle=True, random_state=seed).split(pages, groups=hosts)


def cross_validate(samples: list[Sample], pages: list[Page]) -> dict[str, list[float]]:
    """Every figure of `score`, once per division into folds."""
    results: dict[str, list[float]] = {}
    for seed in range(DIVISIONS):
        texts = {s.id: "" for s in samples}
        for train, test in grouped(pages, FOLDS, seed):
            model = select.model_from_json(fit([pages[i] for i in train], seed))
            texts |= write_texts(model, [pages[i] for i in test])
        for name, value in score(samples, texts).items():
            results.setdefault(name, []).append(value)
    return results


def read_pages(samples: list[Sample], mode: str) -> list[Page]:
    return [p for sample in samples if (p := read_page(sample, mode)) is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--cross-validate", action="store_true")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    samples = list(read_corpus(arguments.corpus))
    for mode, file in FILES.items():
        pages = read_pages(samples, mode)
        if arguments.cross_validate:
            print(f"{mode}, cross-validated by host, {DIVISIONS} divisions: mean (lowest, highest)")
            for name, values in cross_validate(samples, pages).items():
                mean = sum(values) / len(values)
                print(f"  {name:24} {mean:.4f} ({min(values):.4f}, {max(values):.4f})")
        if arguments.no_write:
            continue
        data = fit(pages, arguments.seed)
        file.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
        texts = {s.id: "" for s in samples} | write_texts(select.model_from_json(data), pages)
        figures = {k: round(v, 4) for k, v in score(samples, texts).items()}
        print(f"{mode}, on the training pages:", figures)
        print(f"wrote {file} ({file.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
