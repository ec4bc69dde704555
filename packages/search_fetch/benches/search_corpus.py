"""Reads a judged search collection and scores rankings against it."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path

from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend


@dataclass(frozen=True)
class Collection:
    documents: list[dict[str, str]]
    queries: list[tuple[str, str]]
    judgements: dict[str, dict[str, int]]


def read_collection(folder: Path) -> Collection:
    def rows(name: str) -> list[dict[str, str]]:
        with gzip.open(folder / name, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]

    judgements: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels.dev.tsv").read_text("utf-8").splitlines():
        query, _, document, grade = line.split("\t")
        judgements.setdefault(query, {})[document] = int(grade)
    queries = [(q["id"], q["text"]) for q in rows("queries.dev.jsonl.gz")]
    return Collection(rows("corpus.jsonl.gz"), queries, judgements)


def build_index(collection: Collection) -> TantivyBackend:
    backend = TantivyBackend(None)
    backend.index(
        IndexedPage("doc:" + d["id"], d["title"], d["text"], "2026-01-01")
        for d in collection.documents
    )
    backend.commit()
    return backend


def ndcg10(ranked: list[str], judged: dict[str, int]) -> float:
    """Gain 2^g - 1, discount log2(rank + 1)."""
    gain = sum((2 ** judged.get(d, 0) - 1) / math.log2(i + 2) for i, d in enumerate(ranked[:10]))
    best = sorted((g for g in judged.values() if g > 0), reverse=True)[:10]
    return gain / sum((2**g - 1) / math.log2(i + 2) for i, g in enumerate(best))
