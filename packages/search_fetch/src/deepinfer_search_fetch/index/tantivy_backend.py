"""The embedded index. Text is analysed in Python and handed over as terms between blanks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tantivy
from filelock import FileLock, Timeout

from deepinfer_search_fetch.analyzers import ANALYZER_VERSION
from deepinfer_search_fetch.database import readable
from deepinfer_search_fetch.errors import InvalidRequestError, LimitError
from deepinfer_search_fetch.index.backend import (
    TEXT_FIELDS,
    FieldTerm,
    Hit,
    Retrieval,
    analyse,
    page_of_record,
)
from deepinfer_search_fetch.index.document import IndexedPage

_HEAP_BYTES = 64 * 1024 * 1024
_SNAPSHOT_TRIES = 20


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("doc_id", stored=True, tokenizer_name="raw", index_option="basic")
    builder.add_text_field("site", tokenizer_name="raw", index_option="basic")
    builder.add_text_field("lang", tokenizer_name="raw", index_option="basic")
    for name in TEXT_FIELDS:
        builder.add_text_field(name, tokenizer_name="whitespace", index_option="position")
    builder.add_unsigned_field("day", indexed=True, fast=True)
    builder.add_bytes_field("record", stored=True)
    return builder.build()


class TantivySnapshot:
    """The index at one commit: a searcher and the generation it belongs to."""

    def __init__(self, schema: tantivy.Schema, searcher: tantivy.Searcher, generation: int) -> None:
        self._schema = schema
        self._searcher = searcher
        self._generation = generation

    def generation(self) -> int:
        return self._generation

    def size(self) -> int:
        return self._searcher.num_docs

    def doc_freqs(self, field: str, terms: Sequence[str]) -> list[int]:
        """How many pages hold each term in `field`."""
        return [self._searcher.doc_freq(field, term) for term in terms]

    def get(self, doc_id: str) -> IndexedPage | None:
        query = tantivy.Query.term_query(self._schema, "doc_id", doc_id, "basic")
        hits = self._searcher.search(query, 1, count=False).hits
        return self._page(hits[0][1]) if hits else None

    def pages(self, limit: int) -> Iterator[IndexedPage]:
        """Up to `limit` pages in no stated order."""
        hits = self._searcher.search(tantivy.Query.all_query(), limit, count=False).hits
        for _, address in hits:
            yield self._page(address)

    def retrieve(self, query: Retrieval, k: int) -> list[Hit]:
        """The best `k` documents by score; ties in the order in which they were written."""
        hits = self._searcher.search(self._query(query), k, count=False).hits
        return [Hit(float(score), partial(self._page, at)) for score, at in hits]

    def _page(self, address: tantivy.DocAddress) -> IndexedPage:
        raw: Any = self._searcher.doc(address).get_first("record")
        return page_of_record(bytes(raw).decode("utf-8"))

    def _query(self, query: Retrieval) -> tantivy.Query:
        must, must_not = tantivy.Occur.Must, tantivy.Occur.MustNot
        clauses: list[tuple[tantivy.Occur, tantivy.Query]] = []
        if query.groups:
            clauses.append((must, self._words(query)))
        for members in query.alternatives:
            options = [(tantivy.Occur.Should, self._group(query.groups[i], 0.0)) for i in members]
            clauses.append((must, _filter(tantivy.Query.boolean_query(options))))
        clauses += [(must, self._phrase(field, words)) for field, words in query.phrases]
        clauses += [(must_not, self._phrase(field, words)) for field, words in query.excluded]
        if query.sites:
            clauses.append((must, _filter(self._set("site", query.sites))))
        if query.blocked_sites:
            clauses.append((must_not, self._set("site", query.blocked_sites)))
        if query.language:
            clauses.append((must, _filter(self._set("lang", (query.language,)))))
        if query.day_range:
            low, high = query.day_range
            in_range = tantivy.Query.range_query(
                self._schema, "day", tantivy.FieldType.Unsigned, low, high
            )
            clauses.append((must, _filter(in_range)))
        if len(clauses) == 1 and query.groups:
            return clauses[0][1]  # only a union by itself is pruned to the best k
        if not any(occur == must for occur, _ in clauses):
            clauses.append((must, tantivy.Query.all_query()))
        return tantivy.Query.boolean_query(clauses)

    def _words(self, query: Retrieval) -> tantivy.Query:
        if query.tie == 1.0 and query.minimum == 1:
            # Sums of sums: as one union of terms the engine can leave out blocks of documents that
            # cannot come among the best.
            parts = [self._boosted(t) for group in query.groups for t in group]
        else:
            parts = [self._group(g, query.tie) for g in query.groups]
        should = [(tantivy.Occur.Should, part) for part in parts]
        return tantivy.Query.boolean_query(should, query.minimum)

    def _group(self, group: Sequence[FieldTerm], tie: float) -> tantivy.Query:
        parts = [self._boosted(t) for t in group]
        return parts[0] if len(parts) == 1 else tantivy.Query.disjunction_max_query(parts, tie)

    def _boosted(self, term: FieldTerm) -> tantivy.Query:
        return tantivy.Query.boost_query(self._term(term), term.boost)

    def _term(self, term: FieldTerm) -> tantivy.Query:
        if term.edits:
            return tantivy.Query.fuzzy_term_query(self._schema, term.field, term.term, term.edits)
        return tantivy.Query.term_query(self._schema, term.field, term.term, "freq")

    def _phrase(self, field: str, words: Sequence[str]) -> tantivy.Query:
        if field == "any":
            options = [(tantivy.Occur.Should, self._phrase(f, words)) for f in ("title", "body")]
            return tantivy.Query.boolean_query(options)
        if len(words) == 1:
            return tantivy.Query.term_query(self._schema, field, words[0], "freq")
        return tantivy.Query.phrase_query(self._schema, field, list(words))

    def _set(self, field: str, values: Sequence[str]) -> tantivy.Query:
        return tantivy.Query.term_set_query(self._schema, field, list(values))


class TantivyBackend:
    """One index in `folder` (or in memory for None); one writing process, any number of readers."""

    def __init__(self, folder: Path | None, *, lock_seconds: float = 5.0) -> None:
        self._lock_seconds = lock_seconds
        self._schema = _schema()
        self._folder = folder
        self._lock: FileLock | None = None
        self._writer: tantivy.IndexWriter | None = None
        self._generation_file = folder / "generation.json" if folder else None
        self._memory_generation = 0
        self._seen: tuple[int, int] | None = None
        if folder is None:
            self._index = tantivy.Index(self._schema)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            with readable(folder):
                self._check_version(folder / "generation.json")
                self._index = tantivy.Index(self._schema, str(folder))
                self._index.reload()

    def _check_version(self, file: Path) -> None:
        if not file.exists():
            file.write_text(json.dumps({"analyzer": ANALYZER_VERSION, "generation": 0}))
            return
        found = json.loads(file.read_text())["analyzer"]
        if found != ANALYZER_VERSION:
            raise InvalidRequestError(
                "conflict",
                f"the index was written with analyzer {found}, this version has "
                f"{ANALYZER_VERSION}; ingest into a new folder",
            )

    def index(self, pages: Iterable[IndexedPage]) -> None:
        """Add or replace pages; visible after `commit`."""
        writer = self._open_writer()
        for page in pages:
            writer.delete_documents_by_term("doc_id", page.doc_id)
            writer.add_document(self._document(page))

    def delete(self, doc_ids: Sequence[str]) -> None:
        writer = self._open_writer()
        for doc_id in doc_ids:
            writer.delete_documents_by_term("doc_id", doc_id)

    def commit(self) -> int:
        """Make writes visible and durable; returns the new generation and frees the writer."""
        if self._writer is None:
            return self.generation()
        generation = self.generation() + 1
        opstamp = int(self._writer.commit())
        self._writer.wait_merging_threads()
        self._writer = None
        if self._generation_file is None:
            self._memory_generation = generation
        else:
            temporary = self._generation_file.with_suffix(".tmp")
            label = {
                "analyzer": ANALYZER_VERSION,
                "generation": generation,
                "opstamp": opstamp,
            }
            temporary.write_text(json.dumps(label))
            temporary.replace(self._generation_file)
        if self._lock is not None:
            self._lock.release()
        self._index.reload()
        return generation

    def snapshot(self) -> TantivySnapshot:
        """The newest commit, of any process, under the generation that belongs to it."""
        if self._folder is None:
            return TantivySnapshot(self._schema, self._index.searcher(), self._memory_generation)
        with readable(self._folder):
            for _ in range(_SNAPSHOT_TRIES):
                before = self._commit_now(self._folder)
                if before != self._seen:
                    self._index.reload()
                searcher = self._index.searcher()
                if self._commit_now(self._folder) == before:
                    self._seen = before
                    return TantivySnapshot(self._schema, searcher, before[1])
        raise LimitError("unavailable", "the index changes faster than it can be read; try again")

    def _commit_now(self, folder: Path) -> tuple[int, int]:
        """(commit, generation) on disk. Between a commit and its label the next generation is
        already visible."""
        commit = int(json.loads((folder / "meta.json").read_text("utf-8"))["opstamp"])
        label = json.loads((folder / "generation.json").read_text("utf-8"))
        generation = int(label["generation"])
        known = label.get("opstamp", commit if generation else 0)
        return commit, generation if commit == known else generation + 1

    def generation(self) -> int:
        return self.snapshot().generation()

    def size(self) -> int:
        return self.snapshot().size()

    def doc_freqs(self, field: str, terms: Sequence[str]) -> list[int]:
        return self.snapshot().doc_freqs(field, terms)

    def get(self, doc_id: str) -> IndexedPage | None:
        return self.snapshot().get(doc_id)

    def pages(self, limit: int) -> Iterator[IndexedPage]:
        return self.snapshot().pages(limit)

    def retrieve(self, query: Retrieval, k: int) -> list[Hit]:
        return self.snapshot().retrieve(query, k)

    def _open_writer(self) -> tantivy.IndexWriter:
        if self._writer is None:
            if self._folder is not None:
                self._lock = self._lock or FileLock(
                    self._folder / "writer.lock", timeout=self._lock_seconds
                )
                try:
                    self._lock.acquire()
                except Timeout:
                    raise LimitError(
                        "host_busy", "another process is writing to this index; try again later"
                    ) from None
            self._writer = self._index.writer(_HEAP_BYTES, 1)
        return self._writer

    def _document(self, page: IndexedPage) -> tantivy.Document:
        found = analyse(page)
        document = tantivy.Document()
        document.add_text("doc_id", found.doc_id)
        for site in found.sites:
            document.add_text("site", site)
        if found.language:
            document.add_text("lang", found.language)
        for name, text in found.texts.items():
            document.add_text(name, text)
        if found.day is not None:
            document.add_unsigned("day", found.day)
        document.add_bytes("record", found.record.encode("utf-8", "replace"))
        return document


def _filter(query: tantivy.Query) -> tantivy.Query:
    """A clause that must match but adds nothing to the score."""
    return tantivy.Query.boost_query(tantivy.Query.const_score_query(query, 1.0), 0.0)
