# ruff: noqa: E501, RUF001
from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_search_fetch import (
    AsyncSearchFetch,
    Config,
    SearchRequest,
    SearchResponse,
    analyzers,
)
from deepinfer_search_fetch.analyzers import terms
from deepinfer_search_fetch.errors import InvalidRequestError, LimitError
from deepinfer_search_fetch.index.authority import LinkEvidence, authority, explain
from deepinfer_search_fetch.index.dedupe import fingerprint, near_duplicates
from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.ingest import Ingester, Source
from deepinfer_search_fetch.index.sources.xml import Entry, parse_sitemap
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.search.engine import search
from deepinfer_search_fetch.search.query import parse_query

Listener = Any  # see conftest
NOW = 1_790_000_000.0  # 2026-09-21

PAGES = [
    ("https://birds.example/kestrel", "Kestrel falcons", "en", "2026-09-01",
     "Kestrels hover above fields. They hunt voles by sight. " * 8),
    ("https://www.birds.example/owl", "Owls of the night", "en", "2020-01-01",
     "Owls hunt at night. Their hearing finds voles under snow. " * 8),
    ("https://data.gov/voles", "Vole population survey", "en", "2026-01-15",
     "The survey counts voles in meadow plots each spring. Release v4.1 of snake_case data. " * 8),
    ("https://zh.example/mao", "猫头鹰", "zh", None, "猫头鹰在夜间捕食田鼠，听觉非常灵敏。" * 8),
    ("https://badbirds.example/x", "Garden birds", "en", None, "Robins and tits visit gardens. " * 8),
    ("https://de.example/eule", "Die Eule", "de", None, "Die Eule jagt nachts Wühlmäuse im Wald. " * 8),
]  # fmt: skip


@pytest.fixture(scope="module")
def backend() -> TantivyBackend:
    backend = TantivyBackend(None)
    backend.index(
        IndexedPage(u, t, c, "2026-09-20T00:00:00Z", language, published, "Site")
        for u, t, language, published, c in PAGES
    )
    backend.commit()
    return backend


def run(backend: TantivyBackend, query: str, **fields: Any) -> SearchResponse:
    request = SearchRequest(query=query, **fields)
    return search(backend, request, clock=lambda: NOW)


def urls(response: SearchResponse) -> list[str]:
    return [r.url for r in response.results]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Running runners", ["run", "runner"]),
        ("Café CAFE\u0301", ["cafe", "cafe"]),
        ("世界你", ["世", "世界", "界", "界你", "你"]),
        ("v4.1", ["v4.1", "v", "4", "1"]),
        ("snake_case", ["snake_case", "snake", "case"]),
        ("getHTTPResponse", ["gethttpresponse", "get", "http", "respons"]),
        ("C++ and C#", ["c++", "c", "and", "c#", "c"]),
        ("ＦＵＬＬ", ["full"]),
        ("", []),
    ],
)
def test_terms(text: str, expected: list[str]) -> None:
    assert terms(text) == expected


_ODD_TEXT = st.text(
    st.characters(categories=["L", "M", "N", "P", "S", "Zs"])
    | st.sampled_from("漢字，。（）：a.－．＋é\u0301\u3099\u1161\ufe00"),
    max_size=12,
)


@given(_ODD_TEXT)
@example("漢，\u0301a．b")
@example("ｶ\u3099が a\u0301，b\u0338")
def test_tokens_are_those_of_the_normal_form(text: str) -> None:
    whole = analyzers._TOKEN.findall(unicodedata.normalize("NFKC", text))
    assert analyzers._tokens(text) == whole


@given(st.text(max_size=20), st.sampled_from([" ", "\n", "\u00a0", "\u3000"]), st.text(max_size=20))
def test_terms_of_two_texts_apart_are_the_terms_of_each(left: str, blank: str, right: str) -> None:
    assert terms(left + blank + right) == terms(left) + terms(right)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_terms_are_stable_and_hold_no_blank(text: str) -> None:
    found = terms(text)
    assert found == terms(text)
    assert all(t and not any(c.isspace() for c in t) for t in found)


