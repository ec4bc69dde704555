from __future__ import annotations

import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deepinfer_search_fetch import SearchRequest, SearchResponse
from deepinfer_search_fetch.errors import ContentError, InvalidRequestError
from deepinfer_search_fetch.index.backend import FieldTerm, Hit, Retrieval
from deepinfer_search_fetch.index.dedupe import (
    HostLines,
    fingerprint,
    jaccard,
    near_duplicates,
)
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search.corrections import correction, edit_distance
from deepinfer_search_fetch.search.dense import StaticTable, rerank
from deepinfer_search_fetch.search.engine import SearchParts, search
from deepinfer_search_fetch.search.query import parse_query
from deepinfer_search_fetch.search.snippets import Passages, highlights

NOW = 1_790_000_000.0
WORDS = [f"w{chr(97 + i)}{chr(97 + j)}x" for i in range(20) for j in range(10)]


def run(backend: TantivyBackend, query: str, **fields: Any) -> SearchResponse:
    return search(backend, SearchRequest(query=query, **fields), clock=lambda: NOW)


def texts(n: int, seed: int = 0, length: int = 80) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=length)) for _ in range(n)]


@pytest.fixture(scope="module")
def large() -> TantivyBackend:
    """300 pages on 90 hosts that all match one query, some of them copies."""
    backend = TantivyBackend(None)
    bodies = texts(300)
    for i in range(0, 300, 9):
        bodies[i] = bodies[0]
    backend.index(
        IndexedPage(f"https://h{i % 90}.example/{i}", f"Heron {i}", f"heron {body}", "2026-01-01")
        for i, body in enumerate(bodies)
    )
    backend.commit()
    return backend


@pytest.mark.parametrize("options", [{}, {"dedupe": False}, {"diversity": 0.8, "max_per_host": 1}])
def test_pages_of_results_join_to_one_list_however_they_are_cut(
    options: dict[str, Any], large: TantivyBackend
) -> None:
    whole = [
        r.url
        for start in (0, 50, 100, 150, 200)
        for r in run(large, "heron", count=50, offset=start, content="none", **options).results
    ]
    assert len(whole) == len(set(whole))
    assert len(whole) == 250
    for offset, count in ((0, 7), (35, 11), (190, 20), (231, 19)):
        part = run(large, "heron", count=count, offset=offset, content="none", **options).results
        assert [r.url for r in part] == whole[offset : offset + count]
        assert [r.rank for r in part] == list(range(offset + 1, offset + count + 1))


def test_copies_stand_as_one_result_with_the_worthiest_source() -> None:
    backend = TantivyBackend(None)
    text = texts(1, length=300)[0]
    backend.index(
        IndexedPage(url, "Herons", text, "2026-01-01", published=published)
        for url, published in [
            ("https://blog.example/copy-of-the-herons-page", "2026-01-01"),
            ("https://birds.gov/herons", "2026-03-01"),
            ("https://blog.example/herons", "2026-01-01"),
        ]
    )
    backend.commit()
    [result] = run(backend, "herons").results
    assert result.url == "https://birds.gov/herons"
    assert result.alternates == [
        "https://blog.example/copy-of-the-herons-page",
        "https://blog.example/herons",
    ]


def test_a_text_copied_a_hundred_times_leaves_room_for_others() -> None:
    backend = TantivyBackend(None)
    copied, *others = texts(6, length=120)
    backend.index(
        IndexedPage(f"https://c{i}.example/", "Heron heron heron", copied, "2026-01-01")
        for i in range(100)
    )
    backend.index(
        IndexedPage(f"https://o{i}.example/", "A page", f"heron {o}", "2026-01-01")
        for i, o in enumerate(others)
    )
    backend.commit()
    results = run(backend, "heron").results
    assert [len(r.alternates) for r in results if r.alternates] == [99]
    assert len(results) == 6


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 0.6))
def test_the_estimated_share_of_shingles_is_close_to_the_true_one(
    seed: int, changed: float
) -> None:
    rng = random.Random(seed)
    words = rng.choices(WORDS, k=600)
    other = [rng.choice(WORDS) if rng.random() < changed else w for w in words]

    def shingles(found: list[str]) -> set[tuple[str, ...]]:
        return {tuple(found[i : i + 3]) for i in range(len(found) - 2)}

    a, b = shingles(words), shingles(other)
    assert jaccard(" ".join(words), " ".join(other)) == pytest.approx(
        len(a & b) / len(a | b), abs=0.17
    )


