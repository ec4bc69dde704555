from __future__ import annotations

import random
from collections.abc import Iterator

import opensearchpy
import pytest
from opensearch_fake import FakeOpenSearch

from deepinfer_search_fetch import SearchRequest
from deepinfer_search_fetch.errors import InvalidRequestError, UpstreamError
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.opensearch_backend import OpenSearchBackend
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search.engine import search

WORDS = [
    *("newt", "frog", "toad", "pond", "ditch", "river", "meadow", "hunts", "sleeps", "sings", "at"),
    *("night", "by", "day", "voles", "insects", "fish", "survey", "census", "spring", "autumn"),
    *("kestrel", "owl", "heron"),
]


@pytest.fixture
def fake() -> Iterator[FakeOpenSearch]:
    fake = FakeOpenSearch()
    yield fake
    fake.close()


@pytest.fixture
def backend(fake: FakeOpenSearch) -> Iterator[OpenSearchBackend]:
    hosts = [{"host": "127.0.0.1", "port": fake.port}]
    client = opensearchpy.OpenSearch(hosts, max_retries=0)
    yield OpenSearchBackend(client, "pages")
    client.close()


def corpus() -> list[IndexedPage]:
    rng = random.Random(4)
    pages = [
        IndexedPage(
            f"https://h{i % 7}.example/{rng.choice(WORDS)}/{i}",
            f"{rng.choice(WORDS)} {rng.choice(WORDS)} notes",
            " ".join(rng.choices(WORDS, k=rng.randint(8, 30))) + f" item{i}",
            "2026-01-01",
            language=rng.choice(["en", "de", None]),
            published=f"2026-0{i % 9 + 1}-01",
        )
        for i in range(60)
    ]
    return [*pages, IndexedPage("https://zh.example/", "猫头鹰", "猫头鹰捕食田鼠", "2026-01-01")]


@pytest.mark.parametrize(
    "query",
    [
        "newt pond", "frog hunts insects at night by the river", '"hunts voles"', "owl -night",
        "site:h3.example toad", "-site:h3.example toad", "lang:de heron fish",
        "kestrel after:2026-03-01 before:2026-06-15", "intitle:survey newt", "inurl:owl spring",
        "census OR meadow", "猫头鹰 田鼠", "zzzz", "site:h1.example",
    ],
)  # fmt: skip
def test_a_cluster_answers_like_the_embedded_index(query: str, backend: OpenSearchBackend) -> None:
    embedded = TantivyBackend(None)
    for index in (embedded, backend):
        index.index(corpus())
        index.commit()
    request = SearchRequest(query=query, count=20, max_per_host=50)
    ours, theirs = (search(b, request, clock=lambda: 1.79e9) for b in (embedded, backend))
    assert [(r.url, r.relevance) for r in theirs.results] == [
        (r.url, pytest.approx(r.relevance, abs=0.002)) for r in ours.results
    ]


def test_writes_are_visible_after_a_commit_and_counted(backend: OpenSearchBackend) -> None:
    page = corpus()[0]
    backend.index([page])
    assert backend.size() == 0
    assert backend.commit() == 1
    assert backend.get(page.doc_id) is not None
    assert backend.get("0" * 32) is None
    assert [p.url for p in backend.pages(5)] == [page.url]
    assert backend.commit() == 1  # nothing new
    backend.delete([page.doc_id])
    assert backend.commit() == 2
    assert backend.size() == 0


def test_a_typing_slip_is_corrected(backend: OpenSearchBackend) -> None:
    backend.index(corpus())
    backend.commit()
    assert search(backend, SearchRequest(query="kestral")).corrections == "kestrel"


def test_document_frequencies_take_one_request(
    fake: FakeOpenSearch, backend: OpenSearchBackend
) -> None:
    backend.index(corpus())
    backend.commit()
    embedded = TantivyBackend(None)
    embedded.index(corpus())
    embedded.commit()
    fake.requests.clear()
    assert backend.doc_freqs("body", WORDS) == embedded.doc_freqs("body", WORDS)
    assert fake.requests.total() == 1
    assert backend.doc_freqs("body", []) == []


def test_an_index_of_another_version_is_refused(
    fake: FakeOpenSearch, backend: OpenSearchBackend
) -> None:
    fake.indices["pages"].mappings["_meta"]["analyzer"] = 0
    client = opensearchpy.OpenSearch([{"host": "127.0.0.1", "port": fake.port}])
    with pytest.raises(InvalidRequestError, match="analyzer 0"):
        OpenSearchBackend(client, "pages")
    del fake.indices["pages"].mappings["_meta"]
    with pytest.raises(InvalidRequestError, match="not made by this package"):
        OpenSearchBackend(client, "pages")
    client.close()


def test_a_failing_cluster_is_an_error_of_ours(
    fake: FakeOpenSearch, backend: OpenSearchBackend
) -> None:
    fake.fail = 503
    with pytest.raises(UpstreamError, match="OpenSearch"):
        backend.size()
    with pytest.raises(UpstreamError, match="OpenSearch"):
        backend.get("0" * 32)