def test_the_best_page_comes_first_with_marks_and_summary(backend: TantivyBackend) -> None:
    response = run(backend, "kestrel hunting voles")
    top = response.results[0]
    assert top.url == "https://birds.example/kestrel"
    assert len(top.snippet) <= 200
    assert {top.snippet[a:b] for a, b in top.highlights} >= {"Kestrels", "voles"}
    assert 0 < len(top.summary) <= 800
    assert top.relevance > 0.3
    assert response.usage.billable


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (
            "voles site:birds.example",
            {"https://birds.example/kestrel", "https://www.birds.example/owl"},
        ),
        ("robins site:birds.example", set()),
        ("voles -site:birds.example", {"https://data.gov/voles"}),
        ('"hunt voles"', {"https://birds.example/kestrel"}),
        ("voles -night", {"https://birds.example/kestrel", "https://data.gov/voles"}),
        ("intitle:owls", {"https://www.birds.example/owl"}),
        ("voles after:2026-01-01 before:2026-06-01", {"https://data.gov/voles"}),
        ("lang:de eule", {"https://de.example/eule"}),
        ("猫头鹰 田鼠", {"https://zh.example/mao"}),
        ("wuhlmause", {"https://de.example/eule"}),
        ("inurl:kestrel", {"https://birds.example/kestrel"}),
        ("robins OR hearing", {"https://badbirds.example/x", "https://www.birds.example/owl"}),
        ("qwxzvkj plmqrst", set()),
    ],
)
def test_operators(query: str, expected: set[str], backend: TantivyBackend) -> None:
    assert set(urls(run(backend, query))) == expected


@settings(max_examples=80, deadline=None)
@given(st.text(alphabet='ab":-()OR site+*\\/猫é', min_size=1, max_size=40))
def test_no_query_is_an_error(text: str) -> None:
    parsed = parse_query(text)
    assert len(parsed.terms) == len(set(parsed.terms))
    tiny = TantivyBackend(None)
    if text.strip():
        assert search(tiny, SearchRequest(query=text)).results == []


def test_an_empty_answer_is_honest_and_free(backend: TantivyBackend) -> None:
    response = run(backend, "zzzzqqqq")
    assert response.results == []
    assert not response.usage.billable
    assert run(TantivyBackend(None), "x").warnings == ["index_empty"]


def test_filters_of_the_request(backend: TantivyBackend) -> None:
    assert urls(run(backend, "voles", include_domains=["data.gov"])) == ["https://data.gov/voles"]
    assert "https://data.gov/voles" not in urls(run(backend, "voles", exclude_domains=["gov"]))
    assert urls(run(backend, "voles", freshness="month")) == ["https://birds.example/kestrel"]
    assert run(backend, "voles", min_relevance=1.0).results == []
    assert urls(run(backend, "voles", min_authority=0.6)) == ["https://data.gov/voles"]


def test_pages_of_results_do_not_overlap(backend: TantivyBackend) -> None:
    whole = urls(run(backend, "voles", count=10))
    assert whole == [
        u for i in range(len(whole)) for u in urls(run(backend, "voles", count=1, offset=i))
    ]


def test_token_budgets_hold(backend: TantivyBackend) -> None:
    response = run(backend, "voles", content="full", max_tokens=60, max_tokens_per_result=40)
    contents = [r for r in response.results if r.content]
    assert contents
    assert sum(r.tokens for r in contents) <= 60


def test_copies_are_folded_and_hosts_are_limited() -> None:
    backend = TantivyBackend(None)
    text = "A long text about herons that stand in shallow water and wait for fish. " * 12
    same = [IndexedPage(f"https://h{i}.example/", "Herons", text, "2026-01-01") for i in range(3)]
    other = [
        IndexedPage(
            f"https://one.example/{i}", f"Herons {i}", f"Heron note {i}. " + word * 60, "2026-01-01"
        )
        for i, word in enumerate(("alpha ", "beta ", "gamma ", "delta "))
    ]
    backend.index([*same, *other])
    backend.commit()
    response = run(backend, "herons", max_per_host=1)
    top = next(r for r in response.results if r.duplicates)
    assert top.duplicates == 2
    assert len(top.alternates) == 2
    assert len(run(backend, "herons", dedupe=False).results) == 7
    hosts = [r.url.split("/")[2] for r in response.results]
    assert hosts[:2].count("one.example") == 1


def test_near_duplicates_need_like_lengths() -> None:
    text = " ".join(f"word{i}" for i in range(3000))
    changed = text.replace("word7 ", "other ")
    assert near_duplicates(fingerprint(text), fingerprint(changed))
    assert not near_duplicates(fingerprint(text), fingerprint(text + " more" * 3000))
    assert not near_duplicates(fingerprint("short a"), fingerprint("short b"))


def test_authority_follows_the_published_formula() -> None:
    assert authority("https://www.cdc.gov/x").tier == 4
    assert authority("https://someone.example/").basis == ["prior:unknown"]
    evidence = LinkEvidence(
        harmonic_position=0, pagerank_position=0, hosts=1000, referring_domains=15
    )
    value, inputs = explain("https://someone.example/", evidence)
    assert inputs["evidence"] == 4.0
    assert value.score == pytest.approx((4 * 1.0 + 4 * 0.35) / 8)
    assert authority("https://me.example/@user", evidence).score <= 0.6
    assert authority("https://x.notgov/").score == authority("https://y.example/").score


