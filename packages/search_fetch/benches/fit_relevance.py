"""Fit the calibration of `search.relevance` on judged collections and write `calibration.json`.

    python benches/fit_relevance.py CORPUS_FOLDER...

A folder holds corpus.jsonl.gz {id,title,text}, queries.dev.jsonl.gz {id,text}, qrels.dev.tsv.
Needs the `train` extra. Prints nDCG@10 and recall@100 of retrieval, nDCG@10 of the final order, and
the expected calibration error (10 bins) on queries left out of the fit.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from search_corpus import build_index, ndcg10, read_collection
from sklearn.linear_model import LogisticRegression

from deepinfer_search_fetch.analyzers import ANALYZER_VERSION
from deepinfer_search_fetch.search import relevance
from deepinfer_search_fetch.search.query import parse_query
from deepinfer_search_fetch.search.retrieve import Filters, inverse_frequencies, retrieve

DEPTH = 50
FILE = Path(relevance.__file__).with_name("calibration.json")
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def pairs(folder: Path) -> list[tuple[str, np.ndarray, np.ndarray, list[str], dict[str, int]]]:
    collection = read_collection(folder)
    backend = build_index(collection)
    graded = max(g for judged in collection.judgements.values() for g in judged.values()) > 1
    out = []
    for query_id, text in collection.queries:
        judged = {d: g for d, g in collection.judgements.get(query_id, {}).items() if g > 0}
        if not judged:
            continue
        parsed = parse_query(text)
        hits = retrieve(backend, parsed, Filters(), expand=None)
        idf = inverse_frequencies(backend, parsed.terms)
        best = hits[0].score if hits else 0.0
        rows = [relevance.features(h.page, h.score, best, parsed.terms, idf) for h in hits[:DEPTH]]
        ids = [h.page.url.removeprefix("doc:") for h in hits]
        labels = [judged.get(d, 0) >= (2 if graded else 1) for d in ids[:DEPTH]]
        out.append((query_id, np.array(rows), np.array(labels), ids, judged))
    return out


def fit(data: list) -> LogisticRegression:
    x = np.vstack([rows for _, rows, *_ in data])
    y = np.concatenate([labels for _, _, labels, *_ in data])
    weight = np.concatenate([np.full(len(r), 1.0 / len(r)) for _, r, *_ in data])
    return LogisticRegression(C=1.0, max_iter=1000).fit(
        x, y, sample_weight=weight * len(y) / weight.sum()
    )


def calibration_error(probability: np.ndarray, labels: np.ndarray) -> float:
    bins = np.minimum((probability * 10).astype(int), 9)
    return sum(
        abs(probability[bins == b].mean() - labels[bins == b].mean()) * (bins == b).mean()
        for b in range(10)
        if (bins == b).any()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    arguments = parser.parse_args()
    everything: list = []
    for folder in arguments.folders:
        data = pairs(folder)
        recall = np.mean([len(set(ids[:100]) & set(j)) / len(j) for *_, ids, j in data])
        print(
            folder.name,
            "retrieval nDCG@10",
            round(np.mean([ndcg10(ids, j) for *_, ids, j in data]), 4),
            "recall@100",
            round(float(recall), 4),
        )
        # Collections weigh the same, however many queries they have.
        random.Random(0).shuffle(data)
        everything.append(data[:113])
    held = [d for data in everything for d in data[::2]]
    used = [d for data in everything for d in data[1::2]]
    trial = fit(used)
    p = trial.predict_proba(np.vstack([r for _, r, *_ in held]))[:, 1]
    y = np.concatenate([labels for _, _, labels, *_ in held])
    print("calibration error on left-out queries", round(calibration_error(p, y), 4))
    for folder, data in zip(arguments.folders, everything, strict=True):
        final = []
        for _, rows, _, ids, judged in data:
            order = np.argsort(-trial.predict_proba(rows)[:, 1], kind="stable")
            final.append(ndcg10([ids[i] for i in order], judged))
        print(folder.name, "nDCG@10 ordered by relevance", round(np.mean(final), 4))
    model = fit([d for data in everything for d in data])
    FILE.write_text(
        json.dumps(
            {
                "analyzer": ANALYZER_VERSION,
                "features": relevance.FEATURES,
                "bias": round(float(model.intercept_[0]), 4),
                "weights": [round(float(w), 4) for w in model.coef_[0]],
            },
            indent=1,
        )
        + "\n"
    )
    print(FILE.read_text())


if __name__ == "__main__":
    main()
