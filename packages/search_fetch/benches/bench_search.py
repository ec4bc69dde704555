"""Search latency and indexing rate on synthetic documents, beside plain Tantivy BM25.

    python benches/bench_search.py [--documents 5000] [--queries 100]

The ratio is our whole search (ranking, snippets, summaries) to a bare top-10 look-up.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from deepinfer_search_fetch import SearchRequest
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import FieldTerm, Retrieval, TantivyBackend
from deepinfer_search_fetch.search.engine import search
from deepinfer_search_fetch.search.query import parse_query

WORDS_PER_DOCUMENT = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=100)
    arguments = parser.parse_args()
    rng = random.Random(1)
    vocabulary = [
        "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))
        for _ in range(20_000)
    ]
    weights = [1 / (i + 10) for i in range(len(vocabulary))]

    def text(n: int) -> str:
        return " ".join(rng.choices(vocabulary, weights, k=n))

    pages = [
        IndexedPage(
            f"https://h{i % 997}.example/{i}", text(6), text(WORDS_PER_DOCUMENT), "2026-01-01"
        )
        for i in range(arguments.documents)
    ]
    backend = TantivyBackend(None)
    started = time.process_time()
    backend.index(pages)
    backend.commit()
    print(f"indexing: {len(pages) / (time.process_time() - started):.0f} documents per CPU second")
    queries = [text(3) for _ in range(arguments.queries)]

    def bare(query: str) -> None:
        groups = tuple((FieldTerm("body", t, 1.0),) for t in parse_query(query).terms)
        backend.retrieve(Retrieval(groups), 10)

    def whole(query: str) -> None:
        search(backend, SearchRequest(query=query), clock=lambda: 1.79e9)

    medians = {}
    for name, run in (("bare", bare), ("whole", whole)):
        run(queries[0])
        times = []
        for query in queries:
            started = time.process_time()
            run(query)
            times.append((time.process_time() - started) * 1000)
        medians[name] = statistics.median(times)
        p99 = sorted(times)[int(0.99 * (len(times) - 1))]
        print(
            f"{name:6} p50 {medians[name]:.1f} ms, p99 {p99:.1f} ms CPU at {len(pages)} documents"
        )
    print(f"ratio whole/bare: {medians['whole'] / medians['bare']:.1f}")


if __name__ == "__main__":
    main()