def test_ingesting_a_folder_twice_writes_once(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "a.html").write_text("<title>Newts</title><p>" + "Newts live in ponds. " * 20)
    (folder / "b.md").write_text("# Frogs\n\nFrogs sing at night.\n")
    (folder / "c.bin").write_bytes(b"\0\1\2")
    (folder / "link.html").symlink_to("/etc/hostname")
    backend = TantivyBackend(tmp_path / "index-folder")

    def ingest() -> Any:
        return asyncio.run(Ingester(backend).run(Source("file", str(folder))))

    first = ingest()
    assert first.indexed == 2
    assert first.skipped == {"file_type": 1}
    second = ingest()
    assert (second.indexed, second.updated, second.unchanged) == (0, 0, 2)
    (folder / "b.md").write_text("# Frogs\n\nFrogs are silent in winter.\n")
    assert ingest().updated == 1
    assert backend.size() == 2
    again = TantivyBackend(tmp_path / "index-folder")
    assert urls(run(again, "silent frogs"))[0].endswith("/b.md")
    assert run(again, "sing night").results == []


def test_jsonl_lines_that_are_wrong_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "pages.jsonl.gz"
    rows = [json.dumps({"url": "https://a.example/?utm_source=x", "title": "T", "text": "newts"}),
            "not json", json.dumps({"title": "no url"}), ""]  # fmt: skip
    file.write_bytes(gzip.compress("\n".join(rows).encode()))
    backend = TantivyBackend(None)
    report = asyncio.run(Ingester(backend).run(Source("jsonl", str(file))))
    assert (report.seen, report.indexed, report.failed) == (3, 1, {"invalid_line": 2})
    assert urls(run(backend, "newts")) == ["https://a.example/"]


def test_a_missing_path_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequestError, match="does not exist"):
        asyncio.run(Ingester(TantivyBackend(None)).run(Source("file", "/no/such/path")))


def test_sitemaps_lead_to_pages_and_private_links_in_them_are_refused(
    config: Config,
    site: Listener,
    target: Listener,
    make_client: Callable[..., AsyncSearchFetch],
) -> None:
    base = f"http://public.test:{site.port}"
    site.page(
        "/map.xml", f"<sitemapindex><sitemap><loc>{base}/pages.xml</loc></sitemap></sitemapindex>"
    )
    locations = [f"{base}/newts", f"{base}/gone", f"http://127.0.0.1:{target.port}/"]
    entries = "".join(f"<url><loc>{loc}</loc></url>" for loc in locations)
    site.page("/pages.xml", f"<urlset>{entries}</urlset>", content_type="application/xml")
    site.page("/newts", "<title>Newts</title><p>" + "Newts live in ponds. " * 20)
    config = config.model_copy(update={"ports": (*config.ports, target.port)})
    client = make_client(config)
    report = asyncio.run(client.ingest(f"{base}/map.xml"))
    assert report.indexed == 1
    assert report.failed == {"blocked_address": 1, "upstream_http": 1}
    found = asyncio.run(client.search(SearchRequest(query="newts ponds")))
    assert urls(found) == [f"{base}/newts"]


def test_sitemap_entities_are_not_expanded() -> None:
    body = b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><urlset><url><loc>&e;</loc></url></urlset>'
    assert parse_sitemap(body) == ([], [])
    assert parse_sitemap(gzip.compress(b"<urlset><url><loc>http://a/</loc></url></urlset>")) == (
        [],
        [Entry("http://a/")],
    )


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    first, second = TantivyBackend(tmp_path), TantivyBackend(tmp_path, lock_seconds=0.1)
    page = IndexedPage("https://a.example/", "A", "text", "2026-01-01")
    first.index([page])
    with pytest.raises(LimitError) as caught:
        second.index([page])
    assert caught.value.code == "host_busy"
    first.commit()
    second.index([page])
    second.commit()
    assert second.size() == 1


def test_an_index_of_another_analyzer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation.json").write_text('{"analyzer": 0, "generation": 3}')
    with pytest.raises(InvalidRequestError, match="analyzer 0"):
        TantivyBackend(tmp_path)


def test_ranking_does_not_depend_on_the_hash_seed() -> None:
    script = (
        "from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend\n"
        "from deepinfer_search_fetch.index.document import IndexedPage\n"
        "from deepinfer_search_fetch.search.engine import search\n"
        "from deepinfer_search_fetch.models import SearchRequest\n"
        "b = TantivyBackend(None)\n"
        "b.index(IndexedPage(f'https://h{i}.example/', f'Page {i}', f'newts ponds frogs {i} ' * (i + 3),"
        " '2026-01-01') for i in range(20))\n"
        "b.commit()\n"
        "r = search(b, SearchRequest(query='newts in ponds with frogs and toads'), clock=lambda: 0.0)\n"
        "print(r.model_dump_json(exclude={'elapsed_ms'}))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1
