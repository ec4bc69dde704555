"""Search latency and indexing rate on synthetic documents, beside plain Tantivy BM25.

    python benches/bench_search.py [--documents 5000] [--queries 100] [--folder DIR]

The index lies in a folder, as a user's does. The ratio is our whole search (ranking, snippets,
summaries) to a bare top-10 look-up. All times are CPU time of the process, all threads together.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from deepinfer_search_fetch import SearchRequest
from deepinfer_search_fetch.index.backend import FieldTerm, Retrieval
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search.engine import search
from deepinfer_search_fetch.search.query import parse_query

WORDS_PER_DOCUMENT = 160
SENTENCE_WORDS = 16
DISTINCT_SENTENCES = 50_000
BATCH = 1000


class Texts:
    """Sentences of made-up words with Zipf frequencies, and pages made of them."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        letters = "abcdefghijklmnopqrstuvwxyz"
        vocabulary = [
            "".join(self._rng.choices(letters, k=self._rng.randint(3, 9))) for _ in range(60_000)
        ]
        weights = [1 / (i + 10) for i in range(len(vocabulary))]
        words = self._rng.choices(vocabulary, weights, k=DISTINCT_SENTENCES * SENTENCE_WORDS)
        self._sentences = [
            " ".join(words[i : i + SENTENCE_WORDS]).capitalize() + "."
            for i in range(0, len(words), SENTENCE_WORDS)
        ]

    def pages(self, n: int) -> Iterator[IndexedPage]:
        for i in range(n):
            body = self._rng.choices(self._sentences, k=WORDS_PER_DOCUMENT // SENTENCE_WORDS)
            title = " ".join(self._rng.choice(self._sentences).split()[:6])
            yield IndexedPage(
                f"https://h{i % 9973}.example/{i}", title, "\n".join(body), "2026-01-01"
            )

    def queries(self, n: int) -> list[str]:
        """Two to five words that stand together in some sentence."""
        out = []
        for _ in range(n):
            words = self._rng.choice(self._sentences).rstrip(".").split()
            k = self._rng.randint(2, 5)
            start = self._rng.randrange(len(words) - k)
            out.append(" ".join(words[start : start + k]).lower())
        return out


def fill(backend: TantivyBackend, texts: Texts, documents: int) -> float:
    """Index the documents; CPU seconds, without the making of the texts."""
    spent = 0.0
    pages = texts.pages(documents)
    while batch := list(islice(pages, BATCH)):
        started = time.process_time()
        backend.index(batch)
        spent += time.process_time() - started
    started = time.process_time()
    backend.commit()
    return spent + time.process_time() - started


def timed(run: Callable[[str], object], queries: list[str]) -> list[float]:
    """CPU milliseconds per query, after one that warms up."""
    run(queries[0])
    times = []
    for query in queries:
        started = time.process_time()
        run(query)
        times.append((time.process_time() - started) * 1000)
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument(
        "--folder", type=Path, help="where the index goes; a temporary one if not given"
    )
    arguments = parser.parse_args()
    texts = Texts()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        backend = TantivyBackend(folder)
        seconds = fill(backend, texts, arguments.documents)
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"indexing: {arguments.documents / seconds:.0f} documents per CPU second,"
            f" {size / arguments.documents:.0f} bytes per document on disk,"
            f" {peak:.0f} MiB peak memory of the process"
        )
        queries = texts.queries(arguments.queries)

        def bare(query: str) -> None:
            groups = tuple((FieldTerm("body", t, 1.0),) for t in parse_query(query).terms)
            for hit in backend.retrieve(Retrieval(groups), 10):
                _ = hit.page

        def plain(query: str) -> None:
            search(backend, SearchRequest(query=query, expand=False), clock=lambda: 1.79e9)

        def whole(query: str) -> None:
            search(backend, SearchRequest(query=query), clock=lambda: 1.79e9)

        medians = {}
        for name, run in (("bare top-10", bare), ("no expansion", plain), ("whole search", whole)):
            times = timed(run, queries)
            medians[name] = statistics.median(times)
            p99 = times[int(0.99 * (len(times) - 1))]
            print(
                f"{name:12} p50 {medians[name]:.1f} ms, p99 {p99:.1f} ms CPU"
                f" at {arguments.documents} documents"
            )
        print(f"ratio whole/bare: {medians['whole search'] / medians['bare top-10']:.1f}")


if __name__ == "__main__":
    main()