def test_where_the_simhash_is_unsure_the_texts_decide() -> None:
    asked = []
    rng = random.Random(2)
    words = rng.choices(WORDS, k=400)
    near = far = 0
    for _ in range(60):
        changed = [rng.choice(WORDS) if rng.random() < 0.04 else w for w in words]
        a, b = " ".join(words), " ".join(changed)
        prints = fingerprint(a), fingerprint(b)
        distance = (prints[0].simhash ^ prints[1].simhash).bit_count()

        def both(a: str = a, b: str = b) -> tuple[str, str]:
            asked.append(1)
            return a, b

        if 3 < distance <= 8:
            near += near_duplicates(*prints, both) == (jaccard(a, b) >= 0.8)
            far += 1
            assert not near_duplicates(*prints)
    assert far > 5
    assert near == far == len(asked)


def test_lines_that_a_host_repeats_do_not_make_its_pages_alike() -> None:
    footer = "\n".join(f"Footer line {i} of the shop with its many links" for i in range(40))
    lines = HostLines()
    pages = [f"{body}\n{footer}" for body in texts(30, seed=9)]
    for page in pages:
        lines.see("shop.example", page)
    plain = [fingerprint(p).simhash for p in pages[:2]]
    clean = [fingerprint(p, lines.boilerplate("shop.example")).simhash for p in pages[:2]]
    assert (plain[0] ^ plain[1]).bit_count() < (clean[0] ^ clean[1]).bit_count()
    assert lines.boilerplate("new.example") is None


def test_pages_of_equal_score_that_change_places_when_more_are_asked_for_are_not_lost() -> None:
    class Swapping(TantivyBackend):
        def retrieve(self, query: Retrieval, k: int) -> list[Hit]:
            hits = super().retrieve(query, k)
            if k > 200:
                hits[199], hits[200] = hits[200], hits[199]
            return hits

    backend = Swapping(None)
    backend.index(
        IndexedPage(f"https://h{i}.example/", f"owl {i}", text, "2026-01-01")
        for i, text in enumerate(texts(260, seed=5))
    )
    backend.commit()
    found = [
        result.url
        for offset in range(0, 260, 50)
        for result in run(backend, "owl", count=50, offset=offset, max_per_host=20).results
    ]
    assert sorted(found) == sorted(f"https://h{i}.example/" for i in range(260))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6, unique=True), st.integers(1, 60))
def test_one_union_of_terms_finds_and_scores_what_sums_of_groups_do(
    large: TantivyBackend, words: list[str], k: int
) -> None:
    groups = tuple(
        (FieldTerm("body", w, 1.0), FieldTerm("title", w, 0.5)) for w in [*words, "heron"]
    )
    union = large.retrieve(Retrieval(groups, tie=1.0), k)
    nested = large.retrieve(Retrieval(groups, tie=1 - 1e-9), k)
    np.testing.assert_allclose([h.score for h in union], [h.score for h in nested], rtol=1e-5)
    worst = nested[-1].score if nested else 0.0
    clear = [{h.page.url for h in hits if h.score > worst * 1.0001} for hits in (union, nested)]
    assert clear[0] == clear[1]


def test_the_final_order_puts_no_irrelevant_page_above_a_relevant_one() -> None:
    backend = TantivyBackend(None)
    filler = texts(40, seed=3)
    backend.index(
        IndexedPage(
            f"https://n{i}.gov/", "Other", f"{t} heron", "2026-09-20", published="2026-09-20"
        )
        for i, t in enumerate(filler)
    )
    backend.index(
        [IndexedPage("https://x.example/", "Grey heron nesting habits", "Grey heron nesting habits "
                     "near water. " * 9, "2020-01-01")]
    )  # fmt: skip
    backend.commit()
    results = run(backend, "grey heron nesting habits").results
    strong = [r for r in results if r.relevance > 0.5]
    assert strong
    assert results[: len(strong)] == strong


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("grey haron", "grey heron"),
        ("nestign habits", "nesting habits"),
        ('"haron" site:a.example', None),
        ("heron", None),
        ("qqqqzzzz", None),
        ("accomodatoin", "accommodation"),
        ("猫头鹰", None),
    ],
)
def test_corrections(query: str, expected: str | None) -> None:
    text = "Nesting habits and accommodation of herons."
    backend = TantivyBackend(None)
    backend.index(
        [
            IndexedPage(
                "https://a.example/",
                "Grey heron",
                text,
                "2026-01-01",
            )
        ]
    )
    backend.commit()
    assert correction(backend, query) == expected


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edit_distance_is_a_bounded_symmetric_measure(a: str, b: str) -> None:
    distance = edit_distance(a, b)
    assert distance == edit_distance(b, a)
    assert (distance == 0) == (a == b)
    assert abs(len(a) - len(b)) <= distance <= max(len(a), len(b))
    assert edit_distance("ab", "ba") == 1


