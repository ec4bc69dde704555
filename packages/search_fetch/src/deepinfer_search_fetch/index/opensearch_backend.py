"""The index in an OpenSearch cluster (extra `cluster`).

Pages are analysed here, by the same code as for the embedded index, and stored in fields that the
cluster only splits at blanks; its BM25 has the same k1 and b. So both retrieve alike, and what
follows retrieval is the same code. Authority stays out of the cluster: it ranks after retrieval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from deepinfer_search_fetch.errors import ContentError, InvalidRequestError, UpstreamError
from deepinfer_search_fetch.index.analyzers import ANALYZER_VERSION
from deepinfer_search_fetch.index.backend import (
    TEXT_FIELDS,
    FieldTerm,
    Hit,
    Retrieval,
    analyse,
    page_of_record,
)
from deepinfer_search_fetch.index.document import IndexedPage

BULK_DOCUMENTS = 500
_T = TypeVar("_T")


def index_body() -> dict[str, Any]:
    """Settings and mapping of a new index."""
    text = {"type": "text", "analyzer": "whitespace"}
    properties: dict[str, Any] = dict.fromkeys(TEXT_FIELDS, text)
    properties |= {
        "site": {"type": "keyword"},
        "lang": {"type": "keyword"},
        "day": {"type": "integer"},
        "record": {"type": "keyword", "index": False, "doc_values": False},
    }
    meta = {"analyzer": ANALYZER_VERSION, "generation": 0}
    return {"mappings": {"dynamic": "strict", "_meta": meta, "properties": properties}}


class OpenSearchBackend:
    """One index of a cluster, made if it is missing.

    client: an `opensearchpy.OpenSearch`, with its addresses, certificates and credentials.
    Raises UpstreamError when the cluster fails, InvalidRequestError(conflict) for an index that
    another analyzer version wrote.
    """

    def __init__(self, client: Any, name: str) -> None:
        try:
            from opensearchpy.exceptions import NotFoundError, OpenSearchException
        except ImportError:
            raise ContentError(
                "feature_unavailable",
                "the OpenSearch backend needs: pip install 'deepinfer-search-fetch[cluster]'",
            ) from None
        self._missing: type[Exception] = NotFoundError
        self._failure: type[Exception] = OpenSearchException
        self._client = client
        self._name = name
        self._waiting: list[dict[str, Any]] = []
        if not self._ask(client.indices.exists, index=name):
            self._ask(client.indices.create, index=name, body=index_body())
        analyzer = self._meta()["analyzer"]
        if analyzer != ANALYZER_VERSION:
            raise InvalidRequestError(
                "conflict",
                f"the index {name} was written with analyzer {analyzer}, this version has "
                f"{ANALYZER_VERSION}; ingest into a new index",
            )

    def index(self, pages: Iterable[IndexedPage]) -> None:
        """Add or replace pages; visible after `commit`."""
        for page in pages:
            found = analyse(page)
            source: dict[str, Any] = {**found.texts, "site": found.sites, "record": found.record}
            if found.language:
                source["lang"] = found.language
            if found.day is not None:
                source["day"] = found.day
            self._waiting += [{"index": {"_id": found.doc_id}}, source]
            if len(self._waiting) >= 2 * BULK_DOCUMENTS:
                self._flush()

    def delete(self, doc_ids: Sequence[str]) -> None:
        self._waiting += [{"delete": {"_id": doc_id}} for doc_id in doc_ids]

    def commit(self) -> int:
        """Make writes visible; returns the new generation."""
        if not self._waiting:
            return self.generation()
        self._flush()
        self._ask(self._client.indices.refresh, index=self._name)
        meta = {"analyzer": ANALYZER_VERSION, "generation": self.generation() + 1}
        self._ask(self._client.indices.put_mapping, index=self._name, body={"_meta": meta})
        return int(meta["generation"])

    def generation(self) -> int:
        return int(self._meta()["generation"])

    def size(self) -> int:
        return int(self._ask(self._client.count, index=self._name)["count"])

    def doc_freqs(self, field: str, terms: Sequence[str]) -> list[int]:
        """How many pages hold each term in `field`; one request for all."""
        if not terms:
            return []
        filters = {str(i): {"term": {field: term}} for i, term in enumerate(terms)}
        body = {"size": 0, "aggs": {"terms": {"filters": {"filters": filters}}}}
        found = self._ask(self._client.search, index=self._name, body=body)
        buckets = found["aggregations"]["terms"]["buckets"]
        return [int(buckets[str(i)]["doc_count"]) for i in range(len(terms))]

    def get(self, doc_id: str) -> IndexedPage | None:
        try:
            found = self._client.get(index=self._name, id=doc_id)
        except self._missing:
            return None
        except self._failure as error:
            raise self._failed(error) from None
        return page_of_record(found["_source"]["record"])

    def pages(self, limit: int) -> Iterator[IndexedPage]:
        """Up to `limit` pages (at most 10,000, the cluster's window) in no stated order."""
        body = {"size": min(limit, 10_000), "query": {"match_all": {}}, "_source": ["record"]}
        for hit in self._ask(self._client.search, index=self._name, body=body)["hits"]["hits"]:
            yield page_of_record(hit["_source"]["record"])

    def retrieve(self, query: Retrieval, k: int) -> list[Hit]:
        """The best `k` pages by score."""
        body = {"size": k, "query": query_body(query), "_source": ["record"]}
        found = self._ask(self._client.search, index=self._name, body=body)
        return [
            Hit(float(hit["_score"]), partial(page_of_record, hit["_source"]["record"]))
            for hit in found["hits"]["hits"]
        ]

    def _meta(self) -> dict[str, Any]:
        found = self._ask(self._client.indices.get_mapping, index=self._name)
        try:
            return next(iter(found.values()))["mappings"]["_meta"]
        except (KeyError, StopIteration):
            raise InvalidRequestError(
                "conflict", f"the index {self._name} was not made by this package"
            ) from None

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        answer = self._ask(self._client.bulk, index=self._name, body=waiting)
        failed = [
            outcome
            for item in answer["items"]
            for kind, outcome in item.items()
            if outcome["status"] >= 300 and not (kind == "delete" and outcome["status"] == 404)
        ]
        if failed:
            raise UpstreamError(
                "upstream_http",
                f"the cluster refused {len(failed)} of {len(answer['items'])} writes: "
                f"{failed[0].get('error')}",
            )

    def _ask(self, call: Callable[..., _T], **arguments: Any) -> _T:
        try:
            return call(**arguments)
        except self._failure as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> UpstreamError:
        return UpstreamError(
            "connect_failure", f"OpenSearch: {type(error).__name__}: {error}"[:300]
        )


def query_body(query: Retrieval) -> dict[str, Any]:
    """A retrieval in the cluster's query language."""
    must: list[dict[str, Any]] = []
    filters: list[dict[str, Any]] = []
    must_not: list[dict[str, Any]] = []
    if query.groups:
        should = [_group(group, query.tie) for group in query.groups]
        must.append({"bool": {"should": should, "minimum_should_match": query.minimum}})
    for members in query.alternatives:
        options = [_group(query.groups[i], 0.0) for i in members]
        filters.append({"bool": {"should": options, "minimum_should_match": 1}})
    must += [_phrase(field, words) for field, words in query.phrases]
    must_not += [_phrase(field, words) for field, words in query.excluded]
    if query.sites:
        filters.append({"terms": {"site": list(query.sites)}})
    if query.blocked_sites:
        must_not.append({"terms": {"site": list(query.blocked_sites)}})
    if query.language:
        filters.append({"term": {"lang": query.language}})
    if query.day_range:
        low, high = query.day_range
        bounds = {"gte": low, "lte": high}
        filters.append({"range": {"day": {k: v for k, v in bounds.items() if v is not None}}})
    if not must:
        must.append({"match_all": {}})
    return {"bool": {"must": must, "filter": filters, "must_not": must_not}}


def _group(group: Sequence[FieldTerm], tie: float) -> dict[str, Any]:
    return {"dis_max": {"queries": [_term(t) for t in group], "tie_breaker": tie}}


def _term(term: FieldTerm) -> dict[str, Any]:
    if term.edits:
        wanted = {"value": term.term, "fuzziness": term.edits, "boost": term.boost}
        return {"fuzzy": {term.field: wanted}}
    return {"term": {term.field: {"value": term.term, "boost": term.boost}}}


def _phrase(field: str, words: Sequence[str]) -> dict[str, Any]:
    if field == "any":
        options = [_phrase(name, words) for name in ("title", "body")]
        return {"bool": {"should": options, "minimum_should_match": 1}}
    return {"match_phrase": {field: {"query": " ".join(words)}}}
