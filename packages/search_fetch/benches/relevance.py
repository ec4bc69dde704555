"""Search quality on judged collections, and a gate: fails below the floors stored beside it.

    python benches/relevance.py FOLDER_OF_COLLECTIONS

A collection is a folder with corpus.jsonl.gz, queries.dev.jsonl.gz and qrels.dev.tsv. Prints
nDCG@10 of plain BM25, of retrieval (with feedback expansion), of retrieval re-ranked by vectors
learned from the collection itself, and of whole searches as a caller sees them; recall@100; the
expected calibration error (10 bins); and the highest relevance that random letters got.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from search_corpus import Collection, build_index, ndcg10, read_collection

from deepinfer_search_fetch import SearchRequest
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search import relevance
from deepinfer_search_fetch.search.dense import StaticTable, rerank
from deepinfer_search_fetch.search.engine import search
from deepinfer_search_fetch.search.query import parse_query
from deepinfer_search_fetch.search.retrieve import Filters, inverse_frequencies, retrieve

FLOORS = Path(__file__).with_name("relevance_floors.json")
DEPTH = 50


def measure(collection: Collection, backend: TantivyBackend) -> dict[str, float]:
    table = StaticTable.learn([f"{d['title']} {d['text']}" for d in collection.documents])
    graded = max(g for judged in collection.judgements.values() for g in judged.values()) > 1
    scores: dict[str, list[float]] = {
        name: [] for name in ("bm25", "retrieval", "dense", "search", "recall@100")
    }
    pairs: list[tuple[float, bool]] = []
    for query_id, text in collection.queries:
        judged = {d: g for d, g in collection.judgements.get(query_id, {}).items() if g > 0}
        if not judged:
            continue
        parsed = parse_query(text)
        hits = retrieve(backend, parsed, Filters(), expand=None)
        ids = [h.page.url.removeprefix("doc:") for h in hits]
        plain = retrieve(backend, parsed, Filters(), expand=False)
        found = search(
            backend, SearchRequest(query=text[:512], content="none"), clock=lambda: 1.79e9
        )
        orders = {
            "bm25": [h.page.url.removeprefix("doc:") for h in plain],
            "retrieval": ids,
            "dense": [h.page.url.removeprefix("doc:") for h in rerank(text, hits, table)],
            "search": [r.url.removeprefix("doc:") for r in found.results],
        }
        for name, order in orders.items():
            scores[name].append(ndcg10(order, judged))
        scores["recall@100"].append(len(set(ids[:100]) & set(judged)) / len(judged))
        idf = inverse_frequencies(backend, parsed.terms)
        calibration = relevance.load_calibration()
        for hit, document in zip(hits[:DEPTH], ids, strict=False):
            row = relevance.features(hit.page, hit.score, hits[0].score, parsed.terms, idf)
            pairs.append(
                (calibration.relevance(row), judged.get(document, 0) >= (2 if graded else 1))
            )
    out = {name: float(np.mean(values)) for name, values in scores.items()}
    return {**out, "calibration error": calibration_error(pairs)}


def calibration_error(pairs: list[tuple[float, bool]]) -> float:
    probability = np.array([p for p, _ in pairs])
    labels = np.array([y for _, y in pairs])
    bins = np.minimum((probability * 10).astype(int), 9)
    return float(
        sum(
            abs(probability[bins == b].mean() - labels[bins == b].mean()) * (bins == b).mean()
            for b in range(10)
            if (bins == b).any()
        )
    )


def nonsense(backend: TantivyBackend) -> float:
    """The highest relevance of any result for 200 queries of random letters."""
    rng = random.Random(5)
    worst = 0.0
    for _ in range(200):
        words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(3)]
        for result in search(backend, SearchRequest(query=" ".join(words))).results:
            worst = max(worst, result.relevance)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        print(f"skipped: the collections are not here ({arguments.folder})")
        return
    floors = json.loads(FLOORS.read_text())
    failures: list[str] = []

    def check(name: str, value: float, bound: float, *, at_least: bool) -> None:
        if value < bound if at_least else value > bound:
            failures.append(f"{name} {value:.4f}, bound {bound}")

    for folder in sorted(p for p in arguments.folder.iterdir() if p.is_dir()):
        collection = read_collection(folder)
        backend = build_index(collection)
        measured = measure(collection, backend)
        measured["random letters"] = nonsense(backend)
        print(folder.name, ", ".join(f"{name} {value:.4f}" for name, value in measured.items()))
        for name, floor in floors.get(folder.name, {}).items():
            check(f"{folder.name} {name}", measured[name], floor, at_least=True)
        bound = floors["calibration_error"]
        check(f"{folder.name} calibration", measured["calibration error"], bound, at_least=False)
        bound = floors["nonsense_relevance"]
        check(f"{folder.name} random letters", measured["random letters"], bound, at_least=False)
    if failures:
        sys.exit("below the stored floors: " + "; ".join(failures))


if __name__ == "__main__":
    main()