query_pieces = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "site:",
                "-site:a.b",
                "site:a.example",
                "lang:en",
                "after:2026-01-01",
                "before:x",
                "OR",
            ]
        ),
        st.sampled_from(
            ['"', '"heron nest"', "-", "--", "-heron", 'intitle:"x y"', "filetype:pdf"]
        ),
        st.text(max_size=8),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(query_pieces)
def test_any_query_text_gets_an_answer(pieces: list[str]) -> None:
    text = " ".join(pieces)[:512]
    parsed = parse_query(text)
    assert all(0 <= i < len(parsed.terms) for group in parsed.alternatives for i in group)
    if text.strip():
        run(_SMALL, text)


_SMALL = TantivyBackend(None)
_SMALL.index(
    [IndexedPage("https://a.example/heron", "Heron", "Heron nests near water.", "2026-01-01")]
)
_SMALL.commit()


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ('"heron nest"', True), ('"nest heron"', False), ('"nests near the water"', True),
        ("intitle:heron", True), ("intitle:water", False), ("inurl:heron", True),
        ("-intitle:heron water", False), ("heron before:2026-01-01", False),
        ("heron after:2025-12-31", True), ("heron lang:de", False), ("-water heron", False),
        ("site:example heron", True), ("site:b.example heron", False), ("cat OR heron", True),
    ],
)  # fmt: skip
def test_each_operator_restricts(query: str, matches: bool) -> None:
    assert bool(run(_SMALL, query).results) == matches


@settings(max_examples=80, deadline=None)
@given(
    st.text(
        st.sampled_from("ab cd.!\n。猫头鹰é\u0301\u200d👩🏽\U0001f1e9\U0001f1ea각ᄀ"), max_size=900
    )
)
def test_snippets_keep_their_bounds_and_cut_no_grapheme(text: str) -> None:
    idf = {"ab": 1.0, "猫": 0.5, "猫头": 1.0}
    passages = Passages(text, idf)
    snippet, marks = passages.snippet()
    assert len(snippet) <= 200
    assert all(0 <= a < b <= len(snippet) for a, b in marks)
    assert marks == highlights(snippet, idf)
    assert len(passages.summary()) <= 800
    body = snippet.strip("…")
    if body and snippet.startswith("…"):
        assert not unicodedata.category(body[0]).startswith("M")
        assert body[0] != "\u200d"
    if body and snippet.endswith("…"):
        assert body[-1] != "\u200d"


def test_a_long_snippet_stands_around_the_query_and_ends_between_words() -> None:
    text = "filler words here " * 60 + "the kestrel hovers " + "more words there " * 60
    snippet, marks = Passages(text, {"kestrel": 2.0}).snippet()
    assert [snippet[a:b] for a, b in marks] == ["kestrel"]
    assert set(snippet.strip("…").split()) <= set(text.split())
    family = "👩\u200d👩\u200d👧" * 100
    assert Passages(family, {}).snippet()[0].strip("…").count("👧") > 0


def test_chinese_snippets_are_whole_sentences() -> None:
    text = "今天天气很好。猫头鹰在夜间捕食田鼠。河边有很多鸟。"
    snippet, _ = Passages(text, {"猫头": 2.0}).snippet()
    assert snippet == "猫头鹰在夜间捕食田鼠。河边有很多鸟。"


def hits(n: int) -> list[Hit]:
    pages = [
        IndexedPage(f"https://h{i}.example/", f"t{i}", WORDS[i % 200], "2026-01-01")
        for i in range(n)
    ]
    return [Hit(float(n - i), lambda p=p: p) for i, p in enumerate(pages)]


def test_vectors_move_results_only_where_they_agree_with_the_words() -> None:
    found = hits(100)
    rng = np.random.default_rng(1)

    def helpful(texts: list[str]) -> Any:
        lean = np.linspace(1.0, 0.0, len(texts) - 1)
        rows = np.stack([lean, 1 - lean], axis=1) + rng.normal(0, 0.05, (len(texts) - 1, 2))
        return np.vstack([[1.0, 0.0], rows]).astype(np.float32)

    def opposed(texts: list[str]) -> Any:
        vectors = helpful(texts)
        return np.vstack([vectors[:1], vectors[:0:-1]])

    moved = rerank("q", found, helpful)
    assert {h.page.url for h in moved} == {h.page.url for h in found}
    assert [h.page.url for h in moved] != [h.page.url for h in found]
    assert all(a.score >= b.score for a, b in pairwise(moved))
    assert rerank("q", found, opposed) == found
    assert rerank("q", found, lambda t: np.zeros((len(t), 4), np.float32)) == found
    with pytest.raises(ContentError, match="shape"):
        rerank("q", found, lambda t: np.zeros((3, 4), np.float32))


def test_a_table_learned_from_pages_knows_their_words_and_no_other_language(
    tmp_path: Path,
) -> None:
    pairs = [("newt", "amphibian"), ("kestrel", "raptor"), ("pike", "fish")]
    rng = random.Random(0)
    docs = []
    for _ in range(120):
        a, b = rng.choice(pairs)
        docs.append(f"{a} {b} {rng.choice(WORDS)} {rng.choice(WORDS)}")
    table = StaticTable.learn(docs, dimensions=8)
    table.save(tmp_path / "t.npz")
    again = StaticTable.load(tmp_path / "t.npz")
    newt, amphibian, raptor, chinese = again(["newt", "amphibian", "raptor", "猫头鹰捕食"])
    assert np.array_equal(table(["newt"])[0], newt)
    assert newt @ amphibian > newt @ raptor
    assert not chinese.any()
    (tmp_path / "bad.npz").write_bytes(b"PK\3\4nothing")
    with pytest.raises(InvalidRequestError, match="not a table"):
        StaticTable.load(tmp_path / "bad.npz")
    with pytest.raises(InvalidRequestError, match="too little"):
        StaticTable.learn(["one"])


def test_the_reranker_is_used_unless_the_request_says_no() -> None:
    calls = []

    def embed(texts: list[str]) -> Any:
        calls.append(texts[0])
        return np.ones((len(texts), 2), np.float32)

    backend = TantivyBackend(None)
    backend.index(
        IndexedPage(f"https://h{i}.example/", "Heron", f"heron {t}", "2026-01-01")
        for i, t in enumerate(texts(3))
    )
    backend.commit()
    parts = SearchParts(embed=embed)
    request = SearchRequest(query="heron", question="Where do herons nest?")
    search(backend, request, parts=parts)
    search(backend, request.model_copy(update={"rerank": "none"}), parts=parts)
    assert calls == ["Where do herons nest?"]


def test_language_and_country_lift_and_strictness_filters() -> None:
    backend = TantivyBackend(None)
    body = texts(2, seed=8)
    backend.index(
        [
            IndexedPage("https://a.com/", "Heron", f"heron {body[0]}", "2026-01-01", "en"),
            IndexedPage("https://b.de/", "Heron", f"heron {body[1]}", "2026-01-01", "de"),
        ]
    )
    backend.commit()

    def first(**fields: Any) -> str:
        return run(backend, "heron", **fields).results[0].url

    assert first(language="en") == "https://a.com/"
    assert first(language="de-AT") == "https://b.de/"
    assert first(country="DE") == "https://b.de/"
    strict = run(backend, "heron", language="de", strict_language=True).results
    assert [r.url for r in strict] == ["https://b.de/"]


def test_a_query_for_news_prefers_the_newest() -> None:
    backend = TantivyBackend(None)
    body = texts(2, seed=8)
    backend.index(
        IndexedPage(f"https://n{i}.example/", "Heron", f"heron {t}", "2026-09-21", published=day)
        for i, (t, day) in enumerate(zip(body, ("2026-01-01", "2026-09-20"), strict=True))
    )
    backend.commit()
    results = run(backend, "latest heron").results
    assert results[0].published == "2026-09-20"
    assert results[0].freshness > 0.8
    assert results[1].freshness < 0.01


def test_a_day_that_does_not_exist_is_the_callers_fault() -> None:
    with pytest.raises(ValidationError, match="2026-02-30"):
        SearchRequest(query="heron", freshness="2026-01-01..2026-02-30")
